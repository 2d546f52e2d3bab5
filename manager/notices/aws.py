"""AWS: spot interruptions and rebalance recommendations, by IMDSv2.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
.../rebalance-recommendations.html
"""

from __future__ import annotations

import threading
import time
from datetime import datetime

from manager.host.plain_http import HttpAnswer, HttpFailed, fetch
from manager.notices.source import NoticeUnavailable, Standing, checked, json_of, lead_s

METADATA_URL = "http://169.254.169.254"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_TTL_S = 21600
RENEW_SHARE = 0.9
TIMEOUT_S = 5.0


class AwsMetadata:
    """The instance metadata service, with a token that is renewed before it expires and when it is refused."""

    def __init__(
        self, metadata_url: str = METADATA_URL, token_ttl_s: int = TOKEN_TTL_S, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._url = metadata_url
        self._token_ttl_s = token_ttl_s
        self._timeout_s = timeout_s
        self._token = ""
        self._renew_at_s = 0.0
        self._lock = threading.Lock()

    def get(self, path: str) -> HttpAnswer | None:
        """Return the answer; None if there is none (404); NoticeUnavailable if it is not usable."""
        answer = self._call("GET", path, {"X-aws-ec2-metadata-token": self._current_token()})
        if answer.status == 401:  # the token is refused, although it should still be valid
            self._forget_token()
            answer = self._call("GET", path, {"X-aws-ec2-metadata-token": self._current_token()})
        return None if answer.status == 404 else checked(answer, path)

    def _current_token(self) -> str:
        with self._lock:
            if not self._token or time.monotonic() >= self._renew_at_s:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._token_ttl_s)}
                asked_s = time.monotonic()
                answer = checked(self._call("PUT", "/latest/api/token", headers), "the session token")
                self._token = answer.text.strip()
                self._renew_at_s = asked_s + RENEW_SHARE * self._token_ttl_s
            return self._token

    def _forget_token(self) -> None:
        with self._lock:
            self._token = ""

    def _call(self, method: str, path: str, headers: dict[str, str]) -> HttpAnswer:
        try:
            return fetch(self._url + path, timeout_s=self._timeout_s, method=method, headers=headers)
        except HttpFailed as error:
            raise NoticeUnavailable(str(error)) from error


class _AwsSource:
    def __init__(self, metadata: AwsMetadata) -> None:
        self._metadata = metadata

    def acknowledge(self, notice: str) -> None:
        """Do nothing: AWS has no acknowledgement."""


class AwsInterruptions(_AwsSource):
    """The notice, usually two minutes before an instance is stopped, hibernated or terminated."""

    name = "aws"

    def standing(self) -> tuple[Standing, ...]:
        answer = self._metadata.get(ACTION_PATH)
        if answer is None:
            return ()
        action, at = _fields(answer, ACTION_PATH, "action", "time")
        return (Standing(notice=f"aws {action} {at}", lead_s=lead_s(_moment_s(at, ACTION_PATH), answer)),)


class AwsRebalance(_AwsSource):
    """The recommendation for an instance at elevated risk, earlier than an interruption or without one."""

    name = "aws rebalance"

    def standing(self) -> tuple[Standing, ...]:
        answer = self._metadata.get(REBALANCE_PATH)
        if answer is None:
            return ()
        (at,) = _fields(answer, REBALANCE_PATH, "noticeTime")
        return (Standing(notice=f"aws rebalance {at}", lead_s=None, certain=False),)


def _fields(answer: HttpAnswer, what: str, *names: str) -> tuple[str, ...]:
    document = json_of(answer, what)
    values = tuple(document.get(name) for name in names)
    if not all(isinstance(value, str) for value in values):
        raise NoticeUnavailable(f"{what}: {' or '.join(names)} is missing")
    return tuple(str(value) for value in values)


def _moment_s(text: str, what: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise NoticeUnavailable(f"{what}: {text!r} is not a time") from error
    if moment.tzinfo is None:
        raise NoticeUnavailable(f"{what}: {text!r} names no time zone")
    return moment.timestamp()

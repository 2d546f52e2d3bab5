"""The connection to AWS: the user's login, translation of errors, and checked reading of answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
)
from botocore.parsers import ResponseParserError

from manager.providers.aws.errors import EXPIRED, provider_error
from manager.providers.aws.spec import AwsSpec
from manager.providers.interface.provider import Misconfigured, ProviderError, Transient

CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
NUM_ATTEMPTS = 4
"""Attempts at a call that was throttled or not answered: botocore pauses ever longer, up to 20 s."""
MAX_PER_PAGE = 1000
PRICES_REGION = "us-east-1"
"""The region whose endpoint has the prices of all regions."""
NOT_LOGGED_IN = (
    CredentialRetrievalError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
)


def aws_client(spec: AwsSpec, service: str = "ec2", attempts: int = NUM_ATTEMPTS) -> Any:
    """Open a client of a service, with credentials from the environment, files, or the instance's role."""
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": attempts},
        user_agent_extra="morph",
    )
    region = PRICES_REGION if service == "pricing" else spec.region
    endpoint = spec.endpoint if service == "ec2" else None
    return Session().client(service, region_name=region, endpoint_url=endpoint, config=config)


class Aws:
    """Calls of one service, by any thread; ``open_client``: called again when credentials have expired."""

    def __init__(self, open_client: Callable[[], Any]) -> None:
        self._open = open_client
        self._client: Any = None
        self._lock = threading.Lock()

    def call(self, operation: str, what: str, **parameters: Any) -> dict[str, Any]:
        """Make a call, named as in botocore. ProviderError, beginning with ``what``: it was perhaps not carried out."""
        renewed = False
        while True:
            try:
                answer = getattr(self._opened(renew=renewed), operation)(**parameters)
                break
            except ClientError as error:
                if code_of(error) in EXPIRED and not renewed:
                    renewed = True
                    continue
                raise _translated(error, what) from error
            except (BotoCoreError, ResponseParserError) as error:
                raise _unanswered(error, what) from error
        if not isinstance(answer, dict):
            raise Transient(f"{what}: the answer cannot be read")
        return answer

    def pages(self, operation: str, key: str, what: str, **parameters: Any) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield each entry of a list with its answer's date, by AWS's clock. ProviderError: a part is unknown."""
        seen: set[str] = set()
        while True:
            answer = self.call(operation, what, **parameters)
            date = str(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", ""))
            if not isinstance(answer.get(key), list):
                raise Transient(f"{what}: the answer is not a list")
            yield from ((entry, date) for entry in answer[key])
            token = answer.get("NextToken")
            if not token:
                return
            if token in seen:
                raise Transient(f"{what}: the answer's pages do not end")
            seen.add(token)
            parameters["NextToken"] = token

    def _opened(self, *, renew: bool) -> Any:
        with self._lock:
            if self._client is None or renew:
                self._client = self._open()
            return self._client


def code_of(error: BaseException | None) -> str:
    """Return AWS's code of an error of its SDK, or of an error of ours with such a cause; empty: there is none."""
    refusal = error if isinstance(error, ClientError) else getattr(error, "__cause__", None)
    return str(refusal.response.get("Error", {}).get("Code", "")) if isinstance(refusal, ClientError) else ""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Read an answer in a ``with`` block; an answer of an unexpected shape raises Transient."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise Transient(f"{what}: the answer cannot be read: {error!r}") from error


def _translated(error: ClientError, what: str) -> ProviderError:
    said = error.response.get("Error", {})
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    return provider_error(str(said.get("Code", "")), str(said.get("Message", "")), status, what)


def _unanswered(error: Exception, what: str) -> ProviderError:
    text = f"{what}{': ' if what else ''}{' '.join(str(error).split())}"
    if isinstance(error, NoCredentialsError):
        text += " (`aws configure`, AWS_PROFILE, or an instance with a role)"
    if isinstance(error, NOT_LOGGED_IN) and not isinstance(error, HTTPClientError):
        return Misconfigured(text)
    return Transient(text)

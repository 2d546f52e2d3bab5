"""The contract of every notice source, tested with a metadata service of the documented form."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any
from urllib.parse import urlsplit

import pytest

from manager.host.plain_http import HttpAnswer, fetch
from manager.notices.aws import ACTION_PATH, REBALANCE_PATH, AwsInterruptions, AwsMetadata, AwsRebalance
from manager.notices.azure import EVENTS_PATH, NAME_PATH, AzureNotices
from manager.notices.gcp import PREEMPTED_PATH, GcpNotices
from manager.notices.source import NoticeSource, NoticeUnavailable
from manager.notices.watch import Given, NoticeWatch, Told, Trouble, Withdrawn
from tests.notices.metadata_server import MetadataServer, Reply, json_reply

LEAD_S = 120
BOUND_S = 0.6
PATIENCE_S = 60.0
"""The time-out of calls that are answered, however slow this machine is."""


@dataclass(frozen=True)
class Case:
    """A source, and the replies of its cloud without a notice and with one."""

    make: Callable[[MetadataServer], NoticeSource]
    path: str
    none: Callable[[], Reply]
    one: Callable[[], Reply]
    certain: bool = True
    knows_lead: bool = True


def azure(server: MetadataServer) -> NoticeSource:
    server.script("GET", NAME_PATH, Reply(body="vm_3"))
    return AzureNotices(server.url, first_timeout_s=BOUND_S, timeout_s=BOUND_S)


def azure_events(*events: dict[str, object]) -> Reply:
    azure_events.incarnation += 1  # type: ignore[attr-defined]
    return json_reply({"DocumentIncarnation": azure_events.incarnation, "Events": list(events)})  # type: ignore[attr-defined]


azure_events.incarnation = 0  # type: ignore[attr-defined]


def preempt(event_id: str = "E-1", **fields: object) -> dict[str, object]:
    return {
        "EventId": event_id,
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["vm_3"],
        "EventStatus": "Scheduled",
        "NotBefore": formatdate(time.time() + LEAD_S, usegmt=True),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
        **fields,
    }


def aws_metadata(server: MetadataServer) -> AwsMetadata:
    server.script("PUT", "/latest/api/token", Reply(body="t0k3n"))
    return AwsMetadata(server.url, timeout_s=BOUND_S)


def utc(offset_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + offset_s))


CASES = {
    "azure": Case(azure, EVENTS_PATH, azure_events, lambda: azure_events(preempt())),
    "aws": Case(
        lambda server: AwsInterruptions(aws_metadata(server)),
        ACTION_PATH,
        lambda: Reply(status=404),
        lambda: json_reply({"action": "terminate", "time": utc(LEAD_S)}),
    ),
    "aws rebalance": Case(
        lambda server: AwsRebalance(aws_metadata(server)),
        REBALANCE_PATH,
        lambda: Reply(status=404),
        lambda: json_reply({"noticeTime": utc(0)}),
        certain=False,
        knows_lead=False,
    ),
    "gcp": Case(
        lambda server: GcpNotices(server.url, wait_s=0, margin_s=BOUND_S),
        PREEMPTED_PATH,
        lambda: Reply(body="FALSE", headers={"ETag": "a1"}),
        lambda: Reply(body="TRUE", headers={"ETag": "a2"}),
    ),
}
ERRORS = {
    "410": lambda: Reply(status=410),
    "429": lambda: Reply(status=429, headers={"Retry-After": "7"}),
    "500": lambda: Reply(status=500, body="oops"),
    "302": lambda: Reply(status=302, headers={"Location": "http://example.invalid/"}),
    "dropped": lambda: Reply(drop=True),
    "cut short": lambda: Reply(body="{", short=True),
    "not the documented shape": lambda: Reply(body="<html>"),
    "too slow": lambda: Reply(wait=threading.Event()),
    "without an end": lambda: Reply(body="{", drip=True),
}
SLOW = ("too slow", "without an end")


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(autouse=True)
def patient(metadata: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a source's time-out short only for replies that never come."""

    def fetch_patiently(url: str, *, timeout_s: float, method: str = "GET", **rest: Any) -> HttpAnswer:
        assert timeout_s <= BOUND_S
        reply = metadata.next_reply(method, urlsplit(url).path)
        endless = reply.wait is not None or reply.drip
        return fetch(url, timeout_s=timeout_s if endless else PATIENCE_S, method=method, **rest)

    for name in ("aws", "azure", "gcp"):
        monkeypatch.setattr(f"manager.notices.{name}.fetch", fetch_patiently)


def watched(source: NoticeSource) -> tuple[NoticeWatch, list[Told]]:
    told: list[Told] = []
    return NoticeWatch(source, told.append), told


def test_a_notice_is_reported_once_and_its_withdrawal_too(metadata: MetadataServer, case: Case) -> None:
    source, one = case.make(metadata), case.one()
    metadata.script("GET", case.path, case.none(), one, one, case.none(), case.none())
    watch, told = watched(source)
    for _ in range(5):
        watch.poll()
    given, withdrawn = told
    assert isinstance(given, Given)
    assert withdrawn == Withdrawn(notice=given.notice, certain=case.certain)
    assert given.certain is case.certain
    if case.knows_lead:
        assert given.lead_s is not None
        assert 0 < given.lead_s <= LEAD_S + 1
    else:
        assert given.lead_s is None


def test_a_notice_that_returns_is_reported_again(metadata: MetadataServer, case: Case) -> None:
    source = case.make(metadata)
    metadata.script("GET", case.path, case.one(), case.none(), case.one())
    watch, told = watched(source)
    for _ in range(3):
        watch.poll()
    assert [type(entry) for entry in told] == [Given, Withdrawn, Given]


@pytest.mark.parametrize("error", sorted(ERRORS))
def test_an_error_is_reported_in_bounded_time_and_notices_stay(
    metadata: MetadataServer, case: Case, error: str
) -> None:
    source, one = case.make(metadata), case.one()
    again = ERRORS[error]() if error not in SLOW else Reply(status=500)
    metadata.script("GET", case.path, one, ERRORS[error](), again, one, one)
    watch, told = watched(source)
    watch.poll()
    waits_s = [watch.poll(), watch.poll()]
    watch.poll()
    given, trouble, *_, over = told
    assert len(told) == (4 if error in SLOW else 3)
    assert isinstance(given, Given)
    assert isinstance(trouble, Trouble)
    assert trouble.sentence
    assert (f"no answer within {BOUND_S:g} s" in trouble.sentence) is (error in SLOW)
    assert over == Trouble(source=source.name, sentence="")
    assert waits_s[0] <= waits_s[1]
    assert waits_s[0] == 7 or error != "429"


def test_a_source_without_replies_raises_its_own_error(metadata: MetadataServer, case: Case) -> None:
    source = case.make(metadata)
    metadata.script("GET", case.path, Reply(drop=True))
    metadata.script("PUT", "/latest/api/token", Reply(drop=True))
    with pytest.raises(NoticeUnavailable):
        source.standing()


def test_polling_continues_in_its_thread_until_closed(metadata: MetadataServer, case: Case) -> None:
    source = case.make(metadata)
    metadata.script("GET", case.path, Reply(status=500), Reply(drop=True), case.one())
    given = threading.Event()
    watch = NoticeWatch(source, lambda told: given.set() if isinstance(told, Given) else None, every_s=0.01)
    before = set(threading.enumerate())
    watch.start()
    assert given.wait(PATIENCE_S)
    watch.close()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("morph-notices"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_leaving_is_acknowledged_once_and_only_where_it_stands(metadata: MetadataServer, case: Case) -> None:
    source, one = case.make(metadata), case.one()
    metadata.script("GET", case.path, one)
    metadata.script("POST", case.path, Reply(body=""))
    watch, told = watched(source)
    watch.left("another")
    watch.poll()
    assert not [asked for asked in metadata.asked if asked.method == "POST"]
    (given,) = told
    assert isinstance(given, Given)
    watch.left(given.notice)
    for _ in range(3):
        watch.poll()
    posts = [asked for asked in metadata.asked if asked.method == "POST"]
    assert len(posts) == (1 if source.name == "azure" else 0)
    assert len(told) == 1

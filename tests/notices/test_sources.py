"""Notice sources, tested with a metadata service of the documented form."""

from __future__ import annotations

import json
import threading
import time
from email.utils import formatdate

import pytest

from manager.notices.aws import ACTION_PATH, AwsInterruptions, AwsMetadata
from manager.notices.azure import EVENTS_PATH, NAME_PATH, AzureNotices
from manager.notices.gcp import PREEMPTED_PATH, GcpNotices
from manager.notices.source import NoticeUnavailable
from manager.notices.watch import NoticeWatch
from tests.notices.metadata_server import HANG_BOUND_S, MetadataServer, Reply, json_reply
from tests.notices.test_contract import preempt
from tests.waiting import BOUND_S

TOKEN = "/latest/api/token"


def puts(server: MetadataServer) -> int:
    return sum(asked.method == "PUT" for asked in server.asked)


def test_a_token_is_asked_for_once_and_sent_with_every_request(metadata: MetadataServer) -> None:
    metadata.script("PUT", TOKEN, Reply(body="abc"))
    source = AwsInterruptions(AwsMetadata(metadata.url))
    assert [source.standing() for _ in range(3)] == [(), (), ()]
    assert puts(metadata) == 1
    assert metadata.asked[0].headers["x-aws-ec2-metadata-token-ttl-seconds"] == "21600"
    assert {asked.headers["x-aws-ec2-metadata-token"] for asked in metadata.asked[1:]} == {"abc"}


def test_a_token_is_renewed_before_it_expires(metadata: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata.script("PUT", TOKEN, Reply(body="abc"), Reply(body="def"))
    source = AwsInterruptions(AwsMetadata(metadata.url, token_ttl_s=100))
    source.standing()
    now_s = time.monotonic()
    monkeypatch.setattr("manager.notices.aws.time.monotonic", lambda: now_s + 95)
    source.standing()
    assert puts(metadata) == 2
    assert metadata.asked[-1].headers["x-aws-ec2-metadata-token"] == "def"


def test_a_refused_token_is_replaced_at_once(metadata: MetadataServer) -> None:
    metadata.script("PUT", TOKEN, Reply(body="abc"), Reply(body="def"))
    metadata.script("GET", ACTION_PATH, Reply(status=401), Reply(status=404))
    assert AwsInterruptions(AwsMetadata(metadata.url)).standing() == ()
    assert puts(metadata) == 2


def test_a_service_that_takes_no_token_is_an_error(metadata: MetadataServer) -> None:
    metadata.script("PUT", TOKEN, Reply(body="abc"))
    metadata.script("GET", ACTION_PATH, Reply(status=401))
    with pytest.raises(NoticeUnavailable, match="401"):
        AwsInterruptions(AwsMetadata(metadata.url)).standing()
    assert len(metadata.asked) == 4


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_every_action_takes_the_vm(metadata: MetadataServer, action: str) -> None:
    metadata.script("PUT", TOKEN, Reply(body="abc"))
    metadata.script("GET", ACTION_PATH, json_reply({"action": action, "time": "2020-09-18T08:22:00Z"}))
    (standing,) = AwsInterruptions(AwsMetadata(metadata.url)).standing()
    assert (standing.notice, standing.lead_s) == (f"aws {action} 2020-09-18T08:22:00Z", 0.0)


@pytest.mark.parametrize("answer", [{"action": "stop"}, {"action": "stop", "time": "soon"}, {"time": 3, "action": 4}])
def test_an_action_without_a_time_is_an_error(metadata: MetadataServer, answer: object) -> None:
    metadata.script("PUT", TOKEN, Reply(body="abc"))
    metadata.script("GET", ACTION_PATH, json_reply(answer))
    with pytest.raises(NoticeUnavailable, match=ACTION_PATH):
        AwsInterruptions(AwsMetadata(metadata.url)).standing()


def test_gcp_is_asked_outright_first_and_waited_for_after_that(metadata: MetadataServer) -> None:
    metadata.script(
        "GET", PREEMPTED_PATH, Reply(body="FALSE", headers={"ETag": "a1"}), Reply(body="TRUE", headers={"ETag": "a2"})
    )
    source = GcpNotices(metadata.url, wait_s=3)
    assert source.standing() == ()
    assert len(source.standing()) == 1
    first, second = metadata.asked
    assert first.path == PREEMPTED_PATH
    assert second.path.endswith("?wait_for_change=true&timeout_sec=3&last_etag=a1")
    assert {asked.headers["metadata-flavor"] for asked in metadata.asked} == {"Google"}


def source(server: MetadataServer) -> AzureNotices:
    server.script("GET", NAME_PATH, Reply(body="vm_3\n"))
    return AzureNotices(server.url, first_timeout_s=BOUND_S, timeout_s=BOUND_S)


def document(incarnation: int, *events: dict[str, object]) -> Reply:
    return json_reply({"DocumentIncarnation": incarnation, "Events": list(events)})


def test_the_first_call_may_take_long_and_later_ones_may_not(metadata: MetadataServer) -> None:
    azure, held = source(metadata), threading.Event()
    azure._vm, azure._timeout_s = "vm_3", 0.3  # its name is known, so that this call too may not take long
    metadata.script("GET", EVENTS_PATH, Reply(body='{"DocumentIncarnation": 1, "Events": []}', wait=held))
    threading.Timer(0.8, held.set).start()
    assert azure.standing() == ()
    metadata.script("GET", EVENTS_PATH, Reply(wait=threading.Event()))
    begin_s = time.monotonic()
    with pytest.raises(NoticeUnavailable, match=r"no answer within 0\.3 s"):
        azure.standing()
    assert time.monotonic() - begin_s < HANG_BOUND_S


def test_every_request_carries_the_metadata_header_and_the_version(metadata: MetadataServer) -> None:
    azure = source(metadata)
    metadata.script("GET", EVENTS_PATH, document(1, preempt()))
    metadata.script("POST", EVENTS_PATH, Reply())
    azure.standing()
    azure.acknowledge("E-1")
    assert len(metadata.asked) == 3
    assert all(asked.headers["metadata"] == "true" and "api-version=20" in asked.path for asked in metadata.asked)
    assert json.loads(metadata.asked[-1].body) == {"StartRequests": [{"EventId": "E-1"}]}


def test_events_of_other_vms_and_other_kinds_are_ignored(metadata: MetadataServer) -> None:
    azure = source(metadata)
    other, reboot = preempt("E-2", Resources=["vm_4"]), preempt("E-3", EventType="Reboot")
    metadata.script("GET", EVENTS_PATH, document(1, other, reboot, preempt("E-4", Resources=["vm_4", "vm_3"])))
    assert [standing.notice for standing in azure.standing()] == ["E-4"]


def test_the_lead_is_read_from_the_services_own_clock(metadata: MetadataServer) -> None:
    azure = source(metadata)
    far_s = time.time() - 86400  # its clock is a day behind this one
    event = preempt(NotBefore=formatdate(far_s + 30, usegmt=True))
    metadata.script("GET", EVENTS_PATH, document(1, event))
    assert azure.standing()[0].lead_s == 0.0
    metadata.date = formatdate(far_s, usegmt=True)
    assert azure.standing()[0].lead_s == pytest.approx(30.0, abs=1.0)


def test_an_event_that_has_started_leaves_no_time(metadata: MetadataServer) -> None:
    azure = source(metadata)
    metadata.script("GET", EVENTS_PATH, document(1, preempt(EventStatus="Started", NotBefore="")))
    assert azure.standing()[0].lead_s == 0.0


def test_an_unchanged_document_is_not_read_again(metadata: MetadataServer) -> None:
    azure = source(metadata)
    metadata.script("GET", EVENTS_PATH, document(5, preempt()), document(5), document(6))
    assert [len(azure.standing()) for _ in range(3)] == [1, 1, 0]


@pytest.mark.parametrize("events", ["none", [1], {"a": 1}])
def test_a_document_of_another_shape_is_an_error(metadata: MetadataServer, events: object) -> None:
    azure = source(metadata)
    metadata.script("GET", EVENTS_PATH, json_reply({"DocumentIncarnation": 1, "Events": events}))
    with pytest.raises(NoticeUnavailable, match="Events is not a list"):
        azure.standing()


def test_a_refused_acknowledgement_is_tried_again(metadata: MetadataServer) -> None:
    azure = source(metadata)
    metadata.script("GET", EVENTS_PATH, document(1, preempt()))
    metadata.script("POST", EVENTS_PATH, Reply(status=429), Reply(status=500), Reply())
    watch = NoticeWatch(azure, lambda _told: None)
    watch.poll()
    watch.left("E-1")
    for _ in range(5):
        watch.poll()
    assert sum(asked.method == "POST" for asked in metadata.asked) == 3

from __future__ import annotations

import time

import pytest

from manager.notices.aws import ACTION_PATH, AwsInterruptions, AwsMetadata
from manager.notices.gcp import PREEMPTED_PATH, GcpNotices
from manager.notices.source import NoticeUnavailable
from tests.notices.metadata_server import MetadataServer, Reply, json_reply

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


def test_a_service_that_takes_no_token_is_an_error_and_is_not_asked_without_end(metadata: MetadataServer) -> None:
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

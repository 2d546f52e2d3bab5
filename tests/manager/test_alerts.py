"""Alerts: each trouble is reported once, by webhook and command, and a failing receiver affects only itself."""

from __future__ import annotations

import base64
import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from simulated_cluster import Faults, JournalledCluster

from manager.host.plain_http import fetch
from manager.run_dir import JOURNAL
from manager.trackers import alerts
from manager.trackers.alerts import Alerts, check_notify, webhook_variables
from manager.trackers.process import Watching
from manager.trackers.supervisor import Watchers, environment_of
from morph.contract.cluster import ClusterConfig, Notify
from morph.contract.errors import ConfigError
from morph.contract.happenings import Happening, RunEnded, StepDone, Trouble
from tests.notices.metadata_server import Reply, served
from tests.waiting import BOUND_S

BEGAN_S = 1_800_000_000.0


class Desk:
    """A run's alerts through a command that records its input, on a clock that the test sets."""

    def __init__(
        self, folder: Path, budget_usd: float | None = None, *, forever: bool = False, **notify: object
    ) -> None:
        self.folder, self.now_s, self.said = folder, BEGAN_S, list[str]()
        (folder / "trackers").mkdir(exist_ok=True)
        notify.setdefault("command", writes_down(folder))
        self.notify = Notify.model_validate(notify)
        self.alerts = Alerts(
            folder, "tiny", self.notify, budget_usd, self.said.append, lambda: self.now_s, forever=forever
        )
        self.alerts.open()
        noted = folder / "trackers" / "notify.json"
        self._sequence = int(json.loads(noted.read_text())["sequence"]) if noted.exists() else 0

    def tell(self, happening: Happening) -> None:
        self._sequence += 1
        assert self.alerts.begin(self._sequence)
        self.alerts.tell(happening)

    def step(self, step: int, dollars: float | None = None) -> None:
        self.tell(
            StepDone(
                step=step,
                time_s=self.now_s,
                loss=1.0,
                metrics={},
                gradient_norm=None,
                learning_rates=None,
                skipped=False,
                seconds=1.0,
                pause_s=0.0,
                examples_per_s=None,
                tokens_per_s=None,
                shape="1x1",
                num_workers=1,
                dollars=dollars,
            )
        )

    def trouble(self, kind: str, sentence: str = "vm3 could not be set up") -> None:
        self.tell(Trouble.model_validate({"step": 4, "time_s": self.now_s, "kind": kind, "sentence": sentence}))

    def end(self, outcome: str, sentence: str = "no", **fields: object) -> None:
        end = {"step": 7, "time_s": self.now_s, "outcome": outcome, "sentence": sentence, **fields}
        self.tell(RunEnded.model_validate(end))

    def told(self) -> list[str]:
        return told(self.folder)


def writes_down(folder: Path) -> tuple[str, ...]:
    return ("sh", "-c", f"cat >> {folder}/told.jsonl; echo >> {folder}/told.jsonl")


def told(folder: Path) -> list[str]:
    path = folder / "told.jsonl"
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()] if path.exists() else []


def test_stalled_training_is_reported_once_as_is_its_continuation(tmp_path: Path) -> None:
    desk = Desk(tmp_path, stopped_min=10)
    desk.step(1)
    for passed_s in (300, 290, 20, 60):
        desk.now_s += passed_s
        desk.alerts.flush()
    assert desk.told() == ["training_stopped"]
    again = Desk(tmp_path, stopped_min=10)  # another process, later
    again.now_s = desk.now_s
    again.step(2)
    again.alerts.flush()
    assert desk.told() == ["training_stopped", "training_goes_on"]
    payload = json.loads((tmp_path / "told.jsonl").read_text().splitlines()[0])
    assert payload.pop("host")
    assert payload == {
        "schema_version": 1,
        "kind": "training_stopped",
        "job": "tiny",
        "run_dir": str(tmp_path),
        "step": 1,
        "time": "2027-01-15T08:10:10+00:00",
        "sentence": "no step was decided for 10 minutes",
        "text": f"tiny ({tmp_path}): no step was decided for 10 minutes",
    }


def test_the_same_trouble_is_reported_once_an_hour_without_floods(tmp_path: Path) -> None:
    desk = Desk(tmp_path, budget_usd=10.0)
    for kind in ("setup_failed", "bad_step", "setup_failed", "not_saved"):
        desk.trouble(kind)
    assert desk.told() == ["setup_failed", "bad_step", "not_saved"]
    desk.now_s += alerts.AGAIN_S
    desk.trouble("setup_failed")
    desk.step(5, dollars=7.9)
    desk.step(6, dollars=8.1)
    desk.step(7, dollars=8.2)
    assert desk.told()[3:] == ["setup_failed", "budget"]
    for _ in range(30):
        desk.tell(RunEnded(step=7, time_s=desk.now_s, outcome="failed", sentence="no"))
    assert desk.told()[5:] == ["ended"] * (alerts.AT_MOST - 2)
    assert Desk(tmp_path, budget_usd=10.0).told() == desk.told()
    assert not desk.alerts.begin(3), "what was told is not told again"


def test_a_rest_is_reported_once_until_the_run_trains_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path, stopped_min=10)
    for _ in range(5):
        desk.end("stopped", "vm3 could not be set up", rests=True)
        desk.now_s += 7000
        desk.trouble("setup_failed")
        desk.alerts.flush()
    assert desk.told() == ["ended"]
    assert "it tries again by itself" in (tmp_path / "told.jsonl").read_text()
    desk.step(8)
    desk.trouble("setup_failed")
    desk.end("failed")
    assert desk.told() == ["ended", "training_goes_on", "setup_failed", "ended"]


def test_a_run_forever_is_reported_once_until_training_and_at_its_end(tmp_path: Path) -> None:
    for _ in range(3):
        again = Desk(tmp_path, forever=True, stopped_min=10)  # beside one manager after the other
        again.end("failed", "the disk is full")
        again.alerts.manager_gone()
    killed = Desk(tmp_path, forever=True)
    killed.alerts.manager_gone()
    assert killed.told() == ["ended"]
    killed.step(8)
    killed.alerts.manager_gone()
    assert killed.told() == ["ended", "training_goes_on", "manager_gone"]
    for number, end in enumerate(({"outcome": "finished"}, {"outcome": "stopped", "sentence": "SIGTERM; saved"})):
        Desk(tmp_path, forever=True).end(**end)
        assert killed.told()[3:] == ["ended"] * (number + 1)
    Desk(tmp_path, forever=True).end("stopped", at_limit=True)
    assert killed.told()[3:] == ["ended"] * 3
    assert "morph resume" not in (tmp_path / "told.jsonl").read_text()


def test_old_events_are_not_reported(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.now_s = BEGAN_S - 2 * alerts.AGAIN_S
    desk.trouble("bad_step")
    desk.tell(RunEnded(step=7, time_s=desk.now_s, outcome="stopped", sentence="yesterday"))
    assert desk.told() == []


def test_a_failing_webhook_is_retried_and_its_url_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "TRY_AFTER_S", (0.0, 0.0, 0.0))
    with served() as server:
        monkeypatch.setenv("HOOK", f"{server.url}/secret-way?key=secret")
        server.script("POST", "/secret-way", Reply(status=503), Reply(drop=True), Reply(status=200))
        desk = Desk(tmp_path, webhook="$HOOK", command=())
        desk.trouble("bad_step", "step 4 is bad")
        assert desk.said == []
        assert [one.method for one in server.asked] == ["POST"] * 3
        assert json.loads(server.asked[-1].body)["sentence"] == "step 4 is bad"
        assert server.asked[-1].headers["content-type"] == "application/json"
        for reply, wrong, num_asked in (
            (Reply(status=403), "its answer is 403", 1),
            (Reply(status=500), "its answer is 500", 3),
        ):
            server.script("POST", "/secret-way", reply)
            server.asked.clear()
            desk.now_s += alerts.AGAIN_S
            desk.trouble("bad_step")
            assert desk.said.pop() == f"an alert (bad_step) did not reach the webhook: {wrong}"
            assert len(server.asked) == num_asked
    desk.now_s += alerts.AGAIN_S
    desk.trouble("bad_step")
    assert desk.said == ["an alert (bad_step) did not reach the webhook: ConnectionRefusedError"]
    literal = Notify(webhook="https://hooks.example.com/secret")
    assert "secret" not in repr(ClusterConfig(notify=literal))
    assert webhook_variables(literal) == {}
    assert webhook_variables(desk.notify) == {"HOOK": f"{server.url}/secret-way?key=secret"}


def test_an_outside_webhook_is_reached_by_the_environments_proxy_and_a_metadata_service_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the receiver is known to the proxy alone."""
    monkeypatch.setattr(alerts, "TRY_AFTER_S", (0.0,))
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    outside, login = "outside.invalid/way?key=secret", f"Basic {base64.b64encode(b'me:p@ss').decode()}"
    with served() as proxy, served() as direct:
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy.url.replace("http://", "http://me:p%40ss@"))
        monkeypatch.setenv("NO_PROXY", "inside.invalid,127.0.0.1")
        proxy.script("POST", f"http://{outside}", Reply())
        desk = Desk(tmp_path, webhook=f"http://{outside}", command=())
        desk.trouble("bad_step", "step 4 is bad")
        assert desk.said == []
        assert proxy.asked[-1].headers["proxy-authorization"] == login
        assert json.loads(proxy.asked[-1].body)["sentence"] == "step 4 is bad"
        for url, wrong in (
            (f"https://{outside}", "OSError"),  # this proxy refuses what it is asked
            ("http://inside.invalid/", "gaierror"),
        ):
            (tmp_path / wrong).mkdir()
            desk = Desk(tmp_path / wrong, webhook=url, command=())
            desk.trouble("bad_step")
            assert desk.said == [f"an alert (bad_step) did not reach the webhook: {wrong}"]
        connects = [one for one in proxy.asked if one.method == "CONNECT"]
        assert [(one.path, one.headers["proxy-authorization"]) for one in connects] == [("outside.invalid:443", login)]
        direct.script("GET", "/metadata", Reply(body="here"))
        monkeypatch.delenv("NO_PROXY")
        assert fetch(f"{direct.url}/metadata", timeout_s=30.0).text == "here"
        assert [one.method for one in proxy.asked] == ["POST", "CONNECT"]
    environment = {"HTTPS_PROXY": "http://me:secret@proxy:3128"}
    assert [environment_of(kind, environment) == environment for kind in ("notify", "wandb", "callback")] == [
        *(True, True, False)
    ]


def test_a_command_that_fails_or_hangs_is_ended_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "COMMAND_S", 0.2)
    for command, wrong in (
        (("sh", "-c", "exit 3"), "sh ended with code 3"),
        (("sleep", "1000"), "sleep took more than 0.2 s"),
        (("./no-such",), "./no-such cannot be started: No such file or directory"),
    ):
        desk = Desk(tmp_path, command=command)
        desk.now_s += 2 * alerts.AGAIN_S
        desk.tell(RunEnded(step=7, time_s=desk.now_s, outcome="failed", sentence="no"))
        assert desk.said == [f"an alert (ended): {wrong}"]


def test_an_unreachable_receiver_is_refused_without_showing_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    for notify, message in (
        ({"webhook": "https://[secret"}, "run.yaml: notify.webhook: is not a URL; allowed: https://... or $NAME"),
        ({"webhook": "https://secret:port/"}, "run.yaml: notify.webhook: is not a URL; allowed: https://... or $NAME"),
        ({"webhook": "ftp://secret"}, "run.yaml: notify.webhook: is not a URL; allowed: https://... or $NAME"),
        ({"webhook": "$HOOK"}, "run.yaml: notify.webhook: is not set in this environment (got '$HOOK')"),
        (
            {"command": ["no-such"]},
            "run.yaml: notify.command: there is no such program (got 'no-such'); allowed: a path",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            check_notify(Notify.model_validate(notify), "run.yaml")
        assert str(caught.value) == message


@pytest.mark.system
def test_the_alert_process_reports_how_the_manager_ended_or_died(tmp_path: Path) -> None:
    cluster = JournalledCluster(0, tmp_path, Faults(), expected_nodes=2)
    assert cluster.run(2).outcome == "finished"
    cluster.journal.close()
    with sqlite3.connect(tmp_path / JOURNAL) as journal:
        journal.execute("UPDATE entries SET time_s = time_s + ?, digest = NULL", (time.time(),))
    journal.close()
    watching = Watching(
        kind="notify",
        run_dir=tmp_path,
        journal=tmp_path / JOURNAL,
        checkpoint_url="mem://checkpoints",
        job="tiny",
        limit_s=60.0,
        notify=Notify(command=writes_down(tmp_path)),
    )
    said: list[str] = []
    with Watchers((watching,), said.append, BOUND_S):
        pass
    assert (said, told(tmp_path)) == ([], ["ended"])
    with sqlite3.connect(tmp_path / JOURNAL) as journal:
        journal.execute("DELETE FROM entries WHERE sequence > 20")
    journal.close()
    (tmp_path / "trackers" / "notify.json").unlink()
    command = [sys.executable, "-m", "manager.trackers.process"]
    left = subprocess.run(
        command, input=watching.model_dump_json() + "\n", text=True, capture_output=True, timeout=BOUND_S
    )
    assert left.returncode == 0, left.stderr
    assert told(tmp_path) == ["ended", "manager_gone"]

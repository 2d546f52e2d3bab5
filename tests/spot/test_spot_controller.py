"""One script on one VM: when it is saved, when VMs are requested, and when it moves to another VM."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from manager.controller.state.events import NodesGranted, NodesStarted, WorkerLost
from manager.engine.loop.event_queue import EventQueue
from manager.engine.loop.silence import Signs
from manager.host.folders import sweep
from manager.host.processes import wait_gone
from manager.providers.local import LocalProvider
from manager.spot.controller import (
    PRIOR,
    REQUESTS,
    STAYS_S,
    Ask,
    Came,
    Denied,
    Ended,
    Event,
    Gone,
    Noticed,
    Refused,
    Release,
    Save,
    Saved,
    SpotState,
    Start,
    Stepped,
    Tick,
    Uploaded,
    decide,
    emergency_s,
    interval_s,
)
from manager.spot.factory import LocalVms
from manager.spot.launcher import Launcher, VmSource
from manager.spot.script_server import ScriptServer
from manager.spot.spec import SpotJob
from tests.engine.fake_cloud import FakeCloud
from tests.waiting import BOUND_S


def after(state: SpotState, *events: tuple[float, Event]) -> tuple[SpotState, list[object]]:
    done: list[object] = []
    for now_s, event in events:
        state, actions, _ = decide(state, event, now_s)
        done += actions
    return state, done


def running(*events: tuple[float, Event]) -> SpotState:
    state, done = after(SpotState(), (0.0, Tick()), (10.0, Came("a")), (40.0, Stepped(2.0)), *events)
    assert done[:2] == [Ask(), Start("a")]
    return state


SEEN = ((50.0, Saved(0, 1.5)), (60.0, Uploaded(0, 4.0)))


def test_a_vm_is_asked_for_once_and_the_script_begins_on_it() -> None:
    _, done = after(SpotState(), (0.0, Tick()), (1.0, Tick()), (10.0, Came("a")), (11.0, Tick()))
    assert done == [Ask(), Start("a")]


def test_a_missing_vm_is_requested_ever_later_but_immediately_after_a_loss() -> None:
    denied, first_s = Denied("there is none"), REQUESTS.backoff_s
    state, done = after(SpotState(), (0.0, Tick()), (1.0, denied), (first_s, Tick()))
    assert done == [Ask()]
    state, done = after(state, (1.0 + first_s, Tick()), (20.0, denied), (20.0 + first_s, Tick()))
    assert done == [Ask()]
    state, done = after(state, (20.0 + 2 * first_s, Tick()), (50.0, Came("a")), (60.0, Stepped(2.0)))
    assert done == [Ask(), Start("a")]
    assert state.restart_s == 58.0  # counted from the first request
    leaving, _ = after(state, (70.0, Noticed(30.0)), (71.0, denied))
    assert after(leaving, (72.0, Tick()), (80.0, Gone()))[1] == [Ask()]
    assert Ask() in after(leaving, (71.0 + first_s, Tick()))[1]


def test_a_save_is_due_when_it_costs_least_one_at_a_time() -> None:
    state = running(*SEEN)
    mttf_s = (3600 / PRIOR.per_vm_h + 90.0) / 1
    # 40 s from the request to the end of the first step, which took 2 s
    expected_s = math.sqrt(2 * 1.5 * (mttf_s + 38.0))
    assert interval_s(state, 100.0) == pytest.approx(expected_s)
    due_s = 50.0 + math.sqrt(2 * 1.5 * (3600 / PRIOR.per_vm_h + 50 + expected_s + 38.0))
    assert after(state, (due_s - 2.0, Tick()))[1] == []
    state, done = after(state, (due_s + 2.0, Tick()), (due_s + 900.0, Tick()))
    assert done == [Save(1)]
    state, done = after(state, (due_s + 901, Saved(1, 1.5)), (due_s + 902, Uploaded(1, 4.0)), (due_s + 903, Tick()))
    assert (done, state.lasting) == ([], 1)


def test_the_first_save_comes_early_to_measure_its_cost() -> None:
    state, done = after(SpotState(), (0.0, Tick()), (10.0, Came("a")), (100.0, Stepped(2.0)), (127.0, Tick()))
    assert done == [Ask(), Start("a")]
    state, done = after(state, (129.0, Tick()), (131.0, Saved(1, 0.5)), (132.0, Uploaded(1, 1.0)), (165.0, Tick()))
    assert done == [Save(1)]
    assert interval_s(state, 165.0) > 60.0


def test_only_unsaved_losses_make_saves_more_frequent() -> None:
    state = running(*SEEN)
    lost = replace(state, num_losses=3)
    assert interval_s(lost, 100.0) < 0.6 * interval_s(state, 100.0)
    state, _ = after(state, (100.0, Noticed(30.0)), (102.0, Saved(1, 1.5)), (106.0, Uploaded(1, 4.0)), (107.0, Gone()))
    assert state.num_losses == 0


def test_a_long_notice_is_used_and_the_vm_released_after_the_upload() -> None:
    state, done = after(running(*SEEN), (100.0, Noticed(30.0)))
    assert done == [Ask(), Save(1)]
    state, done = after(state, (102.0, Came("b")), (103.0, Saved(1, 1.5)), (107.0, Uploaded(1, 4.0)))
    assert done == [Release()]
    state, done = after(state, (107.0, Gone()))
    assert (done, state.phase) == ([Start("b")], "running")


def test_a_notice_that_leaves_no_time_for_a_save_is_trained_through() -> None:
    state = running(*SEEN)
    assert emergency_s(state) == 2.0 + 1.5 + 4.0 + 1.0
    state, done = after(state, (100.0, Noticed(8.0)), (103.0, Stepped(2.0)))
    assert done == [Ask()]
    state, done = after(state, (108.0, Gone()))
    assert (done, state.num_losses, state.phase) == ([], 1, "waiting")
    assert after(state, (120.0, Came("b")))[1] == [Start("b")]


def test_a_vm_that_goes_without_a_notice_is_replaced() -> None:
    state, done = after(running(), (100.0, Gone()), (101.0, Tick()), (130.0, Came("b")))
    assert (done, state.num_losses) == ([Ask(), Start("b")], 1)


def test_an_emergency_save_that_storage_refuses_counts_as_a_loss() -> None:
    events = ((100.0, Noticed(30.0)), (103.0, Saved(1, 1.5)), (104.0, Refused(1, "full")), (130.0, Gone()))
    state, done = after(running(*SEEN), *events)
    assert (done, state.num_losses) == ([Ask(), Save(1)], 1)


def test_a_refused_save_is_ordered_again_after_a_pause() -> None:
    state, done = after(running(*SEEN), (9000.0, Tick()), (9002.0, Refused(1, "full")), (9003.0, Tick()))
    assert done == [Save(1)]
    assert after(state, (9002.0 + interval_s(state, 9100.0) + 500, Tick()))[1] == [Save(2)]


def test_a_notice_before_the_first_step_is_used_if_time_allows() -> None:
    state, done = after(SpotState(), (0.0, Tick()), (10.0, Came("a")), (20.0, Noticed(30.0)), (25.0, Tick()))
    assert done == [Ask(), Start("a"), Ask()]
    assert after(state, (30.0, Stepped(9.0)))[1] == [Save(1)]
    assert after(state, (46.0, Stepped(9.0)))[1] == []


def test_a_vm_that_outlives_its_notice_is_saved_and_left() -> None:
    """There was no time for a save, and the VM was not taken: another VM waits, and is billed."""
    state, done = after(running(*SEEN), (100.0, Noticed(8.0)), (110.0, Came("b")), (108.0 + STAYS_S, Tick()))
    assert done == [Ask()]
    state, done = after(state, (109.0 + STAYS_S, Tick()), (110.0 + STAYS_S, Tick()))
    assert done == [Save(1)]
    state, done = after(state, (112.0 + STAYS_S, Saved(1, 1.5)), (116.0 + STAYS_S, Uploaded(1, 4.0)))
    assert done == [Release()]
    state, done = after(state, (116.0 + STAYS_S, Gone()))
    assert (done, state.num_losses) == ([Start("b")], 0)


@pytest.mark.parametrize("before", [(), ((100.0, Noticed(30.0)),)])
def test_when_the_script_ends_all_is_over(before: tuple[tuple[float, Event], ...]) -> None:
    state, _ = after(running(), *before)
    state, done = after(state, (110.0, Ended(3)), (111.0, Gone()), (112.0, Came("b")), (113.0, Tick()))
    assert (done, state.phase, state.code) == ([Release()], "ended", 3)


WATCHER = """
import sys, time
from pathlib import Path
from manager.spot.agent import ScriptProcess

options = {"user": 65534, "group": 65534, "extra_groups": []} if sys.argv[2] == "another user" else {}
script = ScriptProcess(Path(sys.argv[1]), ["sleep", "600"], "", None, {}, **options)
print(script._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels tell no process of its parent's end")
@pytest.mark.parametrize("user", ["the same user", "another user"])
def test_a_script_ends_when_its_agent_is_killed(user: str, tmp_path: Path) -> None:
    if user == "another user" and os.getuid() != 0:
        pytest.skip("only root starts processes of others")
    command = [sys.executable, "-c", WATCHER, str(tmp_path), user]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        script = psutil.Process(int(watcher.stdout.readline()))
        try:
            watcher.send_signal(signal.SIGKILL)
            assert wait_gone([script], BOUND_S) == []
        finally:
            if script.is_running():
                script.kill()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other kernels tell no process of its parent's end")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_however_it_is_ended_it_leaves_neither_script_nor_folder(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed command cannot remove its folder, which the next command does."""
    temporary, code = tmp_path / "temporary", tmp_path / "code"
    for folder in (temporary, code):
        folder.mkdir()
    (code / "job.yaml").write_text("storage: ../backups\n")
    script = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-m", "morph.cli.main", "spot-run", "job.yaml", "--", sys.executable, "-c", script]
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, cwd=code, env=environment, stdout=subprocess.PIPE, text=True) as process:
        running = psutil.Process(int(process.stdout.readline()))
        try:
            process.send_signal(number)
            assert process.wait(BOUND_S) == (-number if number == signal.SIGKILL else 130)
            assert wait_gone([running], BOUND_S) == []
        finally:
            if running.is_running():
                running.kill()
    if number == signal.SIGKILL:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        sweep()
    assert list(temporary.iterdir()) == []


class Interrupting(LocalProvider):
    """Ends VMs while the user presses Ctrl-C."""

    was_dismantled = False

    def dismantle(self) -> tuple[str, ...]:
        os.kill(os.getpid(), signal.SIGINT)
        self.was_dismantled = True
        return super().dismantle()


def test_ctrl_c_while_vms_are_ended_leaves_none_of_them(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    job, events = SpotJob(storage=str(tmp_path / "backups")), EventQueue()
    machines = ScriptServer(events, "secret")
    provider = Interrupting(LocalVms(machines, "secret", tmp_path / "vms", code), max_vms=2)
    launcher = Launcher(job, ["true"], VmSource(provider, 1), machines, None, events)
    try:
        assert launcher.run().code == 0
    except KeyboardInterrupt:
        pytest.fail("it was interrupted")
    assert provider.was_dismantled
    assert provider.list() == ()


def test_a_group_has_come_once_its_last_vm_has_left_the_queue() -> None:
    job = SpotJob(name="job", storage="memory://job")
    launcher = Launcher(job, ["true"], VmSource(FakeCloud(), 2), None, None, EventQueue())  # type: ignore[arg-type]
    nodes = ("job-1-0", "job-1-1")

    def told(item: NodesGranted | NodesStarted | WorkerLost) -> list[Event]:
        return list(launcher._of_vms(item))

    assert told(NodesGranted(request="job-1", nodes=nodes, waiting=nodes)) == []
    assert told(NodesStarted(request="job-1", nodes=nodes[:1])) == []
    assert told(NodesStarted(request="job-1", nodes=nodes[1:])) == [Came("job-1")]
    assert told(NodesGranted(request="job-2", nodes=nodes, waiting=nodes)) == []
    (denied,) = told(WorkerLost(worker="job-1-1", cause="cancelled"))
    assert isinstance(denied, Denied)
    assert told(WorkerLost(worker="job-1-0", cause="cancelled")) == []
    assert told(NodesGranted(request="job-3", nodes=nodes)) == [Came("job-3")]
    launcher._provisioning.close()


def test_a_launcher_that_was_paused_takes_no_vm_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    for module in ("manager.engine.loop.silence", "manager.spot.script_server"):
        monkeypatch.setattr(f"{module}.time", clock)
    server = ScriptServer(EventQueue(), "secret")
    server.start(["a"], ["true"], "storage")
    server._vms["a"].signs = Signs(ready=True, beat_sent_s=0.0)

    def is_silent_after(seconds: float, every_s: float) -> bool:
        until_s, found = now_s[0] + seconds, []
        while now_s[0] < until_s:
            now_s[0] += every_s
            found.append(server.are_silent(["a"]))
        return found[-1]

    assert not is_silent_after(3600, every_s=3600)
    assert not is_silent_after(60, every_s=0.5)
    assert is_silent_after(2, every_s=0.5)
    server.close()

"""Another process asks a run's manager over its socket to revoke VMs, which are only names here."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manager.controller.state.events import NoticeGiven
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import WorkerState
from manager.engine.loop.event_queue import EventQueue
from manager.engine.machines import preemption
from manager.engine.machines.attachment import Attachment
from manager.engine.machines.preemption import SOCKET_NAME, PreemptionAnswer, PreemptionRequest, PreemptionServer
from manager.injection import injector
from manager.injection.injector import Injection, ask, inject
from manager.journal.records import PREEMPTION_FAILED, PREEMPTION_INJECTED, Fact
from manager.providers.interface.provider import Misconfigured
from manager.run_dir import ATTACHMENT, NotRunning, RunDir, RunFacts
from morph.cli.main import app
from morph.contract.errors import RunDirError
from morph.contract.lives import Change, Lifetimes, Removals, by_name
from morph.contract.trace import parse_trace
from tests.waiting import BOUND_S

FACTS = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=6)
WORKERS = {"vm0": 1.0, "vm1": 2.0, "vm2.d0": 3.5, "vm2.d1": 3.0}


class PreemptionTarget:
    """Takes VMs by name.

    ``evicts``: whether it has means of its own. ``bound``: VMs of requests under way. ``left``: VMs that it cannot end.
    """

    def __init__(self) -> None:
        self.evicts, self.bound, self.left = False, set[str](), set[str]()
        self.evicted: list[str] = []
        self.taken: list[dict[str, list[str]]] = []
        self.done = threading.Event()

    def may_take(self, vm: str) -> bool:
        return vm not in self.bound

    def evict(self, vm: str) -> bool:
        if vm in self.left:
            raise Misconfigured(f"{vm} is locked")
        if self.evicts:
            self.evicted.append(vm)
        return self.evicts

    def take(self, vms: Mapping[str, Collection[str]]) -> None:
        try:
            if self.left & set(vms):
                raise Misconfigured("it is locked")
            self.taken.append({vm: sorted(workers) for vm, workers in vms.items()})
        finally:
            self.done.set()


class World:
    """Return a run directory held by this process, and the listener for requests."""

    def __init__(self, run_dir: Path, folder: Path) -> None:
        self.run_dir, self.target, self.event_queue = run_dir, PreemptionTarget(), EventQueue()
        self.workers = {name: WorkerState(appeared_s=since_s) for name, since_s in WORKERS.items()}
        self.desk = PreemptionServer(folder, lambda: self.workers, self.event_queue, self.target)
        attachment = Attachment(
            kind="processes", control_socket=folder / "control_socket", store_host="-", store_port=1
        )
        (run_dir / ATTACHMENT).write_text(attachment.model_dump_json())

    def ask(self, *vms: str, **asked: object) -> PreemptionAnswer:
        answer = ask(self.run_dir, PreemptionRequest.model_validate({"vms": vms, "why": "a test", **asked}))
        assert answer is not None
        return answer

    def told(self, count: int) -> list[object]:
        found = []
        for _ in range(count):
            stamped = self.event_queue.get(BOUND_S)
            assert stamped is not None, found
            found.append(stamped.item)
        assert self.event_queue.get(0.0) is None
        return found


@pytest.fixture
def world(tmp_path: Path, socket_folder: Path) -> Iterator[World]:
    with RunDir(tmp_path / "run", FACTS):
        opened = World(tmp_path / "run", socket_folder)
        yield opened
        opened.desk.close()
        assert not (socket_folder / SOCKET_NAME).exists()


def injected(vm: str, how: str) -> Fact:
    return Fact(name=PREEMPTION_INJECTED, worker=vm, detail=f"a test, {how}")


def test_a_request_without_vms_returns_the_vms_and_their_ages(world: World) -> None:
    world.workers["vm1"] = world.workers["vm1"].model_copy(update={"node": NodeState.DRAINING})
    answer = world.ask()
    assert answer.vms == {"vm0": 1.0, "vm2": 3.0}
    assert (answer.taken, answer.left) == ((), {})
    assert world.told(0) == []


def test_vms_are_ended_together_when_their_notice_is_over_and_not_taken_twice(world: World) -> None:
    answer = world.ask("vm0", "vm2", "vm0", lead_s=0.05)
    assert answer.taken == ("vm0", "vm2")
    assert world.target.done.wait(BOUND_S)
    assert world.target.taken == [{"vm0": ["vm0"], "vm2": ["vm2.d0", "vm2.d1"]}]
    *facts, first, second, third = world.told(5)
    assert facts == [injected("vm0", "a notice of 0.05 s"), injected("vm2", "a notice of 0.05 s")]
    notices = [each for each in (first, second, third) if isinstance(each, NoticeGiven)]
    assert [(notice.worker, notice.lead_s) for notice in notices] == [
        ("vm0", 0.05),
        ("vm2.d0", 0.05),
        ("vm2.d1", 0.05),
    ]
    assert len({notice.notice for notice in notices}) == 1
    assert world.ask("vm0").left == {"vm0": "it is being preempted already"}


def test_without_a_notice_a_vm_is_ended_at_once(world: World) -> None:
    world.target.evicts = True  # otherwise it would come with a notice
    assert world.ask("vm1").taken == ("vm1",)
    assert world.target.done.wait(BOUND_S)
    assert (world.target.evicted, world.target.taken) == ([], [{"vm1": ["vm1"]}])
    assert world.told(1) == [injected("vm1", "no notice")]


def test_a_provider_that_can_evict_gives_the_notice_itself(world: World) -> None:
    world.target.evicts = True
    assert world.ask("vm1", lead_s=30.0).taken == ("vm1",)
    assert world.target.evicted == ["vm1"]
    assert world.told(1) == [injected("vm1", "evicted by the provider, with its notice")]
    world.desk.close()
    assert world.target.taken == []


def test_foreign_busy_and_needed_vms_are_spared(world: World) -> None:
    world.target.bound = {"vm1"}
    answer = world.ask("elsewhere", "vm1", "vm0", "vm2", min_vms=2)
    assert answer.taken == ("vm0",)
    assert answer.left == {
        "elsewhere": "this run has no such VM; it has vm0, vm1, vm2",
        "vm1": "its request is under way",
        "vm2": "at least 2 VMs must remain",
    }
    assert world.target.done.wait(BOUND_S)
    assert world.target.taken == [{"vm0": ["vm0"]}]


def test_a_vm_that_cannot_be_ended_is_reported_and_remains_available(world: World) -> None:
    world.target.left = {"vm0", "vm1"}
    assert world.ask("vm0", "vm1", lead_s=30).left == {"vm0": "vm0 is locked", "vm1": "vm1 is locked"}
    assert world.ask("vm1").taken == ("vm1",)
    assert world.told(2) == [
        injected("vm1", "no notice"),
        Fact(name=PREEMPTION_FAILED, worker="vm1", detail="it keeps running: it is locked"),
    ]
    assert "vm1" in world.ask().vms


def test_a_notice_that_outlasts_the_run_takes_no_vm(world: World) -> None:
    assert world.ask("vm0", lead_s=600).taken == ("vm0",)
    world.desk.close()
    assert not any(thread.name == "morph-preemption" and _lives(thread) for thread in threading.enumerate())
    assert world.target.taken == []


def _lives(thread: threading.Thread) -> bool:
    thread.join(BOUND_S)
    return thread.is_alive()


def test_another_user_is_answered_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "is_ours", lambda _connection: False)
    assert ask(world.run_dir, PreemptionRequest(vms=("vm0",))) is None
    assert world.target.taken == []


def test_only_the_process_that_holds_the_run_gets_requests(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injector, "living_holder_of", lambda _run_dir: os.getppid())
    assert ask(world.run_dir, PreemptionRequest(vms=("vm0",))) is None
    assert world.told(0) == []


def test_a_starting_run_is_awaited_and_a_damaged_file_refused(world: World) -> None:
    path = world.run_dir / ATTACHMENT
    written = path.read_text()
    path.write_text("{")
    with pytest.raises(RunDirError, match=r"attach\.json"):
        ask(world.run_dir, PreemptionRequest())
    path.unlink()
    assert ask(world.run_dir, PreemptionRequest()) is None
    path.write_text(written)
    world.desk.close()
    assert ask(world.run_dir, PreemptionRequest()) is None


class Everybody:
    """A schedule by which all existing VMs are due at every look."""

    end_s = math.inf

    def between(self, vms: Mapping[str, float], after_s: float, until_s: float) -> tuple[Change, ...]:
        return (Change(until_s, "taken", tuple(vms)),)


def test_the_injector_takes_no_more_than_it_is_told_to(world: World) -> None:
    told: list[str] = []
    injection = Injection(lead_s=0.0, min_vms=0, why="a test", count=2)
    assert inject(world.run_dir, injection, lambda _start_s: Everybody(), told.append) == "2 VMs were taken"
    assert [line.partition("  ")[2] for line in told[1:]] == [f"{vm}  taken, without a notice" for vm in ("vm0", "vm1")]


def test_the_injector_ends_with_the_run_or_with_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    injection = Injection(lead_s=0.0, min_vms=0, why="a test")
    answers: list[PreemptionAnswer | None] = []

    def answered(_run_dir: Path, asked: PreemptionRequest) -> PreemptionAnswer | None:
        assert asked.vms == ()
        if not answers:
            raise NotRunning("is not running", source="run")
        return answers.pop(0)

    monkeypatch.setattr(injector, "POLL_S", 0.0)
    monkeypatch.setattr(injector, "ask", answered)
    answers = [PreemptionAnswer(now_s=5.0, vms={}), None, PreemptionAnswer(now_s=6.0, vms={})]

    def ended() -> str:
        return inject(tmp_path, injection, lambda start_s: Lifetimes(by_name(1, 60.0), start_s), told.append)

    assert ended() == "the run has ended"
    assert told[1:] == ["the run does not answer now because it starts or is about to end: waiting for it"]
    (tmp_path / ATTACHMENT).touch()
    answers = [PreemptionAnswer(now_s=5.0, vms={})]
    assert ended().startswith("the run's manager was killed")
    trace = parse_trace(["time_s,event,node_id", "0,add,a", "1,remove,a"], "trace.csv")
    answers = [
        PreemptionAnswer(now_s=5.0, vms={}),
        PreemptionAnswer(now_s=6.5, vms={}),
        PreemptionAnswer(now_s=9.0, vms={}),
    ]
    assert (
        inject(Path("run"), injection, lambda start_s: Removals(1, trace, start_s), told.append) == "the trace is over"
    )
    assert len(answers) == 1


def test_the_command_announces_takings_and_lists_the_vms(world: World) -> None:
    def told(*options: str) -> list[str]:
        done = CliRunner().invoke(app, ["inject", str(world.run_dir), *options])
        assert done.exit_code == (2 if "--vm" in options else 0), done.output
        return done.output.splitlines()

    dry = told("--mttp", "1h", "--seed", "1", "--dry-run")
    lifetimes_s = {vm: by_name(1, 3600.0)(vm, 0) for vm in ("vm0", "vm1", "vm2")}
    expected = sorted(lifetimes_s, key=lambda vm: lifetimes_s[vm])
    assert [line.split("  ", 1)[1] for line in dry] == [f"{vm}  in {lifetimes_s[vm]:.1f} s" for vm in expected]
    (line,) = told("--vm", "vm7")
    assert line.endswith("--vm: is not taken: this run has no such VM; it has vm0, vm1, vm2 (got 'vm7')")
    assert world.told(0) == []


def test_a_run_without_a_manager_gets_no_request(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", FACTS):
        pass
    with pytest.raises(NotRunning, match="is not running: no process manages it"):
        ask(tmp_path / "run", PreemptionRequest())

"""The pool of workers, whose connections and starts the test controls."""

from __future__ import annotations

import pytest

from manager.controller.state.events import (
    ComputeTimesSeen,
    NobodyHeard,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
    WorkerProbed,
    WorkerTimes,
)
from manager.engine.loop import silence, worker_pool
from manager.engine.loop.event_queue import EventQueue
from manager.engine.loop.worker_pool import CALL_TIMEOUT_S, STUCK_TIMEOUT_S, WorkerPool
from manager.host.ports import RAY_SETTINGS
from manager.journal.records import Fact
from morph.contract.base import Value
from morph.contract.messages import Aborted, Heartbeat, Probed, ProbeOrder, StepOrder, UnitWritten, WorkerReady
from morph.contract.timeline import MicroBatchTimes
from morph.link import encoding as messages
from morph.link.encoding import ANSWER, BEAT, packed, unpack
from tests.worker_setup import SETUP

READY = WorkerReady(worker="vm0", pid=1, setup_s=0.0)


class FakeLine:
    """Records what is sent; ``stuck_s`` is set by the test."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.stuck_s = 0.0
        self.is_over = False

    def send(self, body: bytes) -> None:
        self.sent.append(body)

    def hang_up(self) -> None:
        self.is_over = True

    def next(self) -> tuple[str, object]:
        return unpack(self.sent.pop(0))


class FakeLauncher:
    """Starts nothing; ``left`` are an earlier manager's workers."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.killed: list[str] = []
        self.left: tuple[str, ...] = ()
        self.ended: set[str] = set()

    def start_worker(self, worker: str, _vm: str) -> None:
        self.started.append(worker)

    def kill(self, worker: str) -> None:
        self.killed.append(worker)

    def has_ended(self, worker: str) -> bool:
        return worker in self.ended

    def adopt(self) -> tuple[str, ...]:
        return self.left


class Scene:
    """A pool with one worker, whose connection the test controls."""

    def __init__(self) -> None:
        self.event_queue, self.launcher, self.line = EventQueue(), FakeLauncher(), FakeLine()
        self.pool = WorkerPool(self.event_queue, lambda _: SETUP, self.launcher, 5.0)

    def be_ready(self) -> None:
        self.pool.start("vm0", "vm0")
        self.pool.came("vm0", self.line)
        assert self.line.next() == ("setup", SETUP)
        self.answer(READY)
        assert self.next() == WorkerAnswered(worker="vm0", answer=READY)

    def answer(self, answer: Value, name: str = ANSWER) -> None:
        self.pool.heard("vm0", packed(name, answer))

    def next(self) -> object:
        stamped = self.event_queue.get(0.0)
        assert stamped is not None, "nothing came"
        return stamped.item

    def lost(self) -> str:
        lost = self.next()
        assert isinstance(lost, WorkerLost)
        assert len(self.event_queue) == 0, "told twice"
        return lost.cause


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pool's clock, which stands still, however slow this machine is."""
    now_s = [silence.time.monotonic()]
    monkeypatch.setattr(silence.time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.fixture
def scene(clock: list[float]) -> Scene:
    return Scene()


@pytest.mark.parametrize(
    "message",
    [
        b"answer\n\x80\x04.",
        b'answer\n{"kind": "ready"}',
        packed(ANSWER, READY).replace(b"vm0", b"vm9"),
        b"beat\n[]",
        b"setup\n{}",
        b"\xff",
    ],
)
def test_a_worker_that_says_what_no_worker_says_is_killed(scene: Scene, message: bytes) -> None:
    scene.be_ready()
    scene.pool.heard("vm0", message)
    assert "breaks the protocol" in scene.lost()
    assert scene.launcher.killed == ["vm0"]
    assert scene.line.is_over
    scene.answer(READY)  # the pool does not listen any more
    assert len(scene.event_queue) == 0


def test_orders_go_as_they_were_given_and_answers_become_events(scene: Scene) -> None:
    scene.be_ready()
    order = StepOrder(generation=3, step=7, checkpoint_units=("s0",))
    scene.pool.send("vm0", order)
    scene.pool.abort("vm0", 9)
    assert scene.line.next() == ("step", order)
    assert scene.line.next() == ("abort", 9)


def test_a_worker_may_call_before_it_is_wanted_or_after(scene: Scene) -> None:
    scene.pool.came("vm0", scene.line)
    scene.pool.start("vm0", "vm0")
    assert scene.line.next() == ("setup", SETUP)
    assert scene.launcher.started == ["vm0"]
    later = FakeLine()
    scene.pool.start("vm1", "vm1")
    scene.pool.came("vm1", later)
    assert later.next() == ("setup", SETUP)
    assert len(scene.event_queue) == 0


def test_heartbeats_become_events_and_compute_times_are_collected(scene: Scene) -> None:
    scene.be_ready()
    times = MicroBatchTimes(generation=2, forward_s=(1.0,), recompute_s=(1.0,), backward_s=(2.0,))
    written = UnitWritten(worker="vm0", version=1, unit="s0", file="f", size_bytes=1, sha256="0")
    scene.answer(Heartbeat(worker="vm0", times=times, written=(written,), notes=("they failed",)), BEAT)
    assert scene.next() == UnitsWritten(worker="vm0", written=(written,))
    assert scene.next() == Fact(name="data_workers", worker="vm0", detail="they failed")
    assert scene.event_queue.paces.take() == ComputeTimesSeen(
        times=(WorkerTimes(worker="vm0", generation=2, compute_s=(3.0,)),)
    )


PROBE = ProbeOrder(probe=4, step=1, first_section=0, end_section=1, healthy_s=0.5)


def test_a_probe_is_answered_with_an_event_of_its_own(scene: Scene) -> None:
    scene.be_ready()
    scene.pool.send("vm0", PROBE)
    assert scene.line.next() == ("probe", PROBE)
    scene.answer(Probed(worker="vm0", probe=4, slowdown=1.25))
    assert scene.next() == WorkerProbed(worker="vm0", probe=4, slowdown=1.25)
    scene.pool.send("vm0", StepOrder(generation=1, step=0))  # nothing is left that the probe could delay
    assert [scene.line.next()[0]] == ["step"]
    assert scene.line.sent == []


def test_an_order_ends_a_probe_that_is_under_way(scene: Scene) -> None:
    scene.be_ready()
    scene.pool.send("vm0", PROBE)
    scene.pool.send("vm0", StepOrder(generation=1, step=0))
    assert [scene.line.next()[0] for _ in range(3)] == ["probe", "leave_probe", "step"]


def test_a_probe_that_failed_is_written_down_and_reported_as_not_done(scene: Scene) -> None:
    scene.be_ready()
    scene.pool.send("vm0", PROBE)
    scene.answer(Probed(worker="vm0", probe=4, error="no memory"))
    assert scene.next() == Fact(name="probe_failed", worker="vm0", detail="no memory")
    assert scene.next() == WorkerProbed(worker="vm0", probe=4, slowdown=None)


def test_a_worker_whose_process_is_gone_is_lost_once(scene: Scene) -> None:
    scene.be_ready()
    scene.pool.died("vm0")
    assert "connection closed" in scene.lost()
    scene.pool.send("vm0", StepOrder(generation=1, step=0))
    scene.pool.died("vm0")
    assert len(scene.event_queue) == 0
    assert scene.line.sent == []


def test_a_worker_that_died_early_is_lost_when_it_is_wanted(scene: Scene) -> None:
    scene.pool.came("vm0", scene.line)
    scene.pool.died("vm0")
    assert len(scene.event_queue) == 0  # the controller has not heard of it
    scene.pool.start("vm0", "vm0")
    assert "connection closed" in scene.lost()
    assert scene.launcher.started == []


def test_a_worker_that_is_ended_is_killed_and_not_reported(scene: Scene) -> None:
    scene.be_ready()
    scene.pool.end("vm0")
    scene.pool.died("vm0")
    assert scene.launcher.killed == ["vm0"]
    assert len(scene.event_queue) == 0


def test_a_worker_that_takes_no_orders_is_lost_instead_of_waited_for(scene: Scene) -> None:
    scene.be_ready()
    scene.line.stuck_s = STUCK_TIMEOUT_S
    scene.pool.watch()
    assert len(scene.event_queue) == 0
    scene.line.stuck_s = STUCK_TIMEOUT_S + 0.1
    scene.pool.watch()
    assert "accepts no orders" in scene.lost()
    assert scene.launcher.killed == ["vm0"]
    scene.pool.watch()
    assert len(scene.event_queue) == 0


def test_a_silent_worker_is_lost(scene: Scene, clock: list[float]) -> None:
    scene.be_ready()
    for _ in range(11):
        clock[0] += 0.5
        scene.pool.watch()
    assert len(scene.event_queue) == 0
    clock[0] += 1.0
    scene.pool.watch()
    assert "silent for" in scene.lost()
    assert scene.launcher.killed == ["vm0"]  # a worker that wakes must not continue
    assert scene.line.is_over


def test_a_worker_that_never_calls_is_lost(scene: Scene, clock: list[float]) -> None:
    scene.pool.start("vm0", "vm0")
    while clock[0] + 1 < scene.pool._handles["vm0"].beat_sent_s + CALL_TIMEOUT_S:
        clock[0] += 1
        scene.pool.watch()
    assert len(scene.event_queue) == 0
    clock[0] += 1
    scene.pool.watch()
    assert "did not call" in scene.lost()
    assert scene.launcher.killed == ["vm0"]
    assert 2 * float(RAY_SETTINGS["RAY_worker_register_timeout_seconds"]) <= CALL_TIMEOUT_S, "Ray may start it twice"


def test_a_worker_whose_process_ends_before_it_called_is_lost(scene: Scene) -> None:
    scene.pool.start("vm0", "vm0")
    scene.pool.watch()
    assert len(scene.event_queue) == 0
    scene.launcher.ended.add("vm0")
    scene.pool.watch()
    assert "before it called" in scene.lost()
    scene.pool.watch()
    assert len(scene.event_queue) == 0


def test_a_new_line_repeats_unanswered_orders_and_the_last_word(scene: Scene) -> None:
    scene.be_ready()
    order = StepOrder(generation=3, step=7)
    scene.pool.send("vm0", order)
    for generation in (2, 3):
        scene.pool.abort("vm0", generation)
    second, third = FakeLine(), FakeLine()
    scene.pool.came("vm0", second)
    assert scene.next() == Fact(name="connection_broken", worker="vm0", detail="replaced by a new one")
    assert [second.next() for _ in range(2)] == [("abort", 3), ("step", order)]
    scene.answer(Aborted(worker="vm0", generation=3, peer_lost=False))
    assert isinstance(scene.next(), WorkerAnswered)
    scene.pool.came("vm0", third)
    assert third.next() == ("abort", 3)
    assert third.sent == []  # this one is answered
    assert scene.next() == Fact(name="connection_broken", worker="vm0", detail="replaced by a new one")
    assert len(scene.event_queue) == 0


def test_of_another_managers_workers_those_that_call_are_kept(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "ATTACH_TIMEOUT_S", 0.05)
    scene.launcher.left = ("vm0", "vm1", "vm2", "vm3")
    scene.pool.came("vm0", scene.line)
    scene.pool.came("vm2", FakeLine())
    scene.pool.died("vm2")
    assert scene.pool.attach(["vm0", "vm1", "vm2", "vm9"]) == ("vm0", "vm3")  # the last worker is still being set up
    assert scene.launcher.killed == ["vm1"]
    scene.pool.start("vm3", "vm3")
    assert scene.launcher.started == []  # it was set up
    late = FakeLine()
    scene.pool.came("vm3", late)
    assert late.next() == ("setup", SETUP)
    scene.pool.died("vm0")
    assert "connection closed" in scene.lost()


def test_time_of_a_suspended_manager_does_not_count_as_silence(scene: Scene, clock: list[float]) -> None:
    scene.be_ready()
    for _ in range(10):
        clock[0] += 0.5
        assert scene.pool.watch()
    clock[0] += 60.0
    assert not scene.pool.watch(), "waits were judged although nobody could be heard"
    told = scene.next()
    assert isinstance(told, NobodyHeard)
    assert told.lasted_s == pytest.approx(60.0)
    for _ in range(2):
        assert len(scene.event_queue) == 0, "taken for silent while the manager was deaf"
        clock[0] += 0.5
        scene.pool.watch()
    clock[0] += 1.0
    scene.pool.watch()
    assert "silent for" in scene.lost()
    assert scene.launcher.killed == ["vm0"]


def test_an_order_that_goes_to_all_is_written_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def pack(name: str, order: object) -> bytes:
        written.append(name)
        return messages.pack(name, order)

    monkeypatch.setattr(worker_pool, "pack", pack)
    lines = {f"vm{number}": FakeLine() for number in range(3)}
    for worker, line in lines.items():
        scene.pool.start(worker, worker)
        scene.pool.came(worker, line)
    written.clear()
    steps = [StepOrder(generation=1, step=step) for step in range(2)]
    for step in steps:
        for worker in lines:
            scene.pool.send(worker, step)
    assert written == ["step", "step"]
    for line in lines.values():
        assert [line.next() for _ in range(3)][1:] == [("step", step) for step in steps]

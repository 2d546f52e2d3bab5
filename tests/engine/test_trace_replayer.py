from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from manager.controller.state.events import NodeAppeared, NodeFacts, NoticeGiven, Paid, Tick, WorkerLost
from manager.engine.local_vms import vm_fleet
from manager.engine.local_vms.trace_replayer import TraceReplayer
from manager.engine.loop.event_queue import EventQueue
from manager.journal.records import TRACE_PLAYED, VM_KILLED, VM_UP, Fact, TraceMoment
from morph.contract.errors import ClusterError
from morph.contract.trace import parse_trace
from tests.waiting import BOUND_S

TRACE_NOTE = Fact(name=TRACE_PLAYED)


class FakeHost:
    """VMs that are only names; a boot in ``held`` waits for its event, one in ``broken`` fails."""

    boots_at_once = 1

    def __init__(self) -> None:
        self.up: list[str] = []
        self.killed: list[str] = []
        self.booting: dict[str, threading.Event] = {}
        self.held: dict[str, threading.Event] = {}
        self.broken: set[str] = set()
        self.changed = threading.Condition()

    def hold(self, name: str) -> threading.Event:
        """Delay a boot until the returned event is set; another event reports that the boot has begun."""
        self.held[name], self.booting[name] = threading.Event(), threading.Event()
        return self.held[name]

    def add_vm(self, name: str) -> None:
        if name in self.held:
            self.booting[name].set()
            assert self.held[name].wait(BOUND_S)
        if name in self.broken:
            raise ClusterError(f"VM {name} did not come up: no room")
        with self.changed:
            self.up.append(name)
            self.changed.notify_all()

    def prepare_kill(self, names: Sequence[str]) -> Callable[[], None]:
        def kill() -> None:
            with self.changed:
                self.killed += names
                self.changed.notify_all()

        return kill

    def wait_until_killed(self, *names: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: set(names) <= set(self.killed), BOUND_S)


class Play:
    """A replayer of a trace, given as lines, and what it has reported."""

    def __init__(self, *lines: str, begun: TraceMoment | None = None) -> None:
        self.host, self.event_queue = FakeHost(), EventQueue()
        head = "time_s,event,node_id" + (",zone,instance_type,notice_s,usd_per_h" if lines[0].count(",") > 2 else "")
        trace = parse_trace([f"{head}\n", *(f"{line}\n" for line in lines)], "test")
        self.replayer = TraceReplayer(self.host, trace, self.event_queue, begun)
        self.seen: list[str] = []
        self.appeared: dict[str, NodeAppeared] = {}
        self.notices: dict[str, NoticeGiven] = {}
        self.moments: list[TraceMoment] = []

    def start(self, *, clock: bool = True) -> None:
        self.replayer.start()
        if clock:
            self.replayer.start_clock()

    def next(self) -> str:
        item: object = TRACE_NOTE
        while isinstance(item, Fact) and item.name in (TRACE_PLAYED, VM_UP):
            self.moments += [TraceMoment.model_validate_json(item.detail)] if item.detail else []
            stamped = self.event_queue.get(BOUND_S)
            assert stamped is not None, f"nothing came after {self.seen}"
            item = stamped.item
        if isinstance(item, NodeAppeared):
            self.seen.append(f"up {item.node}")
            self.appeared[item.node] = item
        elif isinstance(item, NoticeGiven):
            self.seen.append(f"notice {item.worker}")
            self.notices[item.worker] = item
        elif isinstance(item, WorkerLost):
            self.seen.append(f"lost {item.worker}")
        elif isinstance(item, Tick):
            assert self.replayer.finished
            self.seen.append("played")
        else:
            assert isinstance(item, Fact)
            self.seen.append(f"{item.name} {item.worker}")
        return self.seen[-1]

    def until(self, *wanted: str) -> list[str]:
        while not set(wanted) <= set(self.seen):
            self.next()
        return self.seen


@pytest.fixture
def played() -> Iterator[list[Play]]:
    plays: list[Play] = []
    yield plays
    for play in plays:
        play.replayer.close()
        assert play.replayer.finished


def play(played: list[Play], *lines: str, begun: TraceMoment | None = None) -> Play:
    played.append(Play(*lines, begun=begun))
    return played[-1]


def test_events_at_time_0_are_booted_before_the_clock_runs(played: list[Play]) -> None:
    one = play(played, "0,add,a", "0,add,b", "0.01,add,c")
    one.start(clock=False)
    one.until("up a", "up b")
    assert one.host.up == ["a", "b"]
    assert not one.replayer.finished
    assert "vm_requested c" not in one.seen
    one.replayer.start_clock()
    one.until("up c")


def test_a_revoked_vm_is_killed_and_reported(played: list[Play]) -> None:
    one = play(played, "0,add,a", "0,add,b", "0.01,remove,a")
    one.start(clock=False)
    one.until("up a", "up b")
    one.replayer.start_clock()
    assert one.until(f"{VM_KILLED} a")[-1] == f"{VM_KILLED} a"
    one.host.wait_until_killed("a")
    assert one.host.killed == ["a"]


def test_an_unneeded_vm_is_ended_and_not_counted_as_revoked(played: list[Play]) -> None:
    one = play(played, "0,add,a", "0,add,b")
    one.start(clock=False)
    one.until("up a", "up b")
    one.replayer.fleet.release("a", "never there")
    assert one.next() == "vm_released a"
    one.replayer.fleet.release("a")
    assert one.host.killed == ["a"]


def test_a_node_that_comes_back_is_another_machine(played: list[Play]) -> None:
    one = play(played, "0,add,a", "0.01,remove,a", "0.01,add,a")
    one.start(clock=False)
    one.until("up a")
    one.replayer.start_clock()
    one.until("up a.2")
    assert one.host.up == ["a", "a.2"]
    assert one.host.killed == ["a"]


def test_a_vm_that_is_revoked_while_it_boots_never_appears(played: list[Play]) -> None:
    one = play(played, "0,add,a", "0.01,remove,a", "0.02,add,b")
    boot = one.host.hold("a")
    one.start(clock=False)
    assert one.host.booting["a"].wait(BOUND_S)
    one.replayer.start_clock()
    one.until("vm_requested b")  # a was revoked earlier
    boot.set()
    one.until("up b")
    assert "up a" not in one.seen
    assert one.host.killed == ["a"]


def test_a_vm_that_does_not_come_up_is_reported_and_skipped(played: list[Play]) -> None:
    one = play(played, "0,add,a", "0,add,b")
    one.host.broken.add("a")
    one.start()
    one.until("vm_failed a", "lost a", "up b")
    assert "up a" not in one.seen


def test_closing_ends_the_play_and_its_threads_also_in_the_middle() -> None:
    before = set(threading.enumerate())
    one = Play("0,add,a", "0,add,b", "1000,remove,a")
    boot = one.host.hold("a")
    one.start()
    assert one.host.booting["a"].wait(BOUND_S)
    one.replayer.close()
    assert one.replayer.finished
    boot.set()
    one.host.wait_until_killed("a")  # it came up after the end
    for thread in set(threading.enumerate()) - before:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert one.host.up == ["a"]
    seen = []
    while (stamped := one.event_queue.get(0.0)) is not None:
        seen.append(stamped.item)
    assert all(isinstance(item, Fact) and item.name in ("vm_requested", TRACE_PLAYED) for item in seen)


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time pass while a notice is given, because that would shorten its lead."""
    monkeypatch.setattr(vm_fleet, "time", SimpleNamespace(monotonic=lambda: 100.0))


@pytest.mark.usefixtures("standing")
def test_a_notice_comes_before_the_revocation_by_its_lead(played: list[Play]) -> None:
    one = play(played, "0,add,a,,,,", "0,add,b,,,,", "0.3,remove,a,,,0.25,", "0.4,add,c,,,,")
    one.start(clock=False)
    one.until("up a", "up b")
    one.replayer.start_clock()
    one.until("vm_requested c")
    after = one.seen[one.seen.index("up b") + 1 :]
    assert after == ["notice a", f"{VM_KILLED} a", "vm_requested c"]
    assert one.notices["a"].lead_s == pytest.approx(0.25, abs=1e-3)
    assert one.notices["a"].notice == "trace-a"


def test_a_vm_comes_with_its_zone_type_and_price(played: list[Play]) -> None:
    one = play(
        played,
        "0,price,,east,p3,,0.9",
        "0,add,a,east,p3,,",
        "0,add,b,unknown,unknown,,",
        "0.01,price,,east,p3,,1.1",
        "0.02,add,c,east,p3,,",
    )
    one.start()
    one.until("up a", "up b", "up c")
    assert one.appeared["a"].facts == NodeFacts(provider="local", size="p3", zone="east")
    assert one.appeared["b"].facts == NodeFacts(provider="local")
    prices = [one.appeared[node].paid for node in "abc"]
    assert prices == [Paid(usd_per_h=0.9), None, Paid(usd_per_h=1.1)]


@pytest.mark.usefixtures("standing")
def test_another_manager_repeats_the_notices_in_force(played: list[Play]) -> None:
    """VM a is gone; b had its notice at 10; c is at 40; d, which still has to boot, has a price."""
    lines = ("0,price,,,,,2", *(f"0,add,{node},,,," for node in "abcd"), "20,remove,a,,,15,")
    later = ("30.3,remove,b,,,20.3,", "60,remove,c,,,29.9,")
    one = play(played, *lines, *later, begun=TraceMoment(num_played=5, clock_s=30.0, runs=True))
    one.replayer.resume(up=["b", "c"], appeared=["a", "b", "c"])
    one.start()
    one.until(f"{VM_KILLED} b", "notice b", "notice c", "up d")
    assert one.notices["b"].lead_s == pytest.approx(0.3, abs=1e-3)
    assert one.notices["c"].lead_s == pytest.approx(29.9, abs=0.01)
    assert "notice a" not in one.seen
    assert one.appeared["d"].paid == Paid(usd_per_h=2)


LINES = ("0,add,a", "0,add,b", "0.01,remove,a", "0.02,add,a", "0.02,add,c", "0.03,remove,b", "0.04,add,d")


def test_how_far_the_trace_came_is_noted_before_it_is_played(played: list[Play]) -> None:
    one = play(played, *LINES[:3])
    one.start()
    one.until("played")
    assert [moment.num_played for moment in one.moments if moment.runs][-1] == 3
    assert one.moments[0].clock_s == 0
    assert one.moments[-1].clock_s >= 0.01


def test_another_manager_plays_the_rest_and_finishes_what_was_left_half_done(played: list[Play]) -> None:
    """When the manager died, b had not been killed yet, a.2 was still booting, and the controller did not know of c."""
    one = play(played, *LINES, begun=TraceMoment(num_played=6, clock_s=0.03))
    boot = one.host.hold("a.2")
    one.replayer.resume(up=["b", "c"], appeared=["a", "b"])
    assert one.replayer.fleet.booting
    boot.set()
    one.start()
    assert set(one.until("up c", "up a.2", "up d", "played")) >= {"vm_requested d"}
    assert one.host.killed == ["b"]
    assert one.host.up == ["a.2", "d"]
    assert not one.replayer.fleet.booting


def test_a_vm_that_died_is_not_booted_again_by_another_manager(played: list[Play]) -> None:
    one = play(played, "0,add,a", "0,add,b", begun=TraceMoment(num_played=2))
    one.replayer.resume(up=["b"], appeared=["a", "b"])
    one.start()
    one.until("played")
    assert one.host.up == []
    assert not one.replayer.fleet.booting


def test_a_player_that_was_never_started_closes() -> None:
    """The start may fail after it is made: because of a full disk, or because the manager cannot be recorded."""
    Play("0,add,a").replayer.close()

from __future__ import annotations

from manager.engine.loop.event_queue import RunClock


class Machine:
    def __init__(self) -> None:
        self.wall_s, self.up_s = 1_000_000.0, 50.0

    def passes(self, seconds: float) -> None:
        self.wall_s += seconds
        self.up_s += seconds

    def clock(self, epoch_s: float | None = None, not_before_s: float = 0.0) -> RunClock:
        return RunClock(epoch_s, not_before_s, lambda: self.wall_s, lambda: self.up_s)


def test_a_runs_clock_begins_at_wall_time_and_ignores_later_changes() -> None:
    machine = Machine()
    clock = machine.clock()
    assert clock.now_s() == 1_000_000.0
    machine.passes(5.0)
    machine.wall_s += 3600.0
    assert clock.now_s() == 1_000_005.0
    machine.wall_s -= 7200.0
    assert clock.now_s() == 1_000_005.0


def test_a_manager_that_takes_over_continues_the_first_ones_clock() -> None:
    machine = Machine()
    first = machine.clock()
    machine.passes(40.0)
    machine.wall_s += 3600.0
    assert machine.clock(first.epoch_s, not_before_s=1_000_010.0).now_s() == first.now_s() == 1_000_040.0


def test_a_session_that_begins_after_another_is_never_before_its_last_line() -> None:
    machine = Machine()
    assert machine.clock(not_before_s=999_000.0).now_s() == 1_000_000.0
    clock = machine.clock(not_before_s=1_000_900.0)
    machine.passes(1.0)
    assert clock.now_s() == 1_000_901.0

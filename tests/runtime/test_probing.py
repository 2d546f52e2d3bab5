"""Probes: the timed work, their ends, and that they do not change a worker's weights."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from morph.contract.faults import SlowSpell
from morph.contract.messages import (
    CommitOrder,
    ProbeOrder,
    ReshapeOrder,
    Slot,
    StateSource,
    StepOrder,
)
from morph.runtime.device.task_clock import CoreTimes
from morph.runtime.process import prober
from morph.runtime.process.prober import MICRO_BATCHES, Prober
from morph.runtime.process.single import single_plan
from morph.runtime.process.worker import Worker, set_up
from tests.system.harness import MICRO_BATCH_SIZE, NUM_SECTIONS, TinyJob, load_tiny_job, setup_of_tiny_job

ORDER = ProbeOrder(probe=2, step=0, first_section=0, end_section=1, healthy_s=2.0)


class Work:
    """Work that reports 3 s each time, and more the first time."""

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        self.num_run = 0
        self._before = before

    def __call__(self) -> float:
        self._before(self.num_run)
        self.num_run += 1
        return 100.0 if self.num_run == 1 else 3.0


def test_the_first_micro_batch_warms_up_and_does_not_count() -> None:
    work = Work()
    answer = Prober("w").run(ORDER, work)
    assert (answer.worker, answer.probe, answer.slowdown) == ("w", 2, 1.5)
    assert work.num_run == 1 + MICRO_BATCHES


def test_a_worker_that_was_slow_by_its_sums_is_probed_by_its_mean() -> None:
    times_s = iter([100.0, 2.0, 2.0, 2.0, 2.0, 12.0])
    assert Prober("w").run(ORDER.model_copy(update={"by_sums": True}), lambda: next(times_s)).slowdown == 2.0


def test_where_all_lack_cores_a_probe_leaves_out_its_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    queued_s = itertools.chain.from_iterable((10.0 * number, 10.0 * number + 1.0) for number in itertools.count())
    clock = nullcontext(lambda: CoreTimes(0.0, next(queued_s)))
    monkeypatch.setattr(prober, "core_clock", lambda: clock)
    order = ORDER.model_copy(update={"waited_s": 2.0, "healthy_s": 4.0})
    assert Prober("w").run(order, Work()).slowdown == 1.0
    monkeypatch.setattr(prober, "core_clock", lambda: nullcontext(lambda: CoreTimes(0.0, None)))
    assert Prober("w").run(order, Work()).slowdown == 0.75


def test_a_probe_that_is_left_ends_at_the_next_micro_batch() -> None:
    prober = Prober("w")
    work = Work(lambda number: prober.leave(2) if number == 2 else None)
    assert prober.run(ORDER, work).slowdown == 1.5
    assert work.num_run == 3


def test_a_probe_cancelled_before_it_began_measures_nothing() -> None:
    prober = Prober("w")
    prober.leave(2)
    work = Work()
    assert prober.run(ORDER, work).slowdown is None
    assert work.num_run == 0
    assert prober.run(ORDER.model_copy(update={"probe": 3}), work).slowdown == 1.5


def test_a_probe_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(prober.time, "monotonic", lambda: clock[0])

    def pass_time(_: int) -> None:
        clock[0] += prober.LIMIT_S

    work = Work(pass_time)
    assert Prober("w").run(ORDER, work).slowdown == 1.5
    assert work.num_run == 2


@pytest.fixture(scope="module")
def tiny_job() -> TinyJob:
    return load_tiny_job()


class Alone:
    """One worker in this process that trains the tiny job as 1x1."""

    def __init__(self, job: TinyJob, directory: Path, spells: tuple[SlowSpell, ...] = ()) -> None:
        self._job = job
        setup = setup_of_tiny_job(job.fingerprint, worker="w", checkpoint_url=str(directory), slow_spells=spells)
        worker = set_up(setup)
        assert isinstance(worker, Worker)
        self.worker = worker

    def form(self) -> None:
        num_micro_batches = self._job.batch_size // MICRO_BATCH_SIZE
        plan = single_plan(self._job.fingerprint, NUM_SECTIONS, MICRO_BATCH_SIZE, num_micro_batches)
        sources = tuple(StateSource(worker="w", unit=unit, kind="initial") for unit in self._job.units)
        slots = (Slot(worker="w", stage=0, replica=0),)
        order = ReshapeOrder(generation=1, version=0, plan=plan, slots=slots, sources=sources)
        assert self.worker.reshape(order).kind == "reshaped"

    def step(self, step: int) -> None:
        for attempt in range(8):
            answer = self.worker.step(StepOrder(generation=1, step=step, attempt=attempt))
            assert answer.kind == "prepared", answer
            if not answer.overflowed:
                return
        raise AssertionError("overflowed again and again")

    def written(self, version: int) -> dict[str, str]:
        units = tuple(self._job.units)
        answer = self.worker.commit(CommitOrder(generation=1, version=version, checkpoint_units=units))
        assert answer.kind == "committed", answer
        found: dict[str, str] = {}
        while len(found) < len(units):
            beat = self.worker.heartbeat(60.0)
            assert beat.written, "nothing was written"
            found |= {entry.unit: entry.sha256 for entry in beat.written}
        return found

    def probe(self, probe: int, step: int, sections: tuple[int, int], healthy_s: float = 1.0) -> float:
        order = ProbeOrder(
            probe=probe, step=step, first_section=sections[0], end_section=sections[1], healthy_s=healthy_s
        )
        answer = self.worker.probe(order)
        assert answer.slowdown is not None, answer.error
        return answer.slowdown


@pytest.mark.slow
def test_probes_between_steps_of_sections_held_or_not_change_no_bit(tiny_job: TinyJob, tmp_path: Path) -> None:
    plain, probed = Alone(tiny_job, tmp_path / "plain"), Alone(tiny_job, tmp_path / "probed")
    assert probed.probe(1, 0, (1, 3)) > 0  # before it holds anything
    for alone in (plain, probed):
        alone.form()
    number = 1
    for step in range(2):
        for alone in (plain, probed):
            alone.step(step)
        for sections in ((0, 2), (2, NUM_SECTIONS)):
            number += 1
            assert probed.probe(number, step, sections) > 0
    assert probed.written(2) == plain.written(2)


@pytest.mark.slow
def test_a_probe_finds_a_slow_spell_and_its_end(
    tiny_job: TinyJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the worker's own compute and waits, because other load on these cores varies from probe to probe."""
    slept_s: list[float] = []
    ours = {"perf_counter": lambda: time.thread_time() + sum(slept_s), "thread_time": time.thread_time}
    monkeypatch.setattr("morph.runtime.device.task_clock.time", SimpleNamespace(**ours, sleep=slept_s.append))
    alone = Alone(tiny_job, tmp_path, (SlowSpell(worker="w", factor=12.0, first_step=3, end_step=5),))
    numbers = itertools.count(1)

    def probe(step: int, healthy_s: float = 1.0) -> float:
        return min(alone.probe(next(numbers), step, (0, NUM_SECTIONS), healthy_s) for _ in range(3))

    healthy_s = probe(2)
    assert probe(3, healthy_s) > 4
    assert probe(4, healthy_s) > 4
    assert probe(5, healthy_s) < 4


@pytest.mark.slow
def test_heartbeats_tell_what_each_micro_batch_took(tiny_job: TinyJob, tmp_path: Path) -> None:
    alone = Alone(tiny_job, tmp_path)
    alone.form()
    alone.worker.heartbeat(0.0)
    answer = alone.worker.step(StepOrder(generation=1, step=0))
    assert answer.kind == "prepared"
    times = alone.worker.heartbeat(0.0).times
    assert len(times.forward_s) == min(16, tiny_job.batch_size // MICRO_BATCH_SIZE)
    assert times.generation == 1
    assert sum(times.recompute_s) == 0.0  # a 1x1 worker keeps its activations
    assert 0 < sum(times.forward_s) <= answer.times.forward_s + 1e-5
    assert 0 < sum(times.backward_s) <= answer.times.backward_s + 1e-5
    assert alone.worker.heartbeat(0.0).times is None


@pytest.mark.slow
def test_sections_that_cannot_be_probed_are_reported_as_an_error(tiny_job: TinyJob, tmp_path: Path) -> None:
    alone = Alone(tiny_job, tmp_path)
    answer = alone.worker.probe(ProbeOrder(probe=1, step=0, first_section=90, end_section=91, healthy_s=1.0))
    assert answer.slowdown is None
    assert answer.error is not None
    assert "IndexError" in answer.error

"""How often the live controller takes healthy workers for slow by chance, and how surely it finds slow ones."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from controller_script import Script
from simulated_job import RULES, make_config, make_plan

from manager.controller.state.events import ComputeTimesSeen, WorkerTimes
from manager.controller.state.nodes import NodeState
from morph.contract.rules import StutterRules
from tests.grids import IS_LONG, cells

pytestmark = pytest.mark.slow

STUTTER = StutterRules()
SHAPES = [(3, 1), (6, 1), (1, 2), (3, 2), (2, 3), (3, 3)]
JITTER = [(0.05, 0.0), (0.3, 0.0), (0.1, 0.95), (0.2, 0.95)]
"""The spread and memory of times."""
WINDOWS = 80
SEEDS = 12 if IS_LONG else 5
SLOW = 1.3


def alarms(
    shape: tuple[int, int],
    seed: int,
    spread: float,
    memory: float,
    slow_from: int | None = None,
    slowness: Callable[[int], float] = lambda _: SLOW,
) -> list[str]:
    """Let every member report window after window; return the workers found slow, once for each time.

    Args:
        spread: Standard deviation of the logarithm of a micro-batch's time.
        memory: Correlation of successive micro-batches, because a core that is taken stays so for a while.
        slow_from: The window from which the first member is slow.
        slowness: Factor of its times then, by the number of the micro-batch.
    """
    script = measured(shape)
    jitter = {worker: _jitter(random.Random(f"{seed} {worker}"), spread, memory) for worker in script.members}
    slow, onset = script.members[0], WINDOWS if slow_from is None else slow_from
    found: list[str] = []
    for window in range(WINDOWS):
        before = slow_ones(script)
        times = []
        for slot in script.state.slots:
            usual_s, first = len(script.state.plan.stages[slot.stage].sections), window * STUTTER.samples
            compute_s = tuple(
                usual_s * next(jitter[slot.worker]) * (slowness(first + number) if is_slow else 1.0)
                for is_slow in (slot.worker == slow and window >= onset,)
                for number in range(STUTTER.samples)
            )
            times.append(WorkerTimes(worker=slot.worker, generation=1, compute_s=compute_s))
        script.tell(ComputeTimesSeen(times=tuple(times)))
        found += slow_ones(script) - before
    return found


def measured(shape: tuple[int, int]) -> Script:
    """Return a script that trains in this shape, by the usual rules for slow workers."""
    plan, count = make_plan(*shape), shape[0] * shape[1]
    policy = make_config().policy.model_copy(update={"rules": RULES.model_copy(update={"stutter": STUTTER})})
    script = Script(plans={count: plan}, expected_nodes=count, section_compute_s=(1.0,) * 6, policy=policy)
    script.ready(*(f"n{number}" for number in range(count)))
    script.reshaped()
    return script


def slow_ones(script: Script) -> set[str]:
    return {worker for worker, entry in script.state.workers.items() if entry.node is NodeState.SUSPECT}


def _jitter(draw: random.Random, spread: float, memory: float) -> Iterator[float]:
    value = draw.gauss(0, spread)
    while True:
        value = memory * value + math.sqrt(1 - memory**2) * draw.gauss(0, spread)
        yield math.exp(value)


@pytest.mark.parametrize(("shape", "jitter"), cells(SHAPES, JITTER), ids=str)
def test_healthy_workers_are_hardly_ever_found_slow(shape: tuple[int, int], jitter: tuple[float, float]) -> None:
    spread, memory = jitter
    found = sum(len(alarms(shape, seed, spread, memory)) for seed in range(SEEDS))
    per_thousand = 1000 * found / (SEEDS * WINDOWS * shape[0] * shape[1])
    print(f"{shape}, spread {spread}, memory {memory}: {per_thousand:.2f} false alarms in 1000 windows")
    assert per_thousand <= (0.0 if memory == 0 else 3.0)


@pytest.mark.parametrize(("shape", "slow_from"), cells(SHAPES, [0, 1, 2, 20]), ids=str)
def test_only_the_worker_that_is_30_percent_slower_is_found(shape: tuple[int, int], slow_from: int) -> None:
    for seed in range(3):
        assert alarms(shape, seed, 0.05, 0.0, slow_from) == ["n0"], f"seed {seed}"


def bursts(number: int) -> float:
    """Return the times of a worker that computes in 30 of every 90 ms, at 9 ms per micro-batch; most take no longer."""
    num_stops = (number + 1) * 9 // 30 - number * 9 // 30
    return (9 + 60 * num_stops) / 9


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_worker_that_now_and_then_stands_still_is_found(shape: tuple[int, int]) -> None:
    for seed in range(3):
        assert alarms(shape, seed, 0.05, 0.0, 0, bursts) == ["n0"], f"seed {seed}"


def on_a_busy_core(draw: random.Random, stopped: bool) -> Iterator[tuple[float, float]]:
    """Yield the time of each micro-batch of 1 ms, and the part of it spent queued, on a core that ten threads share.

    With ``stopped`` the process is stopped in 60 of every 90 ms: while it is queued this costs nothing, and afterwards
    it queues again.
    """
    now_s = draw.uniform(0, 0.09)
    while True:
        begun_s, left_s, queued_s = now_s, 0.001, 0.0
        while left_s > 1e-9:
            wait_s = draw.expovariate(20)
            now_s, queued_s = now_s + wait_s, queued_s + wait_s
            into_s = now_s % 0.09
            if stopped and into_s >= 0.03:
                now_s += 0.09 - into_s
                continue
            turn_s = min(left_s, draw.uniform(0.0005, 0.003), 0.03 - into_s if stopped else 1.0)
            now_s, left_s = now_s + turn_s, left_s - turn_s
        yield now_s - begun_s, queued_s


Works = Mapping[str, Iterator[tuple[float, float]]]


def found_under_load(script: Script, works: Works, num_windows: int, *, is_known: bool = True) -> set[str]:
    """Let members report windows of these times and queued parts of them (seconds); return those found slow.

    ``is_known``: whether the kernel tells the queued parts.
    """
    found: set[str] = set()
    assert script.state.plan is not None
    lengths = {slot.worker: len(script.state.plan.stages[slot.stage].sections) for slot in script.state.slots}
    for _ in range(num_windows):
        times = []
        for worker, length in lengths.items():
            pairs = [next(works[worker]) for _ in range(STUTTER.samples)]
            compute_s, queued_s = zip(*((length * whole_s, length * part_s) for whole_s, part_s in pairs), strict=True)
            kept_s = queued_s if is_known else ()
            times.append(WorkerTimes(worker=worker, generation=1, compute_s=compute_s, queued_s=kept_s))
        script.tell(ComputeTimesSeen(times=tuple(times)))
        found |= slow_ones(script)
    return found


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] > 1], ids=str)
def test_at_a_load_of_20_on_two_cores_a_worker_that_is_stopped_in_bursts_is_found_alone(shape: tuple[int, int]) -> None:
    for seed, slow in cells(range(3), ({"n0"}, set[str]())):
        script = measured(shape)
        works = {worker: on_a_busy_core(random.Random(f"{seed} {worker}"), worker in slow) for worker in script.members}
        assert found_under_load(script, works, WINDOWS) == slow, f"seed {seed}"


RECORDED = Path(__file__).with_name("busy_cores.json")
"""Three threads with micro-batches of 1 ms at a load of 20 on two cores, the first stopped in 60 of every 90 ms.

Milliseconds of each micro-batch and the queued part, as ``core_clock`` measured them on Linux 6.18.
"""


def test_in_recorded_times_at_a_load_of_20_the_worker_that_was_stopped_in_bursts_is_found_alone() -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    script = measured((1, 3))
    works = {
        worker: ((whole_ms / 1e3, queued_ms / 1e3) for whole_ms, queued_ms in times)
        for worker, times in zip(script.members, recorded, strict=True)
    }
    assert found_under_load(script, works, len(recorded[0]) // STUTTER.samples) == {"n0"}


def test_a_worker_whose_own_machine_is_busy_is_slow_and_one_that_waits_like_all_others_is_not() -> None:
    def judged(*waits_s: float, own_s: tuple[float, ...] = (1.0, 1.0, 1.0), is_known: bool = True) -> set[str]:
        script = measured((1, 3))
        works: Works = {
            worker: itertools.repeat((one_s + wait_s, wait_s))
            for worker, one_s, wait_s in zip(script.members, own_s, waits_s, strict=True)
        }
        return found_under_load(script, works, 20, is_known=is_known)

    assert judged(2.0, 0.0, 0.0) == {"n0"}
    assert judged(2.0, 0.1, 0.0) == {"n0"}
    assert judged(2.0, 0.1, 0.1) == set()
    assert judged(2.0, 0.1, 0.1, is_known=False) == {"n0"}
    assert judged(9.0, 9.0, 9.0, own_s=(2.0, 1.0, 1.0)) == set(), "beside the waits, its excess delays nobody"
    assert judged(2.0, 2.0, 2.0, own_s=(4.0, 1.0, 1.0)) == {"n0"}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_few_long_stalls_make_no_worker_slow(shape: tuple[int, int]) -> None:
    draw = random.Random(5)
    stalls = {draw.randrange(WINDOWS * STUTTER.samples) for _ in range(8)}
    assert alarms(shape, 1, 0.05, 0.0, 0, lambda number: 40.0 if number in stalls else 1.0) == []

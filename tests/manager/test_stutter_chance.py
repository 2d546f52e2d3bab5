"""How often the live controller takes healthy workers for slow by chance, and how surely it finds slow ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

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
    plan, count = make_plan(*shape), shape[0] * shape[1]
    rules = RULES.model_copy(update={"stutter": STUTTER})
    policy = make_config().policy.model_copy(update={"rules": rules})
    script = Script(plans={count: plan}, expected_nodes=count, section_compute_s=(1.0,) * 6, policy=policy)
    script.ready(*(f"n{number}" for number in range(count)))
    script.reshaped()
    jitter = {worker: _jitter(random.Random(f"{seed} {worker}"), spread, memory) for worker in script.members}
    slow, onset = script.members[0], WINDOWS if slow_from is None else slow_from
    found: list[str] = []
    for window in range(WINDOWS):
        before = slow_ones(script)
        times = []
        for slot in script.state.slots:
            usual_s, first = len(plan.stages[slot.stage].sections), window * STUTTER.samples
            compute_s = tuple(
                usual_s * next(jitter[slot.worker]) * (slowness(first + number) if is_slow else 1.0)
                for is_slow in (slot.worker == slow and window >= onset,)
                for number in range(STUTTER.samples)
            )
            times.append(WorkerTimes(worker=slot.worker, generation=1, compute_s=compute_s))
        script.tell(ComputeTimesSeen(times=tuple(times)))
        found += slow_ones(script) - before
    return found


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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_few_long_stalls_make_no_worker_slow(shape: tuple[int, int]) -> None:
    draw = random.Random(5)
    stalls = {draw.randrange(WINDOWS * STUTTER.samples) for _ in range(8)}
    assert alarms(shape, 1, 0.05, 0.0, 0, lambda number: 40.0 if number in stalls else 1.0) == []

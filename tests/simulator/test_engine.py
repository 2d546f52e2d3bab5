from dataclasses import replace

import numpy as np
import pytest

from simulator.engine import reference
from simulator.engine.pipeline import Played, StageTimes, run_pipeline
from tests.seeds import each_seed


def assert_alike(played: Played, other: Played) -> None:
    """Check that every task, even a redundant one, ran in the same order and at the same nanosecond."""
    assert played.orders == other.orders
    for name in ("start_ns", "redundant_ns"):
        starts, others = (
            [[stage.tolist() for stage in stages] for stages in getattr(each, name)] for each in (played, other)
        )
        assert starts == others
    assert played.last_backward_ns.tolist() == other.last_backward_ns.tolist()
    assert (played.redone_ns is None) == (other.redone_ns is None)
    if played.redone_ns is not None and other.redone_ns is not None:
        assert played.redone_ns.tolist() == other.redone_ns.tolist()


def _random_times(rng: np.random.Generator, num_stages: int) -> StageTimes:
    top = int(rng.choice([3, 10, 1000]))  # small numbers bring many simultaneous events
    forward = rng.integers(1, top + 1, num_stages)
    recompute = np.ones(num_stages, np.bool_)
    recompute[-1] = False
    if rng.random() < 0.2:
        recompute[:] = False
    wires = [rng.integers(0, top + 1, num_stages) if rng.random() < 0.5 else None for _ in range(2)]
    latencies = [rng.integers(0, top + 1, num_stages) for _ in range(2)]
    return StageTimes(
        forward_ns=forward,
        recompute_ns=forward.copy(),
        backward_ns=rng.integers(1, 2 * top + 1, num_stages),
        activation_ns=latencies[0] + (0 if wires[0] is None else wires[0]),
        gradient_ns=latencies[1] + (0 if wires[1] is None else wires[1]),
        window=int(rng.choice([1, 2, 4])) * np.arange(num_stages - 1, -1, -1) + 1,
        recompute=recompute,
        activation_wire_ns=wires[0],
        gradient_wire_ns=wires[1],
    )


def _even_times(num_stages: int, *, latency: int = 0, slope: int = 1, recompute: bool = True) -> StageTimes:
    again = np.full(num_stages, recompute)
    again[-1] = False
    return StageTimes(
        forward_ns=np.full(num_stages, 100),
        recompute_ns=np.full(num_stages, 100),
        backward_ns=np.full(num_stages, 200),
        activation_ns=np.full(num_stages, latency),
        gradient_ns=np.full(num_stages, latency),
        window=slope * np.arange(num_stages - 1, -1, -1) + 1,
        recompute=again,
    )


@each_seed(150, in_long=300)
def test_every_task_starts_when_the_reference_engine_starts_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = _random_times(rng, int(rng.integers(1, 7)))
    counts = tuple(int(count) for count in rng.integers(1, 12, int(rng.integers(1, 4))))
    assert_alike(run_pipeline(times, counts, keep_times=True), reference.run_pipeline(times, counts))


@each_seed(150, in_long=2000)
def test_replicas_of_other_lengths_are_played_as_each_is_alone(seed: int) -> None:
    rng = np.random.default_rng(40_000 + seed)
    times = _random_times(rng, int(rng.integers(1, 8)))
    most = int(rng.choice([4, 20, 300]))
    counts = tuple(rng.integers(max(1, most - 4) if seed % 3 else 1, most + 1, 3).tolist())
    keep_times = seed % 2 == 0
    played = run_pipeline(times, counts, keep_orders=True, keep_times=keep_times)
    for replica, count in enumerate(counts):
        alone = run_pipeline(times, (count,), keep_orders=True, keep_times=keep_times)
        own = slice(replica, replica + 1)
        assert_alike(Played(played.last_backward_ns[:, own], played.orders[own], played.start_ns[own]), alone)


@each_seed(150, in_long=300)
def test_skipping_periods_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    times = _random_times(rng, int(rng.integers(1, 9)))
    counts = (int(rng.integers(1, 400)),)
    plain = run_pipeline(times, counts, keep_orders=True, skip_periods=False)
    skipped = run_pipeline(times, counts, keep_orders=True)
    assert skipped.orders == plain.orders
    assert skipped.last_backward_ns.tolist() == plain.last_backward_ns.tolist()


@pytest.mark.parametrize("schedule", ["varuna", "gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(10))
def test_no_stage_runs_two_tasks_at_once_or_breaks_its_window(schedule: str, seed: int) -> None:
    rng = np.random.default_rng(2000 + seed)
    times = _random_times(rng, 4)
    played = run_pipeline(times, (9,), schedule=schedule, keep_times=True)  # type: ignore[arg-type]
    lengths = {"F": times.forward_ns, "R": times.recompute_ns, "B": times.backward_ns}
    for stage in range(4):
        order, starts = played.orders[0][stage], played.start_ns[0][stage]
        ends = starts + np.array([lengths[letter][stage] for letter in order])
        assert (starts[1:] >= ends[:-1]).all()
        in_flight = np.cumsum([{"F": 1, "B": -1, "R": 0}[letter] for letter in order])
        assert in_flight.max() <= (9 if schedule == "gpipe" else times.window[stage])


def test_a_lone_stage_alternates_forward_and_backward() -> None:
    played = run_pipeline(_even_times(1), (3,), keep_orders=True)
    assert played.orders == (("FBFBFB",),)
    assert played.makespan_ns == 900


def test_the_recompute_is_done_when_the_gradient_arrives() -> None:
    played = run_pipeline(_even_times(2), (1,), keep_times=True)
    assert played.orders == (("FRB", "FB"),)
    assert played.start_ns[0][0].tolist() == [0, 300, 400]


def test_a_recomputed_micro_batch_waits_for_its_gradient_and_runs_nothing_else() -> None:
    played = run_pipeline(_even_times(4, latency=50, slope=4), (12,), keep_orders=True)
    assert all("RF" not in order for order in played.orders[0])


def test_a_backward_is_preferred_to_a_forward() -> None:
    played = run_pipeline(_even_times(2, slope=4, recompute=False), (6,), keep_times=True)
    assert played.orders[0][0] == "FFFFBFBFBBBB"
    assert played.start_ns[0][0].tolist()[:6] == [0, 100, 200, 300, 400, 600]


def test_gpipe_runs_every_forward_first_and_recomputes_everywhere() -> None:
    times = _even_times(3)
    again = replace(times, recompute=np.ones(3, np.bool_), window=np.full(3, 4))
    played = run_pipeline(again, (4,), schedule="gpipe", keep_orders=True)
    assert played.orders == (("FFFFRBRBRBRB",) * 3,)


def test_figure_4_takes_28_units_one_recompute_fewer_than_gpipe() -> None:
    """The figure's own order takes 27 units: docs/decisions/0005-forward-before-early-recompute.md."""
    gpipe = replace(_even_times(4), recompute=np.ones(4, np.bool_), window=np.full(4, 5))
    assert run_pipeline(_even_times(4, slope=2), (5,)).makespan_ns == 2800
    assert run_pipeline(gpipe, (5,), schedule="gpipe").makespan_ns == 2800 + 100


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_shared_cores_bound_how_many_tasks_run_at_once(slots: int) -> None:
    times = _even_times(3)
    played = run_pipeline(times, (4, 3), compute_slots=slots, keep_times=True)
    edges = []
    for replica in range(2):
        for stage in range(3):
            order, starts = played.orders[replica][stage], played.start_ns[replica][stage]
            for letter, start in zip(order, starts, strict=True):
                edges += [(int(start), 1), (int(start) + (200 if letter == "B" else 100), -1)]
    running = np.cumsum([change for _, change in sorted(edges, key=lambda edge: (edge[0], edge[1]))])
    assert running.max() == slots
    work = 7 * (3 * 100 + 2 * 100 + 3 * 200)
    assert played.makespan_ns >= work / slots

"""The expected time of a mini-batch, under any conditions, is at least its bound and the sum of its parts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator import Simulation, simulate, synthetic_profile
from tests.grids import IS_LONG

SECTIONS = 5


_OTHERS: tuple[dict[str, Any], ...] = (
    *({"compute_slots": slots} for slots in (2, 3)),
    *({"overlap": "none", **nodes} for nodes in ({}, {"num_gpus_per_node": 2})),
    *({"redundant_computation": mode} for mode in ("lflb", "eflb", "efeb")),
)


@st.composite
def _cases(draw: st.DrawFn) -> Simulation:
    """Yield one random shape of a random job, with workers slower and faster than measured, and times that vary."""
    times_s = st.floats(1e-6, 0.02)
    jitter = draw(st.sampled_from((0.0, 0.3, 0.95)))
    profile = synthetic_profile(
        num_sections=SECTIONS,
        forward_s=draw(st.lists(times_s, min_size=SECTIONS, max_size=SECTIONS)),
        parameter_bytes=draw(st.integers(0, 50_000_000)),
        latency_s=draw(st.sampled_from((0.0, 1e-4, 0.02))),
        bandwidth_bytes_per_s=draw(st.sampled_from((1e7, 1e9))),
        batch_size=draw(st.integers(4, 24)),
        micro_batch_size=1,
        tied=draw(st.booleans()),
        jitter=jitter,
    )
    depth, replicas = draw(st.integers(1, SECTIONS)), draw(st.integers(1, 4))
    workers = st.tuples(st.integers(0, depth - 1), st.integers(0, replicas - 1)) | st.integers(0, depth - 1)
    conditions: dict[str, Any] = {
        "slow": draw(st.dictionaries(workers, st.floats(0.05, 3.0), max_size=4)),
        "schedule": draw(st.sampled_from(("varuna", "gpipe", "1f1b"))),
        "share_links": draw(st.booleans()),
        "recompute": draw(st.booleans()),
        "all_reduce": draw(st.sampled_from(("overlapped", "late"))),
        **draw(st.sampled_from(({}, {"num_gpus_per_node": 2}, {"num_gpus_per_node": 3}, *_OTHERS))),
    }
    if jitter:
        conditions |= {"jitter_seed": draw(st.integers(0, 99)), "num_draws": draw(st.integers(1, 4))}
    return simulate(profile, num_stages=depth, num_replicas=replicas, **conditions)


@pytest.mark.slow
@settings(
    max_examples=150 if IS_LONG else 40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(_cases())
def test_no_expected_time_is_below_its_bound_and_parts_add_up(case: Simulation) -> None:
    expected = case.expected
    assert 0 < expected.lower_bound_s <= expected.mini_batch_s
    rounded_s = 0 if case.jitter is None else 1e-9 * case.plan.num_micro_batches  # drawn means are in whole ns
    assert sum(expected.parts_s.values()) == pytest.approx(expected.mini_batch_s, rel=1e-12, abs=rounded_s)
    assert sum(case.breakdown_s.values()) == pytest.approx(expected.mini_batch_s, rel=1e-12)
    assert min(*expected.parts_s.values(), *case.breakdown_s.values()) >= 0
    if case.jitter is None:
        workers = case.timeline.groupby(["stage", "replica"])
        spans_s = workers["end_s"].max() - workers["start_s"].min()
        assert spans_s.max() <= expected.mini_batch_s * (1 + 1e-9), "a worker begins again a mini-batch later"

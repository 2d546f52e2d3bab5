from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrate.links import network
from calibrate.links.network import NetworkSpec, growing_in_flight, growing_rings, measure_network
from morph.contract.errors import ClusterError, WaitTimeout
from tests.calibrate.helpers import check_that_none_outlives, helpers_of

PEER = "calibrate.links.peer"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def spec(**changes: Any) -> NetworkSpec:
    small = NetworkSpec(
        message_sizes=(10,), reduced_sizes=(16,), ring_sizes=(2,), in_flight=(1,), element="int64", most=2
    )
    return replace(small, **changes)


def test_messages_reductions_and_a_barrier_are_measured() -> None:
    result = measure_network(
        spec(
            message_sizes=(1000, 100_000),
            reduced_sizes=(4096, 80_000),
            ring_sizes=(2, 3),
            in_flight=(1, 2),
            most=7,
            budget_s=30.0,  # seven samples, however busy the machine is
        )
    )
    for direction in (result.link.activation, result.link.gradient):
        assert [entry.size_bytes for entry in direction] == [1000, 100_000]
        assert all(entry.time.median_s > 0 and entry.time.num_samples == 7 for entry in direction)
    keys = {(entry.ring_size, entry.size_bytes, entry.in_flight) for entry in result.all_reduce}
    assert keys == {(ring, size, count) for ring in (2, 3) for size in (4096, 80_000) for count in (1, 2)}
    assert all(entry.time.median_s > 0 and entry.time.num_samples == 7 for entry in result.all_reduce)
    assert result.barrier.median_s > 0
    assert helpers_of(os.getpid(), PEER) == []


def test_links_can_be_measured_alone() -> None:
    result = measure_network(spec(reduced_sizes=(), ring_sizes=(), most=5, element="float32"))
    assert [entry.size_bytes for entry in result.link.gradient] == [10]
    assert result.all_reduce == ()


@pytest.mark.parametrize(
    ("num_slots", "rings", "in_flight"),
    [
        (1, (2, 3, 4), (1, 2)),
        (2, (2, 3, 4), (1, 2)),
        (4, (2, 3, 4), (1, 2, 4)),
        (8, (2, 3, 4, 6, 8), (1, 2, 4, 8)),
        (96, (2, 3, 4, 6, 8), (1, 2, 4, 8)),
    ],
)
def test_rings_and_all_reduces_in_flight_grow_with_the_machine(
    num_slots: int, rings: tuple[int, ...], in_flight: tuple[int, ...]
) -> None:
    assert (growing_rings(num_slots), growing_in_flight(num_slots)) == (rings, in_flight)


def test_a_process_that_fails_is_reported_and_ends_the_others() -> None:
    with pytest.raises(ClusterError, match=r"measuring the network failed in process \d: .*KeyError: 'int3'"):
        measure_network(spec(element="int3"))
    assert helpers_of(os.getpid(), PEER) == []


def test_waiting_for_the_processes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "WAIT_S", 0.0)
    with pytest.raises(WaitTimeout, match="waited 0 s for the processes that measure the network"):
        measure_network(spec())
    assert helpers_of(os.getpid(), PEER) == []


def test_no_process_outlives_the_one_that_measures(tmp_path: Path) -> None:
    """Kill the process while it measures; ``test_crew`` covers Ctrl-C."""
    script = (
        "from calibrate.links.network import NetworkSpec, measure_network\n"
        "measure_network(NetworkSpec((10,), (16,), (2,), (1,), 'int64', most=10**9, budget_s=1e9))\n"
    )
    check_that_none_outlives(script, 2, PEER, signal.SIGKILL, tmp_path)

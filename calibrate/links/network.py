"""Measure messages, all-reduces and a barrier between processes, with the workers' own channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from calibrate.helpers.crew import Crew
from calibrate.timing.samples import timing
from morph.contract.profile import AllReduceTime, LinkProfile, SendTime, Timing
from morph.runtime.groups.store import StoreHost

WAIT_S = 300.0
PURPOSE = "measuring the network"
_HOST = "127.0.0.1"
_MAX_IN_FLIGHT = 8


@dataclass(frozen=True)
class NetworkMeasurement:
    """Between processes of one machine, over loopback, or of two (``calibrate.links.two_nodes``)."""

    link: LinkProfile
    all_reduce: tuple[AllReduceTime, ...]
    barrier: Timing


@dataclass(frozen=True)
class NetworkSpec:
    """What to measure.

    Args:
        message_sizes: Bytes of each message; both directions are measured.
        reduced_sizes: Bytes of each all-reduce; empty: only messages.
        ring_sizes: D of each all-reduce, 2 or more.
        in_flight: How many all-reduces are under way at once, each over a ring of its own between the same processes.
        element: ``int64`` or ``float32``, what is summed.
        devices: Where messages begin and end, in turns: what stages compute on.
        most: Samples of everything, at most.
        budget_s: No further sample of one message or one all-reduce after this.
    """

    message_sizes: tuple[int, ...]
    reduced_sizes: tuple[int, ...]
    ring_sizes: tuple[int, ...]
    in_flight: tuple[int, ...]
    element: str
    devices: tuple[str, ...] = ("cpu",)
    most: int = 100
    budget_s: float = 0.5


def growing_rings(num_slots: int) -> tuple[int, ...]:
    """Return ring sizes to measure on a machine with room for this many workers; four processes fit on any."""
    return (2, 3, 4, *(size for size in (6, 8) if size <= num_slots))


def growing_in_flight(num_slots: int) -> tuple[int, ...]:
    """Return k = 1, 2, 4, ... up to one all-reduce for each worker of this machine (Varuna 4.3); 2 in any case."""
    return tuple(count for count in (1, 2, 4, _MAX_IN_FLIGHT) if count <= max(2, num_slots))


def measure_network(spec: NetworkSpec) -> NetworkMeasurement:
    """Start processes, let them measure, and end them, whatever happens.

    Raises:
        ClusterError: a process failed; gives the end of what it said.
        WaitTimeout: not done within ``WAIT_S``.
    """
    store = StoreHost(_HOST)
    ranks = range(num_peers(spec))
    with Crew("calibrate.links.peer", len(ranks), PURPOSE) as crew:
        place = Place(store_host=_HOST, store_port=store.port(), listen=_HOST, two_nodes=False)
        for rank in ranks:
            crew.send(rank, peer_message(spec, place, rank))
        found = crew.gather(ranks, "the processes that measure the network", WAIT_S)
    return measurement(spec, [found[rank] for rank in ranks])


def num_peers(spec: NetworkSpec) -> int:
    """How many processes a measurement needs."""
    return max(2, *spec.ring_sizes) if spec.reduced_sizes else 2


@dataclass(frozen=True)
class Place:
    """Where a process meets the others, and where it listens."""

    store_host: str
    store_port: int
    listen: str
    two_nodes: bool


@dataclass(frozen=True)
class PeerSpec:
    """What one process does."""

    rank: int
    device: str
    place: Place
    network: NetworkSpec


def peer_message(spec: NetworkSpec, place: Place, rank: int) -> dict[str, Any]:
    """What one process is told: a ``PeerSpec`` as plain values."""
    return asdict(PeerSpec(rank, spec.devices[rank % len(spec.devices)], place, spec))


def measurement(spec: NetworkSpec, results: Sequence[Mapping[str, Any]]) -> NetworkMeasurement:
    """Put together what the processes answered, by rank, on one clock."""
    return NetworkMeasurement(
        link=_link(results, spec.message_sizes),
        all_reduce=_all_reduces(results, spec),
        barrier=timing(_spans([result["barrier"] for result in results[:2]])),
    )


def _link(results: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> LinkProfile:
    def one_way(direction: str, sender: int) -> tuple[SendTime, ...]:
        begun, received = results[sender][direction], results[1 - sender][direction]
        return tuple(
            SendTime(
                size_bytes=size,
                time=timing(
                    [(end - start) / 1e9 for start, end in zip(begun[str(size)], received[str(size)], strict=True)]
                ),
            )
            for size in sizes
        )

    return LinkProfile(activation=one_way("activation", 0), gradient=one_way("gradient", 1))


def _all_reduces(results: Sequence[Mapping[str, Any]], spec: NetworkSpec) -> tuple[AllReduceTime, ...]:
    return tuple(
        AllReduceTime(
            ring_size=ring,
            size_bytes=size,
            in_flight=count,
            time=timing(_spans([result["all_reduce"][f"{ring}/{size}/{count}"] for result in results[:ring]])),
        )
        for ring in (spec.ring_sizes if spec.reduced_sizes else ())
        for size in spec.reduced_sizes
        for count in spec.in_flight
    )


def _spans(members: Sequence[Sequence[tuple[int, int]]]) -> list[float]:
    """Seconds from the last member's start to the last member's end, for each sample of (start, end) in ns."""
    return [
        (max(end for _, end in sample) - max(start for start, _ in sample)) / 1e9
        for sample in zip(*members, strict=True)
    ]

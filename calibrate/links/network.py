"""Measures messages, all-reduces and a barrier between processes, with the workers' own channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from calibrate.helpers.crew import Crew
from calibrate.timing.samples import timing
from morph.contract.cluster import LinkSetting, RingSetting
from morph.contract.profile import AllReduceTime, LinkProfile, SendTime, Timing
from morph.runtime.groups.store import StoreHost

WAIT_S = 300.0
PURPOSE = "measuring the network"
_HOST = "127.0.0.1"
_MAX_IN_FLIGHT = 8


@dataclass(frozen=True)
class NetworkMeasurement:
    """Measurements between processes of one machine, over loopback, or of two (``calibrate.links.two_nodes``)."""

    link: LinkProfile
    all_reduce: tuple[AllReduceTime, ...]
    barrier: Timing
    links: Literal["staged", "ipc"] = "staged"
    rings: Literal["gloo", "nccl"] = "gloo"
    ring_bytes: int | None = None
    """Bytes of a device's memory for each ring of NCCL; None: not measured."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """The reasons why ``links`` or ``rings`` are not those that were requested."""


@dataclass(frozen=True)
class Carriers:
    """How messages and reductions are carried: as ``vms.links`` and ``vms.rings`` of the planned runs."""

    links: LinkSetting = "staged"
    rings: RingSetting = "gloo"


@dataclass(frozen=True)
class NetworkSpec:
    """A description of the measurements: messages (bytes) go in both directions, on ``devices`` in turns.

    With ``reduced_sizes`` (bytes), each ring of two or more members also has ``in_flight`` all-reduces of ``element``
    at once. ``links`` and ``rings`` as in ``vms``; messages are staged if ipc is impossible, gloo reduces if NCCL is.
    ``most`` samples of each time are taken, none of a size after ``budget_s``.
    """

    message_sizes: tuple[int, ...]
    reduced_sizes: tuple[int, ...]
    ring_sizes: tuple[int, ...]
    in_flight: tuple[int, ...]
    element: str
    devices: tuple[str, ...] = ("cpu",)
    links: LinkSetting = "staged"
    rings: RingSetting = "gloo"
    most: int = 100
    budget_s: float = 0.25

    def reductions(self) -> tuple[tuple[int, int, int], ...]:
        """Ring sizes, bytes and numbers in flight of all-reduces: several at once on the smallest and largest ring."""
        ends = (min(self.ring_sizes), max(self.ring_sizes)) if self.ring_sizes else ()
        return tuple(
            (ring, size, count)
            for ring in self.ring_sizes
            for size in self.reduced_sizes
            for count in self.in_flight
            if count == 1 or ring in ends
        )


def growing_rings(num_slots: int) -> tuple[int, ...]:
    """Return ring sizes to measure on a machine with room for this many workers; four processes fit on any."""
    return (2, 3, 4, *(size for size in (6, 8) if size <= num_slots))


def growing_in_flight(num_slots: int) -> tuple[int, ...]:
    """Return k = 1, 2, 4, ... up to one all-reduce for each worker of this machine (Varuna 4.3); 2 in any case."""
    return tuple(count for count in (1, 2, 4, _MAX_IN_FLIGHT) if count <= max(2, num_slots))


def measure_network(spec: NetworkSpec, helpers: Crew | None = None) -> NetworkMeasurement:
    """Let processes measure: ``helpers`` (at least ``num_peers``); None: some that are started and always ended."""
    store = StoreHost(_HOST)
    ranks = range(num_peers(spec))
    with Crew("calibrate.links.peer", len(ranks), PURPOSE) if helpers is None else nullcontext(helpers) as crew:
        place = MeetingPoint(store_host=_HOST, store_port=store.port(), listen=_HOST, two_nodes=False)
        for rank in ranks:
            crew.send(rank, peer_message(spec, place, rank))
        answers = crew.gather(ranks, "the processes that measure the network", WAIT_S)
    return measurement(spec, [answers[rank] for rank in ranks])


def num_peers(spec: NetworkSpec) -> int:
    """Return how many processes a measurement needs."""
    return max(2, *spec.ring_sizes) if spec.reduced_sizes else 2


@dataclass(frozen=True)
class MeetingPoint:
    """The addresses at which a process meets the others and at which it listens."""

    store_host: str
    store_port: int
    listen: str
    two_nodes: bool


@dataclass(frozen=True)
class PeerSpec:
    """The task of one process."""

    rank: int
    device: str
    place: MeetingPoint
    network: NetworkSpec


def peer_message(spec: NetworkSpec, place: MeetingPoint, rank: int) -> dict[str, Any]:
    """Return the message to one process: a ``PeerSpec`` as plain values."""
    return asdict(PeerSpec(rank, spec.devices[rank % len(spec.devices)], place, spec))


def measurement(spec: NetworkSpec, results: Sequence[Mapping[str, Any]]) -> NetworkMeasurement:
    """Combine the answers of the processes, by rank, on one clock, with reductions of one kind: NCCL's, if any."""
    kinds = [result["devices"] for result in results]
    over_nccl = [ring for ring in spec.ring_sizes if ring in kinds[0]["nccl"]]
    staged = kinds[0]["staged"] + kinds[1]["staged"]
    links: Literal["staged", "ipc"] = "ipc" if spec.links != "staged" and not staged else "staged"
    notes = {"links": f"staged, not {spec.links}: {staged[0]}"} if staged else {}
    if spec.rings != "gloo" and spec.reduced_sizes and not over_nccl:
        notes["rings"] = f"gloo, not {spec.rings}: NCCL must be in this torch, and each member of a ring have a device"
    measured = [kind["ring_bytes"] for kind in kinds if kind["ring_bytes"] is not None]
    return NetworkMeasurement(
        link=_link(results, spec.message_sizes),
        all_reduce=_all_reduces(
            results, replace(spec, ring_sizes=tuple(over_nccl), in_flight=(1,)) if over_nccl else spec
        ),
        barrier=timing(_spans([result["barrier"] for result in results[:2]])),
        links=links,
        rings="nccl" if over_nccl else "gloo",
        ring_bytes=max(measured, default=None),
        notes=notes,
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
        for ring, size, count in spec.reductions()
    )


def _spans(members: Sequence[Sequence[tuple[int, int]]]) -> list[float]:
    """Return seconds from the last member's start to the last member's end, for each sample of (start, end) in ns."""
    return [
        (max(end for _, end in sample) - max(start for start, _ in sample)) / 1e9
        for sample in zip(*members, strict=True)
    ]

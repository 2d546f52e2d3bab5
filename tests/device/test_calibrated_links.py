"""Calibration with mailboxes and NCCL's rings, and remarks of plans about other links."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest

from calibrate.links import peer
from calibrate.links.network import MeetingPoint, NetworkMeasurement, NetworkSpec, PeerSpec, measurement, num_peers
from morph.contract.profile import other_device, other_links
from morph.runtime.device import link_choice, nccl, staging
from morph.runtime.device.mailboxes import MailRoom
from morph.runtime.device.rings import RingStream
from morph.runtime.groups.store import StoreHost
from simulator import synthetic_profile
from tests.device.fake_device import BOUND_S, FakeDevice, Ticking
from tests.device.fake_nccl import FakeNccl
from tests.device.link_contract import LOOPBACK

SPEC = NetworkSpec(
    message_sizes=(64, 4096),
    reduced_sizes=(16, 800),
    ring_sizes=(2, 3),
    in_flight=(1, 2),
    element="int64",
    most=2,
    budget_s=30.0,
)


class Rank:
    """Return the stand-in for a process's device; of three ranks, the first and the last have the same device."""

    def __init__(self, rank: int) -> None:
        self.device = FakeDevice()
        self.room = MailRoom(self.device, num_slots=2, slot_bytes=1024)
        self.staging = staging.Staging(self.device)
        self.library = FakeNccl(self.device, f"GPU-{rank % 2}")
        self.over_nccl = self.library, RingStream(self.device)


class Ranks:
    """Ranks on fake devices; each runs in a thread, in which every lookup of a device finds its own."""

    def __init__(self, num: int) -> None:
        self.of_rank = [Rank(rank) for rank in range(num)]
        self._of_thread = threading.local()

    def enter(self, rank: int) -> None:
        self._of_thread.here = self.of_rank[rank]

    @property
    def here(self) -> Rank:
        found: Rank = self._of_thread.here
        return found


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(num_peers(SPEC))
    ticking = Ticking(*(rank.device for rank in made.of_rank))
    with (
        mock.patch.object(link_choice, "_room", side_effect=lambda _device: made.here.room),
        mock.patch.object(nccl, "_library", side_effect=lambda _device: made.here.over_nccl),
        mock.patch("torch.distributed.is_nccl_available", return_value=True),
        mock.patch.object(staging, "staging_of", side_effect=lambda _device: made.here.staging),
        mock.patch("morph.runtime.device.links.staging_of", side_effect=lambda _device: made.here.staging),
    ):
        yield made
    for rank in made.of_rank:
        rank.library.left.set()
    ticking.stop()


def measured(ranks: Ranks | None = None, **changes: Any) -> NetworkMeasurement:
    store = StoreHost(LOOPBACK)
    spec = NetworkSpec(**{**asdict(SPEC), **changes})

    def run(rank: int) -> dict[str, Any]:
        place = MeetingPoint(store_host=LOOPBACK, store_port=store.port(), listen=LOOPBACK, two_nodes=False)
        if ranks is not None:
            ranks.enter(rank)
        device = "cpu" if ranks is None else str(ranks.here.device.kind)
        return peer.Peer(PeerSpec(rank, device, place, spec)).run()

    with ThreadPoolExecutor(num_peers(spec)) as pool:
        return measurement(spec, list(pool.map(run, range(num_peers(spec)), timeout=BOUND_S)))


def test_what_cannot_be_measured_as_requested_says_why() -> None:
    found = measured(links="ipc", rings="auto")
    assert (found.links, found.rings) == ("staged", "gloo")
    assert found.notes["links"] == "staged, not ipc: tensors are not on a device with memory of its own"
    assert found.notes["rings"].startswith("gloo, not auto: NCCL must be in this torch")
    assert {entry.ring_size for entry in found.all_reduce} == {2, 3}


def test_links_are_measured_as_a_run_uses_them(ranks: Ranks) -> None:
    found = measured(ranks, links="ipc", rings="nccl")
    assert (found.links, found.rings, found.notes) == ("ipc", "nccl", {})
    # a device makes one reduction after the other, and two of three ranks share a device
    assert {(entry.ring_size, entry.in_flight) for entry in found.all_reduce} == {(2, 1)}
    times = [entry.time for entry in found.all_reduce]
    times += [entry.time for entry in (*found.link.activation, *found.link.gradient)]
    assert all(time.median_s > 0 for time in times)
    launches = [rank.library.launches for rank in ranks.of_rank]
    assert launches[0] == launches[1]
    assert {kind for _, kind in launches[0]} == {"reduce", "exchange", "gather"}
    assert not launches[2]


def test_links_through_the_host_are_measured_from_devices_too(ranks: Ranks) -> None:
    found = measured(ranks)
    assert (found.links, found.rings, found.notes) == ("staged", "gloo", {})
    assert {(entry.ring_size, entry.in_flight) for entry in found.all_reduce} == {(2, 1), (2, 2), (3, 1), (3, 2)}
    assert all(rank.device.num_copies for rank in ranks.of_rank)
    assert not any(rank.library.launches for rank in ranks.of_rank)


def test_plans_remark_on_links_other_than_those_measured() -> None:
    on_host = synthetic_profile()
    apart = on_host.environment.model_copy(update={"host_memory_bytes": 2**40})
    staged = on_host.model_copy(update={"environment": apart})
    fast = staged.model_copy(update={"links": "ipc", "rings": "nccl"})
    assert other_links(on_host, "ipc", "nccl") == ()
    assert other_links(staged, "staged", "gloo") == other_links(fast, "ipc", "nccl") == ()
    assert other_links(fast, "auto", "auto") == ()
    links, rings = other_links(staged, "auto", "nccl")
    assert links == (
        "messages within a node were measured over staged, but vms.links is auto: plans assume that they are slower "
        "than in fact; calibrate with --links auto"
    )
    assert rings.startswith("reductions were measured over gloo, but vms.rings is nccl: plans assume that they are")
    assert "faster than in fact; calibrate with --rings gloo" in other_links(fast, "ipc", "gloo")[0]


def test_a_run_on_gpus_remarks_on_a_profile_with_the_times_of_a_cpu() -> None:
    on_cpu = synthetic_profile()
    apart = on_cpu.environment.model_copy(update={"host_memory_bytes": 2**40})
    on_gpu = on_cpu.model_copy(update={"environment": apart})
    assert other_device(on_gpu, "cuda") == other_device(on_cpu, "cpu") == ()
    (sentence,) = other_device(on_cpu, "cuda")
    assert sentence.startswith(f"the profile has the times of a CPU ({on_cpu.environment.device}), but vms.device is")
    assert sentence.endswith("calibrate on such a GPU with --device cuda")

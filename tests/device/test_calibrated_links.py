"""Calibration where mailboxes and NCCL's rings are asked for, and what plans say of other links."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from calibrate.links import peer
from calibrate.links.network import NetworkMeasurement, NetworkSpec, PeerSpec, Place, measurement, num_peers
from morph.contract.profile import other_links
from morph.runtime.groups.store import StoreHost
from simulator import synthetic_profile
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


def measured(**changes: Any) -> NetworkMeasurement:
    store = StoreHost(LOOPBACK)
    spec = NetworkSpec(**{**asdict(SPEC), **changes})

    def run(rank: int) -> dict[str, Any]:
        place = Place(store_host=LOOPBACK, store_port=store.port(), listen=LOOPBACK, two_nodes=False)
        return peer.Peer(PeerSpec(rank, "cpu", place, spec)).run()

    with ThreadPoolExecutor(num_peers(spec)) as pool:
        return measurement(spec, list(pool.map(run, range(num_peers(spec)))))


def test_what_cannot_be_measured_as_requested_says_why() -> None:
    found = measured(links="ipc", rings="auto")
    assert (found.links, found.rings) == ("staged", "gloo")
    assert found.notes["links"] == "staged, not ipc: tensors are not on a device with memory of its own"
    assert found.notes["rings"].startswith("gloo, not auto: NCCL must be in this torch")
    assert {entry.ring_size for entry in found.all_reduce} == {2, 3}


def test_plans_are_told_of_links_other_than_those_measured() -> None:
    on_host = synthetic_profile()
    apart = on_host.environment.model_copy(update={"host_memory_bytes": 2**40})
    staged = on_host.model_copy(update={"environment": apart})
    fast = staged.model_copy(update={"links": "ipc", "rings": "nccl"})
    assert other_links(on_host, "ipc", "nccl") == ()
    assert other_links(staged, "staged", "gloo") == other_links(fast, "ipc", "nccl") == ()
    assert other_links(fast, "auto", "auto") == ()
    links, rings = other_links(staged, "auto", "nccl")
    assert links == (
        "messages within a node were measured over staged, and vms.links is auto: plans take them for slower than they "
        "are; calibrate with --links auto"
    )
    assert rings.startswith("reductions were measured over gloo, and vms.rings is nccl: plans take them for slower")
    assert "faster than they are; calibrate with --rings gloo" in other_links(fast, "ipc", "gloo")[0]

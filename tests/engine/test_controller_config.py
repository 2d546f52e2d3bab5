from __future__ import annotations

import pytest

from manager.controller.state.config import ControllerConfig, ExpectedLosses, Offer
from manager.host.devices import CudaDevice
from manager.run.controller_config import (
    constant_trace,
    controller_config,
    memory_of,
    redundancy_line,
    starting_from,
)
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.cluster import LinkSetting, LocalVms, Policy, StaticVms
from morph.contract.errors import CheckpointError, PlanError, TraceError
from morph.contract.pool import Pool
from morph.contract.trace import Trace, TraceEvent
from simulator import PlanRequest, plan, pool_plan_table, synthetic_profile
from simulator.inputs.request import RedundancyName
from simulator.inputs.synthetic import with_type

PROFILE = synthetic_profile(num_sections=4, batch_size=16, tied=True)
VMS = LocalVms(num_vms=4, memory_bytes=10**12)
POLICY = Policy()


def make_manifest(version: int = 6, fingerprint: str = PROFILE.job.fingerprint, num_units: int = 99) -> Manifest:
    units = tuple(
        UnitFile(unit=unit.id, file=f"{index}.safetensors", size_bytes=1, sha256="0" * 64)
        for index, unit in enumerate(PROFILE.units[:num_units])
    )
    return Manifest(fingerprint=fingerprint, version=version, units=units)


def trace_of(*events: tuple[float, str, str]) -> Trace:
    return Trace(
        events=tuple(
            TraceEvent.model_validate({"time_s": time_s, "event": event, "node_id": node})
            for time_s, event, node in events
        )
    )


def test_workers_beyond_those_kept_have_plans_that_change_nothing_else() -> None:
    kept = VMS.model_copy(update={"keep": 4})
    config, more = (controller_config(PROFILE, kept, POLICY, Trace(events=()), 10, num_beyond=n) for n in (0, 3))
    assert set(config.plans) == {1, 2, 3, 4}
    assert set(more.plans) == {1, 2, 3, 4, 5, 6, 7}
    assert more.model_copy(update={"plans": config.plans}) == config
    assert {count: more.plans[count] for count in config.plans} == config.plans


@pytest.mark.slow
def test_a_job_that_fits_only_beyond_the_kept_workers_is_refused() -> None:
    def planned(keep: int, memory_bytes: int) -> set[int]:
        vms = VMS.model_copy(update={"keep": keep, "memory_bytes": memory_bytes})
        return set(controller_config(PROFILE, vms, POLICY, Trace(events=()), 10, num_beyond=3).plans)

    memory_bytes = next(size for times in range(150) if 1 not in planned(4, size := 10**12 * 3**times >> 2 * times))
    assert 2 in planned(4, memory_bytes)
    with pytest.raises(PlanError):
        planned(1, memory_bytes)


MIXED = with_type(with_type(PROFILE, "t4", 2.5), "v100", 1.0)


def test_several_types_have_a_plan_for_every_pool_and_times_of_their_own() -> None:
    vms = LocalVms(node_types={"v100": 2, "t4": 2}, memory_bytes=10**12)
    offers = (Offer(node_type="v100", usd_per_h=3.0), Offer(node_type="t4", usd_per_h=1.0))
    trace = constant_trace(vms)
    config = controller_config(MIXED, vms, POLICY, trace, 10, offers=offers)
    table = pool_plan_table(MIXED, vms.node_types, micro_batch_size=next(iter(config.plans.values())).micro_batch_size)
    assert len(table) == 8
    for pool, best in table.items():
        assert config.speed_on(pool) == pytest.approx(best.expected.examples_per_s)
    assert all(best.pool == pool for pool, best in config.plans.items())
    assert (config.expected_nodes, [offer.node_type for offer in config.offers]) == (4, ["t4", "v100"])
    assert config.type_compute_s["t4"] == pytest.approx([2.5 * each for each in config.type_compute_s["v100"]])
    whole = config.best_plan(Pool.parse("t4=2,v100=2"))
    assert whole.expected.examples_per_s >= config.speed_on(Pool.parse("v100=2")) > config.speed_on(Pool.parse("t4=2"))
    assert all(plan.pool.types and "" not in plan.pool.types for plan in config.plans.values())
    assert ControllerConfig.model_validate_json(config.model_dump_json()) == config
    kept = vms.model_copy(update={"keep": 3})
    both = controller_config(MIXED, kept, POLICY, constant_trace(kept), 10, offers=offers)
    assert (both.target_nodes, both.best_plan(Pool.parse("t4=3")) is not None) == (3, True)


def test_a_trace_with_another_type_or_a_type_of_no_profile_is_refused() -> None:
    vms = LocalVms(node_types={"v100": 2, "t4": 2}, memory_bytes=10**12)
    offers = (Offer(node_type="v100"), Offer(node_type="t4"))
    with pytest.raises(TraceError, match=r"instance_type: has no type in vms.node_types \(got 'unknown'\)"):
        controller_config(MIXED, vms, POLICY, trace_of((0, "add", "a")), 10, offers=offers)
    with pytest.raises(PlanError, match="k80"):
        controller_config(MIXED, vms, POLICY, constant_trace(vms), 10, offers=(*offers, Offer(node_type="k80")))


def test_every_number_of_vms_that_the_trace_brings_has_a_plan() -> None:
    trace = trace_of((0, "add", "a"), (0, "add", "b"), (3, "add", "c"), (4, "remove", "a"), (5, "add", "d"))
    config = controller_config(PROFILE, VMS, POLICY, trace, 10)
    assert set(config.plans) == {1, 2, 3}
    assert config.expected_nodes == 2
    assert config.initial_version == 0
    assert config.units["s0+s3"] == (0, 3)


def test_only_workers_of_this_machines_processors_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cores, shared in ((2, True), (4, True), (5, False)):  # four workers, and the manager
        monkeypatch.setattr("manager.run.controller_config.num_cores", lambda num_cores=num_cores: num_cores)
        assert controller_config(PROFILE, VMS, POLICY, constant_trace(VMS), 10).shares_cores is shared
    hosts = StaticVms(kind="static", cloud="hosts.yaml", keep=4, memory_bytes=10**12, device="cpu", address="10.0.0.4")
    assert controller_config(PROFILE, hosts, POLICY, Trace(events=()), 10).num_cores is None
    cuda, owned = VMS.model_copy(update={"device": "cuda"}), CudaDevice("GPU-0", 10**12)
    found = controller_config(PROFILE, cuda, POLICY, constant_trace(cuda), 10, devices=lambda: [owned] * 4)
    assert found.num_cores is None


def shapes(**asked: int) -> dict[int, str]:
    config = controller_config(PROFILE, VMS, POLICY, constant_trace(VMS), 10, PlanRequest(**asked))
    return {count: plan.shape for count, plan in config.plans.items()}


def test_a_requested_pipeline_depth_holds_for_every_shape() -> None:
    assert shapes(pipeline_depth=2) == {2: "2x1", 3: "2x1", 4: "2x2"}
    assert shapes(pipeline_depth=3) == {3: "3x1", 4: "3x1"}


def test_requested_replicas_are_a_maximum_and_further_workers_stand_by() -> None:
    assert shapes(pipeline_depth=1, num_replicas=2) == {1: "1x1", 2: "1x2", 3: "1x2", 4: "1x2"}
    assert shapes(pipeline_depth=2, num_replicas=1) == {2: "2x1", 3: "2x1", 4: "2x1"}
    assert all(shape.endswith("x1") for shape in shapes(num_replicas=1).values())


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"pipeline_depth": 5}, r"pipeline_depth: is not possible \(got 5\); allowed: 1 to 4"),
        ({"num_replicas": 5}, r"num_replicas: is not possible \(got 5\); allowed: 1 to 4"),
        ({"pipeline_depth": 3, "num_replicas": 2}, r"pipeline_depth: is not possible \(got 3\); allowed: 1 to 2"),
    ],
)
def test_a_shape_that_the_workers_can_never_reach_is_refused(asked: dict[str, int], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        shapes(**asked)


def test_a_constant_trace_brings_every_vm_at_the_start() -> None:
    trace = constant_trace(VMS)
    assert trace.max_nodes == 4
    assert controller_config(PROFILE, VMS, POLICY, trace, 10).expected_nodes == 4


def test_a_run_that_keeps_vms_has_a_plan_for_every_number() -> None:
    vms = VMS.model_copy(update={"keep": 3})
    trace = constant_trace(vms)
    assert trace.events == ()
    config = controller_config(PROFILE, vms, POLICY, trace, 10)
    assert (config.target_nodes, config.expected_nodes, set(config.plans)) == (3, 3, {1, 2, 3})
    assert controller_config(PROFILE, VMS, POLICY, constant_trace(VMS), 10).target_nodes == 0


def started(checkpoint: Manifest | None) -> ControllerConfig:
    planned = controller_config(PROFILE, VMS, POLICY, constant_trace(VMS), 10)
    return starting_from(planned, checkpoint, ExpectedLosses(per_vm_h=3.0))


def test_a_session_starts_from_its_checkpoint_with_the_plans_that_there_are() -> None:
    config, anew = started(make_manifest()), started(None)
    assert (config.initial_version, config.initial_checkpoint) == (6, make_manifest())
    assert (anew.initial_version, anew.initial_checkpoint) == (0, None)
    assert config.expected_losses == ExpectedLosses(per_vm_h=3.0)
    assert config.plans == anew.plans


def test_a_job_that_never_fits_is_refused_before_anything_starts() -> None:
    with pytest.raises(PlanError):
        controller_config(PROFILE, LocalVms(memory_bytes=1000), POLICY, constant_trace(VMS), 10)


def test_a_checkpoint_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"version 6 belongs to another model.*other.*synthetic-4"):
        started(make_manifest(fingerprint="other"))


def test_a_checkpoint_that_lacks_a_unit_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"version 6 has units.*s0\+s3"):
        started(make_manifest(num_units=3))


def _no_devices() -> tuple[CudaDevice, ...]:
    pytest.fail("a CPU's VMs requested devices")


def test_memory_is_as_configured_or_a_share_of_this_machine() -> None:
    assert memory_of(LocalVms(num_vms=4, memory_bytes=123), devices=_no_devices).device_bytes == 123
    four, eight = (memory_of(LocalVms(num_vms=count), devices=_no_devices) for count in (4, 8))
    assert 0 < eight.device_bytes <= four.device_bytes
    assert eight.host_bytes is None
    assert memory_of(LocalVms(num_vms=4), num_vms=8, devices=_no_devices) == eight  # a trace that brings more VMs


def test_local_vms_on_cuda_are_planned_with_their_share_of_the_devices() -> None:
    devices = (CudaDevice("GPU-a", 16 << 30), CudaDevice("GPU-b", 12 << 30))
    for count, share in ((1, 12), (2, 12), (3, 6), (4, 6), (5, 4)):
        found = memory_of(LocalVms(num_vms=count, device="cuda"), devices=lambda: devices)
        assert found.device_bytes == (share << 30)
        assert found.host_bytes == memory_of(LocalVms(num_vms=count)).device_bytes
    told = memory_of(LocalVms(num_vms=2, device="cuda", memory_bytes=5), devices=_no_devices)
    assert told.device_bytes == 5


def test_plans_on_shared_devices_fit_in_the_shares() -> None:
    vms, trace = LocalVms(num_vms=4, device="cuda"), constant_trace(VMS)
    roomy, tight = (
        controller_config(PROFILE, vms, POLICY, trace, 10, devices=lambda size=size: (CudaDevice("GPU-a", size),))
        for size in (400_000_000, 280_000_000)
    )
    assert (roomy.device_memory_bytes, tight.device_memory_bytes) == (100_000_000, 70_000_000)
    assert set(tight.plans) < set(roomy.plans)
    for config in (roomy, tight):
        limit = config.device_memory_bytes or 0
        assert all(plan.expected.peak_memory_bytes <= limit for plan in config.plans.values())


@pytest.mark.parametrize("links", ["ipc", "auto"])
def test_plans_leave_room_for_mailboxes_between_workers(links: LinkSetting) -> None:
    staged = LocalVms(num_vms=4, device="cuda")
    owned, request = [CudaDevice("GPU-0", 10**12)] * 4, PlanRequest(pipeline_depth=4)
    plain, found = (
        controller_config(PROFILE, vms, POLICY, constant_trace(vms), 10, request, devices=lambda: owned)
        for vms in (staged, staged.model_copy(update={"links": links}))
    )
    more = found.plans[4].expected.peak_memory_bytes - plain.plans[4].expected.peak_memory_bytes
    assert more == 2 * 32 * 2**20


@pytest.mark.parametrize(
    ("replicas", "redundancy", "memory_bytes", "host_bytes", "told"),
    [
        (1, "off", None, None, "followers: off"),
        (1, "state", None, None, "followers, state: 4 units are kept in step on a second VM"),
        (1, "auto", None, None, "followers, auto: 4 units are kept in step on a second VM; followers cost "),
        (1, "auto", 1, None, "followers, auto: followers cost "),
        (1, "auto", 1, 10**12, "followers, auto: followers cost "),
        (1, "auto", 0, 10**12, "followers, auto: 4 units are kept in step on a second VM, in its host memory"),
        (1, "auto", 0, 10**3, "followers, auto: followers cost "),
        (2, "state", None, None, "followers, state: replicas are enough"),
    ],
)
def test_a_plan_says_what_is_done_against_losses_and_why(
    replicas: int, redundancy: RedundancyName, memory_bytes: int | None, host_bytes: int | None, told: str
) -> None:
    """The plan's memory with a unit that is updated, but without all followed state, is 0 bytes here."""
    profile = synthetic_profile(num_sections=4, forward_s=0.5, batch_size=64, tied=True, bandwidth_bytes_per_s=5e8)
    best = plan(profile, num_gpus=4, pipeline_depth=4 // replicas, num_replicas=replicas).best
    if memory_bytes == 0:
        memory_bytes = best.expected.followed_memory_bytes - 1
    line = redundancy_line(profile, best, redundancy, memory_bytes, host_bytes)
    assert line.startswith(told)
    assert ("do not fit" in line) == (memory_bytes == 1 or host_bytes == 10**3)


def test_followers_are_weighed_by_the_profiled_link_at_first() -> None:
    def cost(bytes_per_s: float) -> str:
        profile = synthetic_profile(num_sections=4, forward_s=0.5, batch_size=64, bandwidth_bytes_per_s=bytes_per_s)
        best = plan(profile, num_gpus=4, pipeline_depth=4, num_replicas=1).best
        return redundancy_line(profile, best, "auto", None)

    assert "followers cost 0.01%" in cost(5e8)
    assert "followers cost 0.08%" in cost(5e7)

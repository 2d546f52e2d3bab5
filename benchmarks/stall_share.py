"""What share of a run saves keep from training, at the interval that the controller chooses, for the shipped profiles.

``next_save`` as the manager calls it, for the best shape of so many VMs, by three stalls: half a millisecond, as
measured where state is copied beside the next step; as long as the whole copy takes at 5 GB/s; and what is assumed
before a save was seen, 1 GB/s. Losses as in published traces, and one in each hour of a VM. Nothing is simulated: the
rule is asked at these inputs. Run: python benchmarks/stall_share.py
"""

from __future__ import annotations

from pathlib import Path

from manager.controller.saves.timing import next_save
from manager.controller.state.bounds import SAVE_COPY_BYTES_PER_S
from manager.controller.state.config import ControllerConfig, ExpectedLosses
from manager.controller.state.draft import Draft
from manager.controller.state.saves import SaveTimes
from manager.controller.state.state import Phase, WorkerState, initial_state
from manager.simulation.spot.job import SpotJob, job_from_profile
from morph.contract.messages import ReshapeOrder, Slot
from morph.contract.plan import Plan
from morph.contract.profile import load_profile

PROFILES = Path(__file__).resolve().parents[1] / "configs" / "profiles"
NUM_VMS = (12, 24, 48, 96)
RATES = (ExpectedLosses().per_vm_h, 1.0)
BESIDE_S = 0.0005
LIMIT = 0.005


def interval_s(job: SpotJob, plan: Plan, stall_s: float, per_vm_h: float) -> float:
    """Return the interval that the controller chooses while that shape trains."""
    config = ControllerConfig(
        fingerprint=plan.fingerprint,
        plans={plan.num_workers: plan},
        units=job.units,
        unit_bytes=job.unit_bytes,
        num_steps=10**9,
        expected_nodes=plan.num_workers,
        expected_losses=ExpectedLosses(per_vm_h=per_vm_h),
    )
    places = [(stage, replica) for replica in range(plan.num_replicas) for stage in range(plan.pipeline_depth)]
    slots = tuple(Slot(worker=f"n{stage}-{replica}", stage=stage, replica=replica) for stage, replica in places)
    times = SaveTimes(
        since_s=0.0,
        step_s=plan.expected.mini_batch_s,
        stall_s=stall_s,
        durable_s=most_bytes(job, plan) / job.durations.storage_bytes_per_s,
    )
    draft = Draft(initial_state(config), 0.0)
    workers = {slot.worker: WorkerState(appeared_s=0.0, ready_s=0.0) for slot in slots}
    order = ReshapeOrder(generation=1, version=0, plan=plan, slots=slots, sources=())
    draft.change(phase=Phase.TRAINING, workers=workers, reshape=order)
    draft.change_saving(save_times=times)
    state = draft.state
    save = next_save(state, 0.0)
    assert save is not None
    return save.interval_s


def most_bytes(job: SpotJob, plan: Plan) -> float:
    """Return what the worker writes that writes most."""
    sums = [0] * plan.pipeline_depth
    for unit, sections in job.units.items():
        stage = next(index for index, stage in enumerate(plan.stages) if stage.end_section > sections[0])
        sums[stage] += job.unit_bytes[unit]
    return max(sums) / plan.num_replicas


def main() -> None:
    """Print a table; shares above the limit are marked."""
    print("| profile, VMs, shape, step | bytes of a worker | losses per VM-hour | beside the step | 5 GB/s | 1 GB/s |")
    print("|---|---|---|---|---|---|")
    for path in sorted(PROFILES.glob("*.json")):
        job = job_from_profile(load_profile(path), max(NUM_VMS))
        for num_vms in NUM_VMS:
            plan = job.best_plan(num_vms)
            if plan is None:
                continue
            size = most_bytes(job, plan)
            for per_vm_h in RATES:
                cells = []
                for stall_s in (BESIDE_S, size / job.durations.copy_bytes_per_s, size / SAVE_COPY_BYTES_PER_S):
                    every_s = interval_s(job, plan, stall_s, per_vm_h)
                    share = stall_s / every_s
                    cells.append(f"{share:.2%} (every {every_s:.3g} s)" + (" *" if share > LIMIT else ""))
                name = f"{path.stem}, {num_vms}, {plan.shape}, {plan.expected.mini_batch_s:.3g} s"
                print(f"| {name} | {size / 1e9:.2f} GB | {per_vm_h:.2f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

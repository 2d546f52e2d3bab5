"""What share of a run saves keep from training, at the interval that the controller chooses, for the shipped profiles.

``next_save`` as the manager calls it, for the best shape of so many VMs, by three stalls: half a millisecond, as
measured where state is copied beside the next step; as long as the whole copy takes at 5 GB/s; and what is assumed
before a save was seen, 1 GB/s. Losses as in published traces, and one in each hour of a VM. Nothing is simulated: the
rule is asked at these inputs.

    python -m benchmarks stall_share
"""

from __future__ import annotations

from benchmarks.harness import PROFILES, head, row
from benchmarks.save_interval import training_state
from manager.controller.state.bounds import SAVE_COPY_BYTES_PER_S
from manager.controller.state.config import ExpectedLosses
from manager.controller.state.saves import SaveTimes
from manager.controller.steps.save_timing import next_save
from manager.simulation.spot.job import SpotJob, job_from_profile
from morph.contract.plan import Plan
from morph.contract.profile import load_profile

NUM_VMS = (12, 24, 48, 96)
RATES = (ExpectedLosses().per_vm_h, 1.0)
BESIDE_S = 0.0005
LIMIT = 0.005


def interval_s(job: SpotJob, plan: Plan, stall_s: float, per_vm_h: float) -> float:
    """Return the interval that the controller chooses while that shape trains."""
    times = SaveTimes(
        since_s=0.0,
        step_s=plan.expected.mini_batch_s,
        stall_s=stall_s,
        durable_s=most_bytes(job, plan) / job.durations.storage_bytes_per_s,
    )
    losses = ExpectedLosses(per_vm_h=per_vm_h)
    config = {"units": job.units, "unit_bytes": job.unit_bytes, "expected_losses": losses}
    transition = training_state(plan, config)
    transition.change_saving(save_times=times)
    save = next_save(transition.state, 0.0)
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
    head("profile, VMs, shape, step | bytes of a worker | losses per VM-hour | beside the step | 5 GB/s | 1 GB/s")
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
                row(name, f"{size / 1e9:.2f} GB", f"{per_vm_h:.2f}", *cells)

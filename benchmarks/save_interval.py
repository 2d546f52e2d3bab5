"""How often to save: the controller's own rule against every fixed interval, in simulated weeks.

The rule is ``next_save`` as the manager calls it. It does not know the rate at which VMs are lost, and begins with the
prior of a run without history; it is compared with the best of many fixed intervals, chosen afterwards for the same
losses.

    python -m benchmarks save_interval --days 14 --seeds 20

``--disks`` computes instead the most that saving to VMs' disks first could gain, if no loss ever took a disk: saves are
then complete after a tenth of the time that storage takes.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from benchmarks.harness import head, option, row
from benchmarks.workers import plan_by_hand, slots_of
from manager.controller.state.config import ControllerConfig
from manager.controller.state.saves import SaveTimes
from manager.controller.state.state import ControllerState, Phase, WorkerState, initial_state
from manager.controller.state.transition import Transition
from manager.controller.steps.save_timing import next_save
from morph.contract.messages import ReshapeOrder
from morph.contract.plan import Plan

H = 3600.0
HEAL_S = 1.0
AGAIN_S = 200.0
"""Seconds that a loss costs, besides undone steps, if a survivor has the state, and if only a checkpoint has it."""
FIXED_S = [10 * 1.15**power for power in range(60)]


@dataclass(frozen=True)
class Case:
    """A job and its VMs; times in seconds. ``bulk_share`` and ``bulk_fraction`` as in ``ExpectedLosses``."""

    depth: int
    replicas: int
    per_vm_h: float
    stall_s: float
    durable_s: float
    step_s: float
    bulk_share: float = 0.5
    bulk_fraction: float = 0.2

    def __str__(self) -> str:
        return (
            f"{self.depth}x{self.replicas}, {self.per_vm_h:g} losses/VM-h, step {self.step_s:g} s, "
            f"stall {self.stall_s:g} s, durable {self.durable_s:g} s"
        )


CASES = [
    Case(1, 1, 1 / 3, 2.55, 22.0, 4.6),  # GPT-117M of Spotify's table 6.2
    Case(1, 1, 1 / 3, 19.5, 120.0, 19.75),  # GPT-1.3B of its table 6.3
    Case(4, 1, 0.02, 0.5, 30.0, 5.0),
    Case(4, 1, 0.1, 0.5, 30.0, 5.0),
    Case(4, 1, 1.0, 0.5, 30.0, 5.0),
    Case(4, 2, 0.1, 0.5, 30.0, 5.0),
    Case(4, 4, 0.5, 2.0, 60.0, 10.0),
    Case(12, 2, 0.3, 1.0, 60.0, 20.0),
]
Losses = list[tuple[float, bool]]
"""Losses, each with its time, and whether it is fatal."""
DueAfter = Callable[[float, int], float]
"""Returns when the next save is due, given the time and the number of losses so far."""


def losses_of(case: Case, seed: int, until_s: float) -> Losses:
    """Draw when VMs are lost, alone and in bulk, and whether some stage is left without a VM."""
    draw, num = random.Random(f"{case} {seed}"), case.depth * case.replicas
    alone = case.per_vm_h * (1 - case.bulk_share) / H * num
    bulk = case.per_vm_h * case.bulk_share / case.bulk_fraction / H
    found: Losses = []
    time_s = 0.0
    while time_s < until_s:
        time_s += draw.expovariate(alone + bulk)
        if draw.random() < alone / (alone + bulk):
            found.append((time_s, case.replicas == 1))
            continue
        taken = [[draw.random() < case.bulk_fraction for _ in range(case.replicas)] for _ in range(case.depth)]
        if any(map(any, taken)):
            found.append((time_s, any(map(all, taken))))
    return found


def run(case: Case, losses: Losses, num_steps: int, due_after: DueAfter) -> float:
    """Return how long so many steps take (seconds) when each save is due as ``due_after(now, number of losses)``."""
    now_s, done, pending = 0.0, 0, list(reversed(losses))
    durable: list[tuple[float, int]] = [(0.0, 0)]  # when a version was complete, and which
    due_s = due_after(now_s, 0)
    while done < num_steps:
        due_s = max(due_s, durable[-1][0])  # one version is written at a time
        steps = max(1, min(num_steps - done, round((due_s - now_s) / case.step_s)))
        end_s = now_s + steps * case.step_s
        if pending and pending[-1][0] < end_s:
            at_s, fatal = pending.pop()
            at_s = max(at_s, now_s)
            done += int((at_s - now_s) // case.step_s)
            if fatal:
                done = max(version for since_s, version in durable if since_s <= at_s)
                durable = [(0.0, done)]
                now_s = at_s + AGAIN_S
                due_s = due_after(now_s, len(losses) - len(pending))
            else:
                now_s = at_s + HEAL_S
            continue
        now_s, done = end_s + case.stall_s, done + steps
        durable = [*durable[-2:], (now_s + case.durable_s, done)]
        due_s = due_after(now_s, len(losses) - len(pending))
    return now_s


def training_state(plan: Plan, config: dict[str, Any]) -> Transition:
    """Return a draft of the controller's state while this plan trains."""
    made = ControllerConfig(
        fingerprint=plan.fingerprint,
        plans={plan.num_workers: plan},
        num_steps=10**9,
        expected_nodes=plan.num_workers,
        **config,
    )
    slots = slots_of(plan)
    transition = Transition(initial_state(made), 0.0)
    workers = {slot.worker: WorkerState(appeared_s=0.0, ready_s=0.0) for slot in slots}
    order = ReshapeOrder(generation=1, version=0, plan=plan, slots=slots, sources=())
    transition.change(phase=Phase.TRAINING, workers=workers, reshape=order)
    return transition


def state_of(case: Case) -> ControllerState:
    """Return the controller's state while that job trains."""
    orders = {1: ("FB",) * case.depth}
    plan = plan_by_hand(
        range(case.depth + 1),
        case.replicas,
        orders,
        num_micro_batches=case.replicas,
        step_s=case.step_s,
        examples_per_s=1.0,
    )
    units = {f"s{stage}": (stage,) for stage in range(case.depth)}
    transition = training_state(plan, {"units": units, "unit_bytes": dict.fromkeys(units, 1)})
    transition.change_measured(setup_s=AGAIN_S / 2)
    return transition.state


def rule_of(case: Case) -> DueAfter:
    """Return the controller's rule, which knows the times of this case, and each loss once it has happened."""
    state = state_of(case)

    def due_after(now_s: float, num_lost: int) -> float:
        times = SaveTimes(
            since_s=now_s,
            step_s=case.step_s,
            stall_s=case.stall_s,
            durable_s=case.durable_s,
            allocation_s=AGAIN_S / 2,
            num_lost=round(_vms_lost(case, num_lost)),
        )
        transition = Transition(state, now_s)
        transition.change_saving(save_times=times)
        save = next_save(transition.state, now_s)
        assert save is not None
        return save.due_s

    return due_after


def _vms_lost(case: Case, num_events: int) -> float:
    """Return how many VMs so many events took on average, if all were replaced at once."""
    num = case.depth * case.replicas
    in_bulk = num * case.bulk_fraction / (1 - (1 - case.bulk_fraction) ** num)
    alone = num * (1 - case.bulk_share)
    bulk = case.bulk_share / case.bulk_fraction * (1 - (1 - case.bulk_fraction) ** num)
    return num_events * (alone + bulk * in_bulk) / (alone + bulk)


def _mean(case: Case, histories: list[Losses], num_steps: int, due_after: DueAfter) -> float:
    return statistics.fmean(run(case, losses, num_steps, due_after) for losses in histories)


def _every(interval_s: float) -> DueAfter:
    return lambda now_s, _: now_s + interval_s


def main(
    days: float = 14.0,
    seeds: int = 20,
    disks: Annotated[bool, option("what saving to VMs' disks first would gain at most, instead")] = False,
) -> None:
    worst = -math.inf
    columns = "at first | at the end | best fixed | of the best fixed's time | that over no saves and losses"
    head("job and losses | " + ("of the time at most" if disks else f"the rule saves every: {columns}"))
    for case in CASES:
        num_steps = round(days * 24 * H / case.step_s)
        histories = [losses_of(case, seed, 20 * days * 24 * H) for seed in range(seeds)]
        if disks:
            nearer = replace(case, durable_s=case.durable_s / 10)
            took_s, least_s = (_mean(case, histories, num_steps, rule_of(one)) for one in (case, nearer))
            row(case, f"{1 - least_s / took_s:.2%}")
            continue
        fixed = {every_s: _mean(case, histories, num_steps, _every(every_s)) for every_s in FIXED_S}
        best_s = min(fixed, key=fixed.__getitem__)
        over = _mean(case, histories, num_steps, rule_of(case)) / fixed[best_s] - 1
        end_s = fixed[best_s]
        last_s = rule_of(case)(end_s, sum(at_s < end_s for at_s, _ in histories[0])) - end_s
        worst = max(worst, over)
        intervals = (f"{each_s:.0f} s" for each_s in (rule_of(case)(0.0, 0), last_s, best_s))
        row(case, *intervals, f"{over:+.2%}", f"{end_s / (num_steps * case.step_s) - 1:.1%}")
    if not disks:
        print(f"worst: {worst:+.2%}")

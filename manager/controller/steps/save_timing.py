"""Decides when a checkpoint is due: as configured, as often as costs least, or before VMs are taken (Spotify, 4.2)."""

from __future__ import annotations

from collections.abc import Iterable

from manager.controller.shape.risk import mean_s_to_fatal_loss
from manager.controller.shape.selection import chosen, cost_of_morph_s, draining_members
from manager.controller.state.bounds import SAVE_COPY_BYTES_PER_S, STORAGE_BYTES_PER_S
from manager.controller.state.nodes import NodeState
from manager.controller.state.saves import NextSave
from manager.controller.state.state import ControllerState, Phase
from manager.controller.state.transition import Transition
from morph.contract.checkpoint import SaveKind
from morph.contract.messages import WorkerId
from morph.contract.waits import Backoff, cheapest_interval_s

RETRIES = Backoff(first_s=10.0, most_s=600.0)
"""Seconds between saves that storage refuses."""


def next_save(state: ControllerState, now_s: float) -> NextSave | None:
    """Return when the next checkpoint is due, and why; None: nothing trains, or saves are switched off."""
    return sooner(periodic_save(state, now_s), insurance_save(state, now_s))


def sooner(first: NextSave | None, second: NextSave | None) -> NextSave | None:
    """Return the one that is due first."""
    return min((save for save in (first, second) if save is not None), key=lambda save: save.due_s, default=None)


def periodic_save(state: ControllerState, now_s: float) -> NextSave | None:
    """Return when a checkpoint is due by the configured interval; None: nothing trains, or no interval is set."""
    saving = state.saving
    every = state.config.policy.checkpoint_every_steps
    if saving.save_times.since_s is None or not state.slots or every is None:
        return None
    if saving.checkpoint_base + every >= state.config.num_steps:
        return None
    step_s = step_seconds(state)
    due_s = now_s + max(0, every - (state.version - saving.checkpoint_base)) * step_s
    return NextSave(due_s=due_s, interval_s=every * step_s, kind="periodic", why=_as_configured(every))


def insurance_save(state: ControllerState, now_s: float) -> NextSave | None:
    """Return when a checkpoint is due by the interval that costs least; None: nothing trains, or no save is due."""
    times, policy = state.saving.save_times, state.config.policy
    wanted = policy.rules.checkpoints.insurance
    if wanted is None:
        wanted = policy.checkpoint_every_steps is None
    if times.since_s is None or not state.slots or not wanted:
        return None
    interval_s, why = cheapest_interval(state, now_s)
    due_s = times.since_s + interval_s
    if times.retry_s is not None:
        due_s, why = times.retry_s, f"storage refused the last {times.num_refused}"
    return NextSave(due_s=due_s, interval_s=interval_s, kind="insurance", why=why)


def cheapest_interval(state: ControllerState, now_s: float) -> tuple[float, str]:
    """Return the interval between saves (seconds) that costs least, at least a step and a save, and its explanation."""
    times, expected = state.saving.save_times, state.config.expected_losses
    mttf_s = mean_s_to_fatal_loss(state, now_s)
    most_bytes = _most_bytes(state)
    stall_s = most_bytes / SAVE_COPY_BYTES_PER_S if times.stall_s is None else times.stall_s
    allocation_s = expected.allocation_s if times.allocation_s is None else times.allocation_s
    restart_s = allocation_s + (expected.preparation_s if state.measured.setup_s is None else state.measured.setup_s)
    tau_s = cheapest_interval_s(stall_s, mttf_s, restart_s)
    durable_s = save_seconds(state)
    interval_s = max(tau_s, durable_s, step_seconds(state))
    why = (
        f"one every {duration(interval_s)} costs least: a save stalls training for {duration(stall_s)} "
        f"({stall_s / interval_s:.2%} of the time), and a loss that sends training back to its last checkpoint is "
        f"expected every {duration(mttf_s)}"
    )
    if interval_s == durable_s:
        why += f"; a save takes {duration(durable_s)} to be complete"
    return interval_s, why


def is_due(state: ControllerState, now_s: float) -> tuple[SaveKind, str] | None:
    """Return the kind of save that begins with the step ordered now, and why; None if no save is due."""
    every, insurance = state.config.policy.checkpoint_every_steps, state.saving.save_times.insurance
    if goes_back_to(state, state.version):
        return "periodic", "a bad step goes back to it"
    if every is not None and state.version - state.saving.checkpoint_base >= every:
        return "periodic", _as_configured(every)
    if insurance is not None and now_s + step_seconds(state) / 2 >= insurance.due_s:  # this is the nearest boundary
        return insurance.kind, insurance.why
    return None


def goes_back_to(state: ControllerState, version: int) -> bool:
    """Whether a bad step would go back to this version."""
    losses = state.config.policy.rules.losses
    return losses.when_bad == "go_back" and version % losses.back_steps == 0


def _as_configured(every: int) -> str:
    return f"every {every} steps, as the cluster file says"


def step_seconds(state: ControllerState) -> float:
    """Return the seconds of a step: as measured, else as the plan expects."""
    if state.saving.save_times.step_s is not None:
        return state.saving.save_times.step_s
    return state.plan.expected.mini_batch_s if state.plan is not None else 0.0


def save_seconds(state: ControllerState) -> float:
    """Return the seconds from the copy of the state to a complete save: as measured, else for slow storage."""
    return (
        _most_bytes(state) / STORAGE_BYTES_PER_S
        if state.saving.save_times.durable_s is None
        else state.saving.save_times.durable_s
    )


def duration(seconds: float) -> str:
    """Return a duration in a readable unit."""
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _most_bytes(state: ControllerState) -> int:
    """Return the largest number of bytes that one member writes."""
    return 0 if state.plan is None else state.config.written_bytes(state.plan)


def emergency_due(transition: Transition) -> bool:
    """Whether to save the decided version with the step ordered now, because VMs are about to be taken.

    It is due when the work since the newest checkpoint equals what could still be done before the last possible save.
    """
    state, now_s = transition.state, transition.now_s
    if not draining_members(state) or not lacks_others(transition) or not fits(state, now_s):
        return False
    since_s = now_s if state.saving.save_times.since_s is None else state.saving.save_times.since_s
    return now_s - since_s >= taken_s(state) - save_seconds(state) - step_seconds(state) - now_s


def lacks_others(transition: Transition) -> bool:
    """Whether draining workers are the only holders of some unit, and no shape could be formed to take it over."""
    state = transition.state
    leaving = leaving_workers(state)
    if not leaving or chosen(transition) is not None:
        return False
    held: set[str] = set().union(*(e.holds for worker, e in state.workers.items() if worker not in leaving))
    return any(state.workers[worker].holds - held for worker in leaving)


def fits(state: ControllerState, now_s: float) -> bool:
    """Whether a save that begins now should be complete before the first draining VM is taken."""
    unknown = state.saving.save_times.durable_s is None  # then a save is tried
    return unknown or now_s + save_seconds(state) <= taken_s(state)


def step_outlasts(transition: Transition) -> bool:
    """Whether it is early enough to save, or change shape, before a member is taken, but too late after this step."""
    state, now_s = transition.state, transition.now_s
    ordered_s = state.saving.save_times.ordered_s
    if state.phase is not Phase.TRAINING or ordered_s is None or state.saving.save_times.step_s is None:
        return False
    leaving = draining_members(state)
    if not leaving:
        return False
    if chosen(transition) is not None:
        needed_s = cost_of_morph_s(state)
    elif lacks_others(transition):
        needed_s = save_seconds(state)
    else:
        return False
    ends_s = max(now_s, ordered_s + step_seconds(state))
    return now_s + needed_s <= taken_s(state, leaving) < ends_s + needed_s


def taken_s(state: ControllerState, leaving: Iterable[WorkerId] | None = None) -> float:
    """Return when (seconds) the first of these workers, or of all draining ones, is taken, as its notice says."""
    grace_s = state.config.policy.rules.requests.notice_grace_s
    times_s = [state.workers[worker].drain_until_s for worker in leaving or leaving_workers(state)]
    return min((time_s - grace_s for time_s in times_s if time_s is not None), default=float("inf"))


def leaving_workers(state: ControllerState) -> frozenset[WorkerId]:
    """Return all workers whose VMs have a notice."""
    return frozenset(worker for worker, entry in state.workers.items() if entry.node is NodeState.DRAINING)

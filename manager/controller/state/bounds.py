"""How long a worker may take for an order before it counts as hanging; ``policy.order_timeout_s`` replaces this.

Each bound is ``HEADROOM`` times the expected time, and never less than a floor. Expected times come from the plan and
from measurements; speeds are those of a slow machine until they are measured in the run. A generation that decides no
step doubles the bounds of the next, up to ``MOST_DOUBLINGS`` times, because expected times may be wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from manager.controller.state.state import ControllerState
from morph.contract.messages import ReshapeOrder, UnitId, WorkerId
from morph.contract.plan import Plan

HEADROOM = 4.0
FLOOR_S = 120.0
SETUP_FLOOR_S = 300.0
"""Seconds: the floor for a worker's setup, which also starts a process, imports torch and loads the job."""
MOST_DOUBLINGS = 3
LINK_BYTES_PER_S = 1.25e8
"""The assumed speed of a link until this run has measured one: 1 Gb/s."""
STORAGE_BYTES_PER_S = 1e8
"""The assumed speed of one worker's transfers from and to storage until it was measured."""
SAVE_COPY_BYTES_PER_S = 1e9
"""The assumed speed of copying one worker's state to host memory until a save was measured."""
PASS_BYTES_PER_S = 2.5e8
"""The assumed speed of a pass over state in memory (optimizer step, copy, initialisation): that of a slow host."""
SUM_BYTES = 2
"""Bytes of a sum per byte of a parameter: eight bytes for four."""
PRE_COPY_FLOOR_S = 60.0
NUM_PROBED = 6
"""Number of micro-batches in a probe."""


def step_bound_s(state: ControllerState, order: ReshapeOrder, version: int | None = None) -> float:
    """Return the bound (seconds) of a step in this shape, which also applies the last step and serves followers."""
    state_bytes = _stage_bytes(state, order.plan)
    expected_s = _mini_batch_s(state, order.plan) + 2 * state_bytes / PASS_BYTES_PER_S + _followed_s(state, order)
    return _bounded(state, expected_s + evaluation_s(state, order.plan, version))


def reshape_bound_s(state: ControllerState, order: ReshapeOrder) -> float:
    """Return the bound (seconds) of a reshape: the most bytes that one worker moves or loads, and frozen weights."""
    sizes, num_copies = state.config.unit_bytes, state.config.state_copies
    sent: Counter[WorkerId] = Counter()
    received: Counter[WorkerId] = Counter()
    loaded: Counter[WorkerId] = Counter()
    for source in order.sources:
        if source.peer is not None:
            received[source.worker] += sizes[source.unit]
            sent[source.peer] += sizes[source.unit]
        if source.kind == "checkpoint":
            loaded[source.peer or source.worker] += sizes[source.unit]
    for entry in () if order.salvage is None else order.salvage.sums:
        if entry.holder != entry.receiver:
            num_bytes = SUM_BYTES * sizes.get(entry.sum.unit, 0) // num_copies
            received[entry.receiver] += num_bytes
            sent[entry.holder] += num_bytes
    moved_bytes = max([*sent.values(), *received.values()], default=0)
    loaded_bytes = max(loaded.values(), default=0)
    kept_bytes = max(_stage_bytes(state, order.plan), _stage_bytes(state, state.plan or order.plan))
    frozen = [sum(state.config.constant_bytes[stage.first_section : stage.end_section]) for stage in order.plan.stages]
    expected_s = (
        moved_bytes / link_bytes_per_s(state)
        + loaded_bytes / storage_bytes_per_s(state)
        + max(frozen) / STORAGE_BYTES_PER_S
        + (moved_bytes + loaded_bytes + 2 * kept_bytes) / PASS_BYTES_PER_S
    )
    return _bounded(state, expected_s)


def commit_bound_s(state: ControllerState) -> float:
    """Return the bound (seconds) of applying the decided step and copying the state; files have their own bound."""
    expected_s = 2 * _stage_bytes(state, state.plan) / PASS_BYTES_PER_S
    return _bounded(state, expected_s + (evaluation_s(state, state.plan, state.version) if state.plan else 0.0))


def give_up_bound_s(state: ControllerState) -> float:
    """Return the time (seconds) for giving up an aborted order, in which begun tasks and the device's queue end."""
    plan, limit_s = state.plan, state.config.policy.heartbeat_timeout_s
    task_s = 0.0 if plan is None else _mini_batch_s(state, plan) / max(1, min(plan.micro_batches_per_replica))
    return limit_s + HEADROOM * (task_s + _stage_bytes(state, plan) / PASS_BYTES_PER_S)


def setup_bound_s(state: ControllerState) -> float:
    """Return the bound (seconds) of a worker's setup, in which it initialises at most the whole model."""
    if state.config.policy.order_timeout_s is not None:
        return state.config.policy.order_timeout_s
    made_s = state.config.state_bytes / state.config.state_copies / PASS_BYTES_PER_S
    return max(SETUP_FLOOR_S, HEADROOM * max(made_s, state.measured.setup_s or 0.0))


def probe_bound_s(state: ControllerState, healthy_s: float) -> float:
    """Return the bound (seconds) of a probe of a stage whose micro-batch takes a healthy worker ``healthy_s``."""
    made_s = state.config.state_bytes / state.config.state_copies / PASS_BYTES_PER_S
    made_s += sum(state.config.constant_bytes) / STORAGE_BYTES_PER_S
    return _bounded(state, NUM_PROBED * healthy_s + made_s)


def save_bound_s(state: ControllerState) -> float:
    """Return how long (seconds) a save may take to bring its next unit to storage."""
    rules, most_bytes = state.config.policy.rules.checkpoints, state.config.largest_unit_bytes
    return rules.file_limit_s(most_bytes) + _bounded(state, most_bytes / PASS_BYTES_PER_S, doubled=False)


def retry_bound_s(state: ControllerState) -> float:
    """Return how long (seconds) to retry: by policy, but at least a step's time and that of reading a checkpoint."""
    step_s = 0.0 if state.plan is None else _mini_batch_s(state, state.plan)
    expected_s = step_s + state.config.state_bytes / STORAGE_BYTES_PER_S
    return max(state.config.policy.give_up_after_s, HEADROOM * expected_s)


def why_retried_no_longer(state: ControllerState) -> str:
    """Return what determines ``retry_bound_s``, for a message."""
    if retry_bound_s(state) == state.config.policy.give_up_after_s:
        return "policy.give_up_after_s of the cluster file"
    return "four times what a step and the reading of a checkpoint take"


def pre_copy_bound_s(state: ControllerState, expected_s: float) -> float:
    """Return the longest time (seconds) that a change waits for a pre-copy expected to take ``expected_s``."""
    limit_s = state.config.policy.rules.ahead.patience_s
    return max(PRE_COPY_FLOOR_S, HEADROOM * expected_s) if limit_s is None else limit_s


def evaluation_s(state: ControllerState, plan: Plan, version: int | None) -> float:
    """Return the longest time (seconds) that evaluating a version should take; ``version`` None: the next one."""
    evaluation = state.evaluation
    if evaluation is None or (version is not None and not evaluation.is_due(version)):
        return 0.0
    return _mini_batch_s(state, plan) * evaluation.num_micro_batches / plan.num_micro_batches


def link_bytes_per_s(state: ControllerState) -> float:
    """Return the speed at which a link carries state: as measured, else that of a slow link."""
    return state.measured.state_bytes_per_s or LINK_BYTES_PER_S


def storage_bytes_per_s(state: ControllerState) -> float:
    """Return the least speed at which a worker reads from storage: that of a slow storage, or of saves if slower."""
    durable_s = state.saving.save_times.durable_s
    if not durable_s or state.plan is None:
        return STORAGE_BYTES_PER_S
    return min(STORAGE_BYTES_PER_S, state.config.written_bytes(state.plan) / durable_s) or STORAGE_BYTES_PER_S


def _mini_batch_s(state: ControllerState, plan: Plan) -> float:
    """Return the seconds of a mini-batch: as the plan expects, or as measured in this run if that is more."""
    return max(plan.expected.mini_batch_s, state.saving.save_times.step_s or 0.0)


def _stage_bytes(state: ControllerState, plan: Plan | None) -> int:
    """Return the bytes of the largest stage's units; of all units while there is no plan."""
    if plan is None:
        return state.config.state_bytes
    return state.config.stage_bytes(plan)


def _followed_s(state: ControllerState, order: ReshapeOrder) -> float:
    """Return the seconds to send followers, in one step, all state that they lack, gradients and partial sums."""
    sizes: Mapping[UnitId, int] = state.config.unit_bytes
    loads: Counter[tuple[str, WorkerId]] = Counter()
    for follow in order.follows:
        if follow.units:
            num_bytes = sum(sizes[unit] for unit in follow.units)
            loads["sends", follow.worker] += num_bytes
            loads["receives", follow.follower] += num_bytes
    sums_bytes = SUM_BYTES * _stage_bytes(state, order.plan) // state.config.state_copies
    total_bytes = max(loads.values(), default=0) + (sums_bytes if order.copy_sums_every else 0)
    return total_bytes / link_bytes_per_s(state)


def _bounded(state: ControllerState, expected_s: float, *, doubled: bool = True) -> float:
    if state.config.policy.order_timeout_s is not None:
        return state.config.policy.order_timeout_s
    times = 2 ** min(state.waits.num_fruitless, MOST_DOUBLINGS) if doubled else 1
    return times * max(FLOOR_S, HEADROOM * expected_s)

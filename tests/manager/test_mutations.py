"""The controller is broken on purpose, in one place at a time: the histories must notice each time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from random_history import play_all
from simulated_cluster import BrokenHistoryError

from manager.controller import answers, deadlines, decide, node_requests, notices, stragglers, takeover
from manager.controller.shape import formation, planned_changes, salvage, selection
from manager.controller.state.actions import EndWorker, ReleaseNodes
from manager.controller.state.events import ManagerResumed
from manager.controller.state.nodes import ImpossibleNodeChange
from manager.controller.state.state import ControllerState, Phase
from manager.controller.state.transition import Transition
from manager.controller.steps import checkpoints, recovery, training_loop
from manager.controller.steps import failures as lost_workers
from manager.controller.steps import failures as worker_errors
from manager.simulation.spot.sums import WorkerSums
from morph.contract.messages import ReshapeOrder
from morph.contract.salvage import PartialSum, counted_in, mask_of, partial_sum, spans_of
from morph.contract.waits import Backoff

pytestmark = pytest.mark.slow

MOST_HISTORIES = 400


def _everything_is_kept(*arguments: Any) -> Any:
    sources = choose_sources(*arguments)
    return tuple(source.model_copy(update={"kind": "keep", "peer": None}) for source in sources)


def _nobody_is_forgotten(transition: Transition, lost: Any) -> None:
    awaited = transition.state.step.awaited - set(lost)
    transition.change_step(awaited=awaited, order=transition.state.step.order if awaited else None)


def _no_vm_is_given_back(transition: Transition, lost: Any) -> None:
    forget(transition, lost)
    transition.actions = [action for action in transition.actions if not isinstance(action, ReleaseNodes)]


def _nobody_else_is_awaited(transition: Transition, worker: str) -> None:
    transition.change_step(awaited=frozenset(), order=None)


def _the_last_one_is_not_awaited(transition: Transition, worker: str) -> None:
    taken(transition, worker)
    if transition.state.phase is Phase.RESHAPING and len(transition.state.step.awaited) == 1:
        transition.change_step(awaited=frozenset(), order=None)


def _any_generation_fits(answer: Any, order: Any) -> Any:
    if answer.kind == "ready":
        return False
    return fits(answer.model_copy(update={"generation": order.generation}), order)


def _nothing_is_aborted(transition: Transition) -> None:
    transition.change_step(awaited=frozenset(), order=None)
    formation.form(transition)


def _an_aborted_step_counts(transition: Transition) -> None:
    if not transition.state.step.awaited:
        transition.change(version=transition.state.version + 1)
    settle(transition)


def _overflow_is_overlooked(transition: Transition, *, bad: bool) -> None:
    reports = transition.state.step.reports.items()
    transition.change_step(
        reports={worker: entry.model_copy(update={"overflowed": False}) for worker, entry in reports}
    )
    decide_step(transition, bad=bad)


def _a_reshape_counts(transition: Transition) -> None:
    transition.change(version=transition.state.version + 1)
    begin(transition)


def _the_version_goes_back(transition: Transition) -> str:
    transition.change(version=transition.state.saving.checkpoint.version if transition.state.saving.checkpoint else 0)
    return ""


def _another_norm_is_decided(*arguments: Any) -> Any:
    facts = decided_step(*arguments)
    return facts.model_copy(update={"gradient_norm": 1.0}) if facts.version > 3 else facts


def _one_member_is_asked(version: int, norms_sq: Any, non_finite: Any, units: Any, weights: Any) -> Any:
    return decided_step(version, norms_sq[:1], non_finite[:1], norms_sq[0], weights)


def _survivors_are_told_no_facts(**fields: Any) -> Any:
    return ReshapeOrder(**{**fields, "decided": None})


_TELLS_NO_FACTS = SimpleNamespace(model_construct=_survivors_are_told_no_facts)


def _one_is_placed_twice(*arguments: Any) -> Any:
    slots = place(*arguments)
    return (*slots[:-1], slots[-1].model_copy(update={"worker": slots[0].worker})) if len(slots) > 1 else slots


def _who_drains_is_placed(state: Any, now_s: float) -> Any:
    steady, unsteady = choose_steady(state, now_s)
    return (*steady, *(worker for worker in state.ready_workers if worker not in steady)), unsteady


def _nothing_happens(transition: Transition, *arguments: Any, **fields: Any) -> None:
    """Neither the state nor the actions change."""


def _a_refusal_means_nothing(transition: Transition, why: str, _node_type: str, _retry_s: float | None = None) -> None:
    transition.change_provisioning(next_request_s=None)
    transition.say(node_requests.ReasonCode.REQUEST_REFUSED, why)


def _nobody_is_spared(transition: Transition, worker: str, why: str) -> None:
    transition.say(deadlines.ReasonCode.NODE_SPARED, why)


def _strangers_live_on(transition: Transition, event: ManagerResumed) -> None:
    resumed(transition, event)
    transition.actions = [action for action in transition.actions if not isinstance(action, EndWorker)]


def _orders_change_when_sent_again(state: Any) -> Any:
    return repeat_orders(state.model_copy(update={"decided": None}))


def _probes_never_end(transition: Transition, worker: str, what: str) -> None:
    config = transition.state.config
    rules = config.policy.rules
    endless = rules.model_copy(update={"stutter": rules.stutter.model_copy(update={"max_probes": 10**9})})
    policy = config.policy.model_copy(update={"rules": endless})
    transition.change(config=config.model_copy(update={"policy": policy}))
    probe_failed(transition, worker, what)
    transition.change(config=config)


def _everything_has_arrived(order: Any, pre_copy: Any, held: Any) -> Any:
    synced = {worker: {move.unit for move in pre_copy.moves if move.receiver == worker} for worker in pre_copy.parties}
    return with_pre_copy(order, pre_copy.model_copy(update={"synced": synced}), held)


def _what_was_sent_is_kept(transition: Transition, spared: Any = ()) -> tuple[()]:
    return ()


def _a_broken_device_is_kept(transition: Transition, worker: str, answer: Any, version: int) -> None:
    worker_errors._give_up(transition, "kept")


def _any_error_is_the_last(transition: Transition, worker: str, answer: Any) -> None:
    failed(transition, worker, answer.model_copy(update={"cause": "run"}))


def _the_first_one_writes_all(state: Any) -> Any:
    first = next(iter(state.ready_workers), None)
    return None if first is None else dict.fromkeys(state.config.units, first)


def _one_count_is_flipped(*arguments: Any) -> Any:
    kept, *others = arguments
    flipped = {worker: (_flipped(sums[0]), *sums[1:]) for worker, sums in kept.items()}
    return choose_salvage(flipped, *others)


def _flipped(total: PartialSum) -> PartialSum:
    """Micro-batch 0 of the first section is in the sum if it was not, and the reverse."""
    counted = counted_in(total)
    counted[min(counted)] ^= 1
    return partial_sum(total.unit, counted)


def _one_missing_micro_batch_does_not_run(*arguments: Any) -> Any:
    found = choose_salvage(*arguments)
    if found is None or not found.remaining:
        return found
    (first, end), *others = found.remaining
    return found.model_copy(update={"remaining": spans_of(mask_of([(first + 1, end), *others]))})


def _overlapping_sums_count(sums: Any, users: Any) -> Any:
    counted: dict[int, int] = {}
    for _, total in sums:
        for section, mask in counted_in(total).items():
            counted[section] = counted.get(section, 0) | mask
    return list(sums), counted


def _one_contribution_is_left_out(sums: WorkerSums, num_micro_batches: int | None = None) -> None:
    run(sums, num_micro_batches)
    place, mask = next(((place, mask) for place, mask in (sums.counted or {}).items() if mask), (("", 0), 0))
    if mask and sums.counted is not None:
        sums.counted[place] = mask & (mask - 1)


def _every_follower_is_in_step(transition: Transition, *, others_keep: bool) -> None:
    reports = transition.state.step.reports.items()
    transition.change_step(reports={worker: entry.model_copy(update={"followed": True}) for worker, entry in reports})
    settle_holdings(transition, others_keep=others_keep)


def _followers_have_everything(*arguments: Any) -> Any:
    found = redundancy_of(*arguments)
    follows = tuple(follow.model_copy(update={"known": follow.units}) for follow in found.follows)
    return found._replace(follows=follows)


taken, forget, fits = Transition.answered, Transition.forget, answers._fits
begin, decide_step, decided_step = training_loop.begin, training_loop.decide_step, training_loop.decided_step
choose_sources, choose_steady, place = formation.choose_sources, selection._steady, formation.place
choose_salvage, redundancy_of, settle_holdings = (
    formation.choose_salvage,
    formation.redundancy_of,
    training_loop._settle_holdings,
)
run = WorkerSums.run
failed, with_pre_copy = worker_errors.failed, formation.with_pre_copy
probe_failed, resumed, repeat_orders, settle = (
    stragglers._probe_failed,
    takeover.on_manager_resumed,
    takeover.repeat_orders,
    lost_workers.settle,
)

MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "every source is said to be kept": (formation, "choose_sources", _everything_is_kept),
    "a step is decided at the first answer": (Transition, "answered", _nobody_else_is_awaited),
    "a generation begins without one member's answer": (Transition, "answered", _the_last_one_is_not_awaited),
    "late answers are taken for present ones": (answers, "_fits", lambda answer, order: True),
    "an old generation's answer is accepted": (answers, "_fits", _any_generation_fits),
    "orders are not aborted before the next generation": (lost_workers, "dissolve", _nothing_is_aborted),
    "an aborted step counts": (lost_workers, "settle", _an_aborted_step_counts),
    "lost workers stay known": (Transition, "forget", _nobody_is_forgotten),
    "the VM of a lost worker is not given back": (Transition, "forget", _no_vm_is_given_back),
    "a member's loss changes nothing": (lost_workers, "_is_needed", lambda state, worker: False),
    "overflowed gradients are applied": (answers, "decide_step", _overflow_is_overlooked),
    "a reshape counts as a step": (answers, "begin", _a_reshape_counts),
    "lost state goes back without a word": (formation, "_set_back", _the_version_goes_back),
    "what was held is believed to be held for ever": (training_loop, "_settle_holdings", _nothing_happens),
    "nobody is ever late": (deadlines, "_late_workers", lambda state, now_s: {}),
    "a manifest counts before it is requested": (checkpoints, "seal_if_complete", training_loop._end),
    "a norm is not the step's": (training_loop, "decided_step", _another_norm_is_decided),
    "facts are those of one stage": (training_loop, "decided_step", _one_member_is_asked),
    "survivors roll forward without facts": (formation, "ReshapeOrder", _TELLS_NO_FACTS),
    "a stop is forgotten": (ControllerState, "is_last", property(lambda state: False)),
    "a worker is placed twice": (formation, "place", _one_is_placed_twice),
    "a draining worker is given a section": (selection, "_steady", _who_drains_is_placed),
    "training stands for a node for ever": (formation, "_hold_until_s", lambda state, choice, now_s: now_s + 1000),
    "requests are forgotten": (node_requests, "keep_request", _nothing_happens),
    "a refusal means nothing": (node_requests, "_refuse", _a_refusal_means_nothing),
    "who outlives a notice is never taken back": (deadlines, "spare", _nobody_is_spared),
    "a new manager lets strangers live": (decide, "on_manager_resumed", _strangers_live_on),
    "a new manager sends other orders": (takeover, "repeat_orders", _orders_change_when_sent_again),
    "what was pre-copied is used before it has arrived": (formation, "with_pre_copy", _everything_has_arrived),
    "what was pre-copied outlives its generation": (lost_workers, "without_pre_copy", _what_was_sent_is_kept),
    "a change is put off for ever": (planned_changes, "_until_s", lambda state, choice, moves, now_s: now_s + 1000),
    "a VM may go while it is still needed": (notices, "_is_free", lambda state, worker: True),
    "a VM may go while one of its workers is needed": (
        notices,
        "_is_free_with_its_vm",
        lambda state, worker: notices._is_free(state, worker),
    ),
    "a worker whose device is lost is kept": (worker_errors, "_lost", _a_broken_device_is_kept),
    "any error inside a worker ends the run": (answers, "failed", _any_error_is_the_last),
    "nothing is saved before a rest": (recovery, "_writers", lambda state: None),
    "before a rest anybody writes anything": (recovery, "_writers", _the_first_one_writes_all),
    "a rest lasts for ever": (recovery, "PAUSES", Backoff(1000.0, 1000.0)),
    "a rest never ends": (deadlines, "rest_over", _nothing_happens),
    "one count of a sum is flipped": (formation, "choose_salvage", _one_count_is_flipped),
    "what is missing does not run again": (formation, "choose_salvage", _one_missing_micro_batch_does_not_run),
    "sums that overlap both count": (salvage, "_disjoint", _overlapping_sums_count),
    "a worker leaves out what it counts as run": (WorkerSums, "run", _one_contribution_is_left_out),
    "every follower is taken to be in step": (training_loop, "_settle_holdings", _every_follower_is_in_step),
    "followers are taken to have what is yet to be sent": (formation, "redundancy_of", _followers_have_everything),
    "probes never end": (stragglers, "_probe_failed", _probes_never_end),
}

CAUGHT_IN = {
    "nobody is ever late": 13,
    "a new manager lets strangers live": 49,
    "a new manager sends other orders": 14,
    "what was pre-copied is used before it has arrived": 16,
    "a worker whose device is lost is kept": 19,
    "nothing is saved before a rest": 11,
    "probes never end": 148,
}
"""The history that was the first to notice is played first; if it notices no longer, all others follow."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_histories_catch_a_broken_controller(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, broken = MUTATIONS[name]
    if module is decide:
        table = {key: broken if handler is resumed else handler for key, handler in decide.TRANSITIONS.items()}
        monkeypatch.setattr(decide, "TRANSITIONS", table)
    else:
        monkeypatch.setattr(module, attribute, broken)
    caught = (BrokenHistoryError, AssertionError, KeyError, decide.ImpossibleEvent, ImpossibleNodeChange)
    with pytest.raises(caught):
        play_all(sorted(range(MOST_HISTORIES), key=lambda seed: seed != CAUGHT_IN.get(name)))

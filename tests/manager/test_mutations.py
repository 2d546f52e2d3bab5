"""The controller is broken on purpose, in one place at a time: the histories must notice each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from random_history import play_all
from simulated_cluster import BrokenHistoryError

from manager.controller import (
    acknowledging,
    answering,
    asking,
    changes,
    choosing,
    decide,
    failing,
    forming,
    losing,
    probing,
    resting,
    resuming,
    saving,
    sending,
    stepping,
    waking,
)
from manager.controller.actions import EndWorker
from manager.controller.events import ManagerResumed
from manager.controller.nodes import ImpossibleNodeChange
from manager.controller.state import Phase
from morph.contract.messages import ReshapeOrder

MOST_HISTORIES = 400


def _everything_is_kept(*arguments: Any) -> Any:
    sources = choose_sources(*arguments)
    return tuple(source.model_copy(update={"kind": "keep", "peer": None}) for source in sources)


def _nobody_is_forgotten(state: Any, lost: Any) -> Any:
    awaited = state.awaited - set(lost)
    return changes.changed(state, awaited=awaited, order=state.order if awaited else None)


def _nobody_else_is_awaited(state: Any, worker: str, **fields: Any) -> Any:
    return changes.changed(state, awaited=frozenset(), order=None, **fields)


def _the_last_one_is_not_awaited(state: Any, worker: str, **fields: Any) -> Any:
    state = answered_by(state, worker, **fields)
    if state.phase is Phase.RESHAPING and len(state.awaited) == 1:
        return changes.changed(state, awaited=frozenset(), order=None)
    return state


def _any_generation_fits(answer: Any, order: Any) -> Any:
    if answer.kind == "ready":
        return False
    return fits(answer.model_copy(update={"generation": order.generation}), order)


def _nothing_is_aborted(state: Any, now_s: float) -> Any:
    return forming.form(changes.changed(state, awaited=frozenset(), order=None), now_s)


def _an_aborted_step_counts(state: Any, now_s: float) -> Any:
    version = state.version if state.awaited else state.version + 1
    return settle(changes.changed(state, version=version), now_s)


def _overflow_is_overlooked(state: Any, now_s: float) -> Any:
    reports = {worker: entry.model_copy(update={"overflowed": False}) for worker, entry in state.reports.items()}
    return decide_step(changes.changed(state, reports=reports), now_s)


def _a_reshape_counts(state: Any, now_s: float) -> Any:
    return begin(changes.changed(state, version=state.version + 1), now_s)


def _the_version_goes_back(state: Any) -> tuple[Any, str]:
    return changes.changed(state, version=state.checkpoint.version if state.checkpoint else 0), ""


def _another_norm_is_decided(*arguments: Any) -> Any:
    facts = decided_step(*arguments)
    return facts.model_copy(update={"gradient_norm": 1.0}) if facts.version > 3 else facts


def _one_member_is_asked(version: int, norms_sq: Any, non_finite: Any, units: Any) -> Any:
    return decided_step(version, norms_sq[:1], non_finite[:1], norms_sq[0])


def _survivors_are_told_no_facts(**fields: Any) -> Any:
    return ReshapeOrder(**{**fields, "decided": None})


def _one_is_placed_twice(*arguments: Any) -> Any:
    slots = place(*arguments)
    return (*slots[:-1], slots[-1].model_copy(update={"worker": slots[0].worker})) if len(slots) > 1 else slots


def _who_drains_is_placed(state: Any, now_s: float) -> Any:
    steady, unsteady = choose_steady(state, now_s)
    return (*steady, *(worker for worker in changes.ready_workers(state) if worker not in steady)), unsteady


def _hoarded_units_are_believed(state: Any, *, others_keep: bool) -> Any:
    return state


def _requests_are_forgotten(state: Any, name: str, request: Any) -> Any:
    return state


def _a_refusal_means_nothing(state: Any, why: str, now_s: float) -> Any:
    return changes.said(changes.changed(state, ask_at_s=None), asking.ReasonCode.REQUEST_REFUSED, why)


def _nobody_is_spared(state: Any, worker: str, why: str, now_s: float) -> Any:
    return changes.said(state, waking.ReasonCode.NODE_SPARED, why)


def _strangers_live_on(state: Any, event: ManagerResumed, now_s: float) -> Any:
    decision = resumed(state, event, now_s)
    kept = tuple(action for action in decision.actions if not isinstance(action, EndWorker))
    return decision.model_copy(update={"actions": kept})


def _orders_change_when_sent_again(state: Any) -> Any:
    return send_again(changes.changed(state, decided=None))


def _probes_never_end(state: Any, worker: str, what: str, now_s: float) -> Any:
    rules = state.config.policy.rules
    endless = rules.model_copy(update={"stutter": rules.stutter.model_copy(update={"max_probes": 10**9})})
    policy = state.config.policy.model_copy(update={"rules": endless})
    config = state.config.model_copy(update={"policy": policy})
    failed = probe_failed(changes.changed(state, config=config), worker, what, now_s)
    return failed.model_copy(update={"state": changes.changed(failed.state, config=state.config)})


def _everything_has_arrived(order: Any, ahead: Any) -> Any:
    following = {worker: {move.unit for move in ahead.moves if move.receiver == worker} for worker in ahead.parties}
    return with_ahead(order, ahead.model_copy(update={"following": following}))


def _what_was_sent_is_kept(state: Any, spared: Any = ()) -> Any:
    return state, ()


def _a_broken_device_is_kept(state: Any, worker: str, answer: Any, version: int, now_s: float) -> Any:
    return failing._given_up(state, changes.said(state, asking.ReasonCode.ABORTING, "kept"), now_s)


def _any_error_is_the_last(state: Any, worker: str, answer: Any, now_s: float) -> Any:
    return failed(state, worker, answer.model_copy(update={"cause": "run"}), now_s)


def _the_first_one_writes_all(state: Any) -> Any:
    first = next(iter(changes.ready_workers(state)), None)
    return None if first is None else dict.fromkeys(state.config.units, first)


answered_by, fits = answering.answered_by, answering._fits
begin, decide_step, decided_step = stepping.begin, stepping.decide_step, stepping.decided_step
choose_sources, choose_steady, place = forming.choose_sources, choosing._steady, forming.place
failed, with_ahead = failing.failed, forming.with_ahead
probe_failed, resumed, send_again, settle = probing._probe_failed, resuming.resumed, resuming.send_again, losing.settle

MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "every source is said to be kept": (forming, "choose_sources", _everything_is_kept),
    "a step is decided at the first answer": (answering, "answered_by", _nobody_else_is_awaited),
    "a generation begins without one member's answer": (answering, "answered_by", _the_last_one_is_not_awaited),
    "late answers are taken for present ones": (answering, "_fits", lambda answer, order: True),
    "an old generation's answer is accepted": (answering, "_fits", _any_generation_fits),
    "orders are not aborted before the next generation": (losing, "dissolve", _nothing_is_aborted),
    "an aborted step counts": (losing, "settle", _an_aborted_step_counts),
    "lost workers stay known": (losing, "without_workers", _nobody_is_forgotten),
    "a member's loss changes nothing": (losing, "_is_needed", lambda state, worker: False),
    "overflowed gradients are applied": (answering, "decide_step", _overflow_is_overlooked),
    "a reshape counts as a step": (answering, "begin", _a_reshape_counts),
    "lost state goes back without a word": (forming, "_with_living_state", _the_version_goes_back),
    "what was held is believed to be held for ever": (stepping, "_with_holdings", _hoarded_units_are_believed),
    "nobody is ever late": (waking, "_late_workers", lambda state, now_s: {}),
    "a manifest counts before it is asked for": (saving, "seal_if_complete", lambda state, now_s: stepping._end(state)),
    "a norm is not the step's": (stepping, "decided_step", _another_norm_is_decided),
    "facts are those of one stage": (stepping, "decided_step", _one_member_is_asked),
    "survivors roll forward without facts": (forming, "ReshapeOrder", _survivors_are_told_no_facts),
    "a stop is forgotten": (stepping, "_is_last", lambda state: False),
    "a worker is placed twice": (forming, "place", _one_is_placed_twice),
    "a draining worker is given a section": (choosing, "_steady", _who_drains_is_placed),
    "training stands for a node for ever": (forming, "_hold_until_s", lambda state, choice, now_s: now_s + 1000),
    "requests are forgotten": (asking, "with_request", _requests_are_forgotten),
    "a refusal means nothing": (asking, "_refused", _a_refusal_means_nothing),
    "who outlives a notice is never taken back": (waking, "spare", _nobody_is_spared),
    "a new manager lets strangers live": (decide, "resumed", _strangers_live_on),
    "a new manager sends other orders": (resuming, "send_again", _orders_change_when_sent_again),
    "what was sent ahead is used before it has arrived": (forming, "with_ahead", _everything_has_arrived),
    "what was sent ahead outlives its generation": (losing, "without_ahead", _what_was_sent_is_kept),
    "a change is put off for ever": (sending, "_until_s", lambda state, choice, moves, now_s: now_s + 1000),
    "a VM may go while it is still needed": (acknowledging, "_is_free", lambda state, worker: True),
    "a VM may go while one of its workers is needed": (
        acknowledging,
        "_is_free_with_its_vm",
        lambda state, worker: acknowledging._is_free(state, worker),
    ),
    "a worker whose device is lost is kept": (failing, "_lost", _a_broken_device_is_kept),
    "any error inside a worker ends the run": (answering, "failed", _any_error_is_the_last),
    "nothing is saved before a rest": (resting, "_writers", lambda state: None),
    "before a rest anybody writes anything": (resting, "_writers", _the_first_one_writes_all),
    "a rest lasts for ever": (resting, "pause_after", lambda num_before: 1000.0),
    "a rest never ends": (waking, "rest_over", lambda state, now_s: None),
    "probes never end": (probing, "_probe_failed", _probes_never_end),
}


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
        play_all(range(MOST_HISTORIES))

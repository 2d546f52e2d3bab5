"""Handles steps with bad numbers: the run ends with the version before such a step, or continues without its result.

If step t is bad, version t+1 gets the state of version t (``skip``) or of version m (``go_back``), where m is the last
multiple of ``LossRules.back_steps`` up to t. Once the workers are back at version m, a *leap* renames their state to
version t+1. So the state depends on the version alone, and a resumed run treats the same bad step in the same way.
"""

from __future__ import annotations

from manager.controller.shape.formation import form
from manager.controller.state.actions import NoteBadStep, ReasonCode
from manager.controller.state.state import Failing, Leap
from manager.controller.state.transition import Transition
from manager.controller.steps.doubt import note_doubt
from manager.controller.steps.failures import dissolve
from morph.contract.decided import Decided
from morph.contract.messages import UnitId
from morph.words import counted

MOST_UNNAMED = 8


def gives_up(transition: Transition, why: str) -> bool:
    """Handle a bad step; return whether it is abandoned undecided. If not, it is to be skipped."""
    state, rules = transition.state, transition.state.config.policy.rules.losses
    if state.version not in state.unnamed:
        transition.change(unnamed=(*state.unnamed, state.version)[-MOST_UNNAMED:])
    if rules.when_bad == "stop":
        _stop(transition, why)
        return True
    num_bad = state.losses.num_bad + 1
    if num_bad > rules.most:
        since = state.version // rules.back_steps * rules.back_steps
        _stop(transition, f"{why}; it is one of {num_bad} bad steps since version {since} (rules.losses.most)")
        return True
    if rules.when_bad == "go_back":
        _go_back(transition, why, num_bad)
        return True
    _note(transition, state.version, f"{why}; it is skipped")
    return False


def leap_if_due(transition: Transition) -> bool:
    """If a later version has the same state as the present one, continue from there; return whether that is so."""
    state = transition.state
    leap = state.leaps.get(state.version)
    if leap is None or state.is_last:
        return False
    decided = Decided(version=leap.to, skipped=True, state_of=state.version)
    workers, nothing = dict(state.workers), frozenset[UnitId]()
    for worker in state.workers.keys() - state.member_units.keys():  # not a member, and perhaps a step behind
        workers[worker] = workers[worker].model_copy(update={"holds": nothing})
    transition.change(version=leap.to, decided=decided, workers=workers)
    transition.change(losses=state.losses.model_copy(update={"num_bad": leap.num_bad}))
    transition.change_step(kept={})
    transition.say(ReasonCode.FORMED, f"version {leap.to} has the state of version {state.version}")
    form(transition, planned=True)
    return True


def _stop(transition: Transition, why: str) -> None:
    state = transition.state
    failing = Failing(
        version=state.version, generation=state.generation, worker=state.slots[0].worker, sentence=why, final=True
    )
    transition.change(failing=failing, stop_reason=why)
    _note(transition, state.version, f"{why}; the run ends once version {state.version} is saved")
    _give_up(transition)


def _go_back(transition: Transition, why: str, num_bad: int) -> None:
    state = transition.state
    bad, every = state.version, state.config.policy.rules.losses.back_steps
    back = bad // every * every
    transition.change(leaps={**state.leaps, back: Leap(to=bad + 1, num_bad=num_bad)})
    lost = f"it and the {counted(bad - back, 'step')} before it are" if bad > back else "it is"
    sentence = f"{why}; {lost} given up: version {bad + 1} has the state of version {back}"
    if bad > back:
        workers = {worker: entry.model_copy(update={"holds": frozenset()}) for worker, entry in state.workers.items()}
        transition.change(workers=workers)
        checkpoint = state.saving.checkpoint
        if checkpoint is not None and checkpoint.version > back:
            note_doubt(transition, sentence)
            doubt = transition.state.saving.doubt
            assert doubt is not None, "nothing is in doubt"
            transition.change_saving(doubt=doubt.model_copy(update={"at_most": back}))
    _note(transition, bad, sentence)
    _give_up(transition)


def _note(transition: Transition, step: int, sentence: str) -> None:
    transition.add(sentence, NoteBadStep(step=step, sentence=sentence))


def _give_up(transition: Transition) -> None:
    """Drop all partial sums of the step and leave the shape, while no worker has an order."""
    transition.change_step(reports={}, kept={})
    dissolve(transition, planned=True)

"""Judges the losses of steps: whether a step is bad."""

from __future__ import annotations

from manager.controller.state.state import ControllerState
from manager.controller.state.transition import Transition


def judges_losses(state: ControllerState) -> bool:
    """Whether the manager judges losses; if not, a worker with a gradient that is not finite ends the run."""
    rules = state.config.policy.rules.losses
    return rules.when_bad != "stop" or rules.deviations is not None


def why_bad(state: ControllerState) -> str:
    """Return why the step that every member has prepared is bad; empty if it is not."""
    if not judges_losses(state):
        return ""
    why = state.losses.why_bad(*_losses(state), state.config.policy.rules.losses)
    if not why and state.step.loss_scale is None and any(report.non_finite for report in state.step.reports.values()):
        why = "a gradient is not finite"
    return f"step {state.version} is bad: {why}" if why else ""


def take_losses(transition: Transition, *, bad: bool) -> None:
    """Add the prepared step's losses to the history with which later losses are compared."""
    state = transition.state
    if judges_losses(state):
        rules = state.config.policy.rules.losses
        transition.change(losses=state.losses.after(state.version + 1, *_losses(state), rules, bad=bad))


def _losses(state: ControllerState) -> tuple[dict[int, float], dict[int, float]]:
    """Return the losses and the weights of the prepared step, by micro-batch."""
    losses: dict[int, float] = {}
    weights: dict[int, float] = {}
    for report in state.step.reports.values():
        losses |= report.losses
        weights |= report.weights
    return losses, weights

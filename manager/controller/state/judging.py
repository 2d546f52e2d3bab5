"""Judges evaluations and losses: the best version, an early end of training, and whether a step is bad."""

from __future__ import annotations

from collections.abc import Sequence

from manager.controller.state.actions import MarkBest, WriteManifest
from manager.controller.state.evaluations import totals_of
from manager.controller.state.saves import PendingCheckpoint
from manager.controller.state.state import ControllerState
from manager.controller.state.transition import Transition
from morph.contract.checkpoint import Manifest
from morph.contract.decided import LossTrend
from morph.contract.errors import TrainingStopped
from morph.contract.evaluation import Best, BestRule, Judged
from morph.contract.messages import WorkerId

MOST_NEWEST = 4


def finisher(state: ControllerState) -> WorkerId | None:
    """Return the member that computes the job's own metrics for an evaluation; None: there is no shape."""
    plan = state.plan
    if plan is None:
        return None
    return next((slot.worker for slot in state.slots if plan.is_last(slot.stage)), None)


def take_evaluation(transition: Transition) -> None:
    """Once all members have answered, process the evaluation that they report. Raises TrainingStopped."""
    state = transition.state
    size, step = state.evaluation, state.step
    if size is None or not size.acts:
        return
    if state.unfinished is not None and step.finished is not None and step.finished.version == state.unfinished.version:
        values = state.unfinished.values | step.finished.values
        transition.change(unfinished=None)
        _judge(transition, step.finished.version, values)
    totals = totals_of(step.shares) if step.shares else None
    if totals is None or totals.version <= state.judged.last_version:
        return
    if not size.finishes:
        _judge(transition, totals.version, totals.values)
    elif step.finished is None or step.finished.version < totals.version:
        transition.change(unfinished=totals)


def set_back_judged(transition: Transition, version: int) -> None:
    """Restore the results of evaluations and losses of the checkpoint of this version; at version 0 there are none."""
    state = transition.state
    checkpoint, unfinished = state.saving.checkpoint, state.unfinished
    known = checkpoint is not None and checkpoint.version == version
    judged = checkpoint.judged if checkpoint is not None and known else Judged()
    kept = unfinished if unfinished is not None and judged.last_version < unfinished.version < version else None
    losses = checkpoint.losses if checkpoint is not None and known else LossTrend()
    transition.change(judged=judged, unfinished=kept, losses=losses)
    candidates = tuple(save for save in state.saving.candidates if save.version <= version)
    transition.change_saving(candidates=candidates)


def note_complete(transition: Transition, version: int) -> None:
    """Handle that a checkpoint is complete: mark it if its version is the best of all complete ones."""
    saving = transition.state.saving
    transition.change_saving(newest=tuple(sorted((*saving.newest, version)))[-MOST_NEWEST:])
    _mark(transition)


def marked_with(state: ControllerState, *complete: int) -> Best | None:
    """Return the best of the complete checkpoints, counting these versions as complete too."""
    marked, rule = state.saving.marked, None if state.evaluation is None else state.evaluation.best
    for candidate in state.saving.candidates if rule is not None else ():
        than = None if marked is None else marked.value
        if candidate.version in complete and rule is not None and rule.is_better(candidate.value, than):
            marked = candidate
    return marked


def _mark(transition: Transition) -> None:
    """Mark a complete checkpoint that is better than the marked one; forget candidates that cannot be complete."""
    state, saving = transition.state, transition.state.saving
    marked = marked_with(state, *saving.newest)
    if marked is not None and marked != saving.marked:
        transition.actions.append(MarkBest(best=marked))
    newest = max(saving.newest, default=0)
    # a newer checkpoint may be complete before an older one that is still written
    on_the_way = {save.version for save in saving.under_way} | {save.version for save in saving.sealing}
    left = tuple(save for save in saving.candidates if save.version > newest or save.version in on_the_way)
    transition.change_saving(marked=marked, candidates=left)


def awaits_metrics(state: ControllerState, version: int) -> bool:
    """Whether an earlier evaluation, whose result belongs in the checkpoint of this version, must still be judged."""
    return state.unfinished is not None and state.unfinished.version < version


def may_be_best(state: ControllerState, under_way: Sequence[PendingCheckpoint]) -> tuple[PendingCheckpoint, ...]:
    """Return the checkpoints under way that a newer one must not replace: the oldest, unjudged ones, and the best."""
    values = {candidate.version: candidate for candidate in state.saving.candidates}
    best = marked_with(state, *(save.version for save in under_way if save.version in values))
    return tuple(
        save
        for save in under_way
        if save is under_way[0] or save.version > state.judged.last_version or (best and best.version == save.version)
    )


def manifest_order(state: ControllerState, manifest: Manifest) -> WriteManifest:
    """Order a manifest, and spare checkpoints, stored or on the way, that are or may become the best one."""
    if state.evaluation is None or state.evaluation.best is None:
        return WriteManifest(manifest=manifest)
    saving, evaluation = state.saving, state.evaluation
    coming = {
        *saving.newest,
        *(save.version for save in saving.sealing),
        *(save.version for save in saving.under_way),
    }
    best = marked_with(state, *coming)
    spared = {version for version in coming if version > state.judged.last_version and evaluation.is_due(version)}
    spared |= {best.version} if best is not None else set()
    return WriteManifest(manifest=manifest, spared=tuple(sorted(spared)))


def early_end(state: ControllerState) -> str:
    """Return why training ends early; empty if it does not."""
    rule = None if state.evaluation is None else state.evaluation.best
    if rule is None or not state.judged.is_over(rule):
        return ""
    best = state.judged.best
    was = "none was a number" if best is None else f"the best is {best.value:.6g}, at version {best.version}"
    return f"{rule.metric} did not improve in {state.judged.num_worse} evaluations: {was}"


def _judge(transition: Transition, version: int, values: dict[str, float | None]) -> None:
    state = transition.state
    rule = None if state.evaluation is None else state.evaluation.best
    if rule is None:
        transition.change(judged=Judged(last_version=max(version, state.judged.last_version)))
        return
    value = _value(values, rule)
    judged = state.judged.after(rule, version, value)
    transition.change(judged=judged)
    transition.change_under_way(lambda old: old if old.version < version else old.model_copy(update={"judged": judged}))
    best = judged.best
    if best is not None and best.version == version:
        transition.add(f"version {version} is the best so far: {rule.metric} {best.value:.6g}")
    if value is not None and judged is not state.judged:
        candidate = Best(version=version, metric=rule.metric, value=value)
        transition.change_saving(candidates=(*transition.state.saving.candidates, candidate))
        _mark(transition)


def _value(values: dict[str, float | None], rule: BestRule) -> float | None:
    if rule.metric not in values:
        known = ", ".join(sorted(values))
        raise TrainingStopped(f"Job.best.metric is {rule.metric!r}, which no evaluation reports: there are {known}")
    return values[rule.metric]


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

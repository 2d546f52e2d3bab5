"""Where the time of a pause goes: pieces that add up to it, from the driver's own decisions."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from manager.controller.state.actions import SendReshape
from manager.controller.state.events import WorkerAnswered
from manager.engine.loop.driver import Observed
from manager.report.values import MorphRecord, RunReport
from morph.contract.messages import Reshaped

PIECES = ("detect", "agree", "plan", "groups", "state", "answers", "redo")


@dataclass(frozen=True)
class Forming:
    """One generation: when its order was decided, when it was sent to all workers, and which worker answered last."""

    generation: int
    decided_s: float
    sent_s: float
    last: Reshaped | None = None
    answered_s: float = 0.0


class FormingWatch:
    """An observer of the driver that records how long deciding and sending took, which the journal does not."""

    def __init__(self) -> None:
        self.formed: dict[int, Forming] = {}

    def __call__(self, observed: Observed) -> None:
        """Handle one observed decision, whose orders are sent."""
        if any(isinstance(action, SendReshape) for action in observed.decision.actions):
            generation = observed.decision.state.generation
            self.formed[generation] = Forming(generation, observed.time_s, time.time())
        event = observed.event
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, Reshaped):
            known = self.formed[event.answer.generation]
            last = Forming(known.generation, known.decided_s, known.sent_s, event.answer, observed.time_s)
            self.formed[event.answer.generation] = last


@dataclass(frozen=True)
class Pause:
    """One morph. Times in seconds; ``pieces`` add up to ``pause_s``.

    ``pieces``: kill until the manager knows (detect), until every survivor has given up its order (agree), until the
    next shape is decided, written down and sent (plan), then of the worker that answered last: forming its groups
    (groups), moving its state (state), and the rest of the round trip (answers); then the step (redo).
    """

    planned: bool
    from_shape: str
    to_shape: str
    num_lost: int
    steps_redone: int
    num_generations: int
    from_checkpoint: bool
    pause_s: float
    pieces: dict[str, float]
    plain_step_s: float

    @property
    def without_step_s(self) -> float:
        """The pause less a plain step of the new shape."""
        return self.pause_s - self.plain_step_s


def pauses_of(report: RunReport, formed: dict[int, Forming]) -> list[Pause]:
    """Return the pauses of a run in order, without those that the run's end cut short."""
    found = []
    plain = {shape: _plain_step_s(report, shape) for shape in {span.shape for span in report.shapes}}
    for morph in report.morphs:
        forming = _forming_of(morph, formed)
        if morph.pause_ms is None or forming is None or forming.last is None or morph.to_shape is None:
            continue
        assert morph.resumed_at_s is not None
        began_s = morph.resumed_at_s - morph.pause_ms / 1e3
        groups_s, state_s = forming.last.groups_s, forming.last.state_s
        pieces = {
            "detect": morph.detected_at_s - began_s,
            "agree": forming.decided_s - morph.detected_at_s,
            "plan": forming.sent_s - forming.decided_s,
            "groups": groups_s,
            "state": state_s,
            "answers": forming.answered_s - forming.sent_s - groups_s - state_s,
            "redo": morph.resumed_at_s - forming.answered_s,
        }
        found.append(
            Pause(
                planned=morph.planned,
                from_shape=morph.from_shape,
                to_shape=morph.to_shape,
                num_lost=len(morph.lost_workers),
                steps_redone=morph.steps_redone,
                num_generations=morph.num_generations,
                from_checkpoint="checkpoint" in morph.sources or "initial" in morph.sources,
                pause_s=morph.pause_ms / 1e3,
                pieces=pieces,
                plain_step_s=plain[morph.to_shape],
            )
        )
    return found


def _forming_of(morph: MorphRecord, formed: dict[int, Forming]) -> Forming | None:
    """Return the generation that continued training: the last one complete at that time."""
    if morph.reformed_at_s is None:
        return None
    complete = [entry for entry in formed.values() if entry.answered_s == morph.reformed_at_s]
    return complete[0] if complete else None


def _plain_step_s(report: RunReport, shape: str) -> float:
    """Return the median time of a step of this shape, without the first step of each generation."""
    first: dict[int, int] = {}
    for record in report.steps:
        first.setdefault(record.generation, record.step)
    shapes = {span.generation: span.shape for span in report.shapes}
    times = [
        record.duration_s
        for record in report.steps
        if shapes[record.generation] == shape and record.step != first[record.generation]
    ]
    return statistics.median(times) if times else 0.0

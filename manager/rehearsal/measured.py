"""What a rehearsal's mini-batches took, gathered from the manager's decisions."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field

from manager.controller.events import WorkerAnswered
from manager.engine.driver import Observed
from morph.contract.messages import Prepared

WARM_UP_STEPS = 1
_PARTS = ("forward", "recompute", "backward", "reduce", "wait")


@dataclass
class Measured:
    """An observer of the driver.

    ``decided_s[t]`` is when step t was decided, and ``prepared[t]`` has (when, stage, answer) of its workers.
    """

    decided_s: list[float] = field(default_factory=list)
    prepared: dict[int, list[tuple[float, int, Prepared]]] = field(default_factory=dict)

    def __call__(self, observed: Observed) -> None:
        """Take note of one decision."""
        state, event = observed.decision.state, observed.event
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, Prepared):
            stages = {slot.worker: slot.stage for slot in state.slots}
            entry = (observed.time_s, stages[event.worker], event.answer)
            self.prepared.setdefault(event.answer.step, []).append(entry)
        while len(self.decided_s) < state.version:
            self.decided_s.append(observed.time_s)

    @property
    def mini_batches_s(self) -> tuple[float, ...]:
        """Decision to decision, of the steps that count."""
        counted = self.decided_s[WARM_UP_STEPS - 1 :]
        return tuple(after - before for before, after in itertools.pairwise(counted))

    @property
    def counted_steps(self) -> range:
        """The steps that count."""
        return range(WARM_UP_STEPS, len(self.decided_s))

    @property
    def turn_s(self) -> float:
        """Median time from a decision until the last worker of the first stage has begun the next step.

        The manager's round trip, and the optimizer step of that stage.
        """
        turns = []
        for step in self.counted_steps:
            begun = [time_s - answer.times.step_s for time_s, stage, answer in self.prepared[step] if stage == 0]
            turns.append(max(begun) - self.decided_s[step - 1])
        return statistics.median(turns)

    @property
    def late_s(self) -> float:
        """The most by which a task ended late: how far behind the host was."""
        return max(answer.times.late_s for step in self.counted_steps for _, _, answer in self.prepared[step])

    def parts_s(self) -> dict[str, float]:
        """Seconds per worker and step by kind of work, averaged over workers and the steps that count."""
        answers = [answer for step in self.counted_steps for _, _, answer in self.prepared[step]]
        return {part: statistics.mean(getattr(answer.times, f"{part}_s") for answer in answers) for part in _PARTS}

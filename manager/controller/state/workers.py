"""A worker as the controller knows it: how its node stands, how fast it computes, what it holds."""

from __future__ import annotations

from manager.controller.state.events import NodeFacts
from manager.controller.state.nodes import NodeState
from morph.contract.base import Value
from morph.contract.messages import FailureCause, UnitId, Version, WorkerId


class Yardstick(Value):
    """What a healthy worker took (seconds) for a micro-batch's forward and backward on these sections.

    ``usual``: how all workers compared with the profile then, where that was known.
    """

    first_section: int
    end_section: int
    healthy_s: float
    usual: float | None = None


class Pace(Value):
    """How fast a worker computes.

    ``samples_s``: micro-batches of the window that is being filled; ``median_s``: of the last full one, and
    ``error_s`` its standard error; ``past_s``: medians of the last windows in this generation. ``streak``: windows in a
    row in which it was slow, or, negative, well. ``slowdown``: 1 is as fast as expected. ``yardstick``: what it was
    held against when it was last judged.
    """

    samples_s: tuple[float, ...] = ()
    median_s: float | None = None
    error_s: float = 0.0
    past_s: tuple[float, ...] = ()
    yardstick: Yardstick | None = None
    streak: int = 0
    slowdown: float = 1.0


class Probation(Value):
    """Of a slow worker that was left out. ``asked_s``: when the probe was sent that is not answered yet."""

    num_asked: int = 0
    num_passed: int = 0
    num_failed: int = 0
    due_s: float
    asked_s: float | None = None


class WorkerState(Value):
    """One VM and its worker. ``holds``: units whose state at the decided version it certainly has.

    ``ready_s``: when it was set up, None before that. ``eligible_s``: it is not taken in earlier, for its machine
    came and went too often. ``drain_until_s``: while draining, when its notice counts as void.
    """

    appeared_s: float
    node: NodeState = NodeState.WARMING
    host: str = ""
    facts: NodeFacts = NodeFacts()
    ready_s: float | None = None
    eligible_s: float | None = None
    notice: str | None = None
    drain_until_s: float | None = None
    pace: Pace = Pace()
    probation: Probation | None = None
    holds: frozenset[UnitId] = frozenset()

    @property
    def ready(self) -> bool:
        """Whether it is set up, and so can be given an order."""
        return self.ready_s is not None


class Failing(Value):
    """An error inside a worker, until the step at which it came is decided.

    ``final``: it came again, or nothing would mend it: what is held is saved, and the run ends.
    """

    version: Version
    generation: int
    worker: WorkerId
    sentence: str
    traceback: str = ""
    cause: FailureCause = "run"
    final: bool = False

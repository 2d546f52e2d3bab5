"""The live view of a run: a panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from manager.controller.events import WorkerAnswered
from manager.controller.reasons import ReasonCode
from manager.report.means import mean_loss
from morph.contract.messages import MicroBatchLoss, Prepared

if TYPE_CHECKING:
    from rich.console import RenderableType

    from manager.engine.driver import Observed, Observer

PLAIN_EVERY_S = 5.0
RECENT = 6
SPEED_WINDOW = 10
_TOLD = {
    ReasonCode.NODE_REGISTERED,
    ReasonCode.WORKER_READY,
    ReasonCode.NODES_REQUESTED,
    ReasonCode.REQUEST_REFUSED,
    ReasonCode.NODE_ABSENT,
    ReasonCode.NOTICE_TAKEN,
    ReasonCode.NODE_SPARED,
    ReasonCode.WORKER_SLOW,
    ReasonCode.WORKER_WELL,
    ReasonCode.MANAGER_RESUMED,
    ReasonCode.HOLDING,
    ReasonCode.FORMED,
    ReasonCode.SET_BACK,
    ReasonCode.TOO_FEW_WORKERS,
    ReasonCode.ABORTING,
    ReasonCode.WORKER_REMOVED,
    ReasonCode.OVERFLOW_RETRY,
    ReasonCode.CHECKPOINT_ABANDONED,
    ReasonCode.CHECKPOINT_COMPLETE,
    ReasonCode.STOP_NOTED,
    ReasonCode.FINISHED,
    ReasonCode.STOPPED,
    ReasonCode.FAILED,
}


@dataclass
class LiveState:
    """What the view shows, gathered from decisions."""

    job: str
    num_steps: int | None
    batch_size: int
    start_s: float = field(default_factory=time.time)
    phase: str = "starting"
    shape: str = "-"
    workers: dict[str, str] = field(default_factory=dict)
    version: int = 0
    loss: float | None = None
    decided_s: deque[float] = field(default_factory=lambda: deque(maxlen=SPEED_WINDOW + 1))
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT))
    _losses: dict[int, list[MicroBatchLoss]] = field(default_factory=dict)

    def take(self, observed: Observed) -> str | None:
        """Take in one decision; returns a line worth telling, or None."""
        state, reason = observed.decision.state, observed.decision.reason
        if isinstance(observed.event, WorkerAnswered) and isinstance(observed.event.answer, Prepared):
            answer = observed.event.answer
            self._losses.setdefault(answer.step, []).extend(answer.losses)
        if state.version > self.version:
            self.decided_s.append(observed.time_s)
            self.loss = mean_loss(self._losses.pop(state.version - 1, []))
            self._losses = {step: losses for step, losses in self._losses.items() if step >= state.version}
        elif state.version < self.version:
            self._losses.clear()
        self.version, self.phase = state.version, state.phase.value
        self.shape = state.plan.shape if state.plan and state.slots else "-"
        slots = {slot.worker: f"stage {slot.stage}, replica {slot.replica}" for slot in state.slots}
        self.workers = {
            name: slots.get(name, "spare") if worker.ready else "warming up" for name, worker in state.workers.items()
        }
        if reason.code not in _TOLD:
            return None
        line = f"{observed.time_s - self.start_s:7.1f} s  {reason.sentence}"
        self.recent.append(line)
        return line

    @property
    def examples_per_s(self) -> float | None:
        """Speed over the last decided steps."""
        if len(self.decided_s) < 2:
            return None
        return (len(self.decided_s) - 1) * self.batch_size / max(1e-9, self.decided_s[-1] - self.decided_s[0])

    @property
    def headline(self) -> str:
        """One line: shape, step, speed, loss."""
        speed = f"{self.examples_per_s:.1f} examples/s" if self.examples_per_s else "-"
        loss = f"loss {self.loss:.4f}" if self.loss is not None else "loss -"
        step = f"step {self.version}" + (f"/{self.num_steps}" if self.num_steps else "")
        return f"{self.phase}  {self.shape}  {step}  {speed}  {loss}"


@contextmanager
def run_view(
    job: str, num_steps: int | None, batch_size: int, *, plain: bool, as_json: bool = False
) -> Iterator[Observer]:
    """Show a run while the block runs; yields the driver's observer. ``num_steps``: None when open-ended."""
    state = LiveState(job, num_steps, batch_size)
    if as_json:
        yield _json_observer(state)
        return
    if plain or not sys.stdout.isatty():
        yield _plain_observer(state)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(_panel(state), console=Console(), refresh_per_second=4, transient=True) as live:

        def observe(observed: Observed) -> None:
            state.take(observed)
            live.update(_panel(state))

        yield observe


def _plain_observer(state: LiveState) -> Observer:
    told_s = time.time()

    def observe(observed: Observed) -> None:
        nonlocal told_s
        line = state.take(observed)
        if line is not None:
            print(line, flush=True)
        if observed.time_s - told_s >= PLAIN_EVERY_S:
            told_s = observed.time_s
            print(f"{observed.time_s - state.start_s:7.1f} s  {state.headline}", flush=True)

    return observe


def _json_observer(state: LiveState) -> Observer:
    """One JSON object a line: everything worth telling, and every decided step."""

    def observe(observed: Observed) -> None:
        before = state.version
        told = state.take(observed) is not None
        if not told and state.version == before:
            return
        reason = observed.decision.reason
        line = {
            "time_s": observed.time_s,
            "code": reason.code.value,
            "sentence": reason.sentence,
            "phase": state.phase,
            "shape": None if state.shape == "-" else state.shape,
            "generation": observed.decision.state.generation,
            "version": state.version,
            "num_nodes": len(state.workers),
            "loss": state.loss,
            "examples_per_s": state.examples_per_s,
        }
        print(json.dumps(line), flush=True)

    return observe


def _panel(state: LiveState) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, role in state.workers.items():
        table.add_row(name, Text(role, style="yellow" if role in ("spare", "warming up") else "green"))
    events = Text("\n".join(state.recent), style="dim", no_wrap=True, overflow="ellipsis")
    bar = ProgressBar(total=state.num_steps, completed=state.version) if state.num_steps else Text("")
    elapsed_s = time.time() - state.start_s
    return Panel(
        Group(Text(state.headline, style="bold"), bar, table, events), title=f"morph run {state.job}, {elapsed_s:.0f} s"
    )

"""What a manager that takes over sends to the controller and the trace's player, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from manager.controller.decide import decide
from manager.controller.state.events import Event, ManagerResumed, NodeAppeared, WorkerAnswered, WorkerLost
from manager.controller.state.state import ControllerState, initial_state
from manager.engine.machines.attachment import Attachment, OrphanedRun
from manager.journal.records import TOOK_OVER, Fact, TraceMoment
from manager.run.session import take_over
from morph.contract.messages import WorkerReady
from tests.engine.driver_scene import config_of


def state_with(ready: Collection[str], warming: Collection[str]) -> ControllerState:
    events: list[Event] = [NodeAppeared(node=node) for node in (*ready, *warming)]
    events += [WorkerAnswered(worker=node, answer=WorkerReady(worker=node, pid=1, setup_s=0)) for node in ready]
    state = initial_state(config_of(9))
    for event in events:
        state = decide(state, event, 1.0).state
    return state


@dataclass
class Seen:
    """Stands in for machines, pool, player and driver, and records calls."""

    lines: list[Any] = field(default_factory=list)
    provided: None = None

    @property
    def pool(self) -> Seen:
        return self

    def attach(self, set_up: Collection[str]) -> tuple[str, ...]:
        self.lines.append(("attach", tuple(set_up)))
        return ("a", "d", "given up", "new")

    def up(self) -> tuple[str, ...]:
        return ("a", "d", "new")

    def tell(self, *events: Event) -> None:
        self.lines += events

    def resume(self, up: Collection[str], appeared: Collection[str], asked: Mapping[str, str]) -> None:
        assert not asked  # these VMs were not requested
        self.lines.append(("resume", tuple(up), set(appeared)))


def test_vms_are_known_before_the_controller_decides_and_it_learns_which_live() -> None:
    seen = Seen()
    found = OrphanedRun(
        attachment=Attachment(kind="ray", control_socket=Path("control_socket"), store_host="h", store_port=1),
        line=SimpleNamespace(),  # type: ignore[arg-type]
        greeting={"vms": {"a": [1], "d": [2], "new": [3]}},
        state=state_with(ready=["a", "b"], warming=["c", "d"]),
        appeared=frozenset({"a", "b", "c", "d", "given up"}),
        moment=TraceMoment(),
    )
    take_over(found, seen, seen, seen)  # type: ignore[arg-type]
    attached, vms, fact, lost, resumed = seen.lines
    assert fact == Fact(name=TOOK_OVER)
    assert attached == ("attach", ("a", "b"))
    assert isinstance(lost, WorkerLost)
    assert lost.worker == "c"  # a warmed up on a VM that is gone; the controller finds out about b by itself
    assert resumed == ManagerResumed(living=("a", "d", "given up"))
    assert vms == ("resume", ("a", "d", "new"), {"a", "b", "c", "d", "given up"})

"""A manager without workers: controller, the thread that calls a provider, a cloud's SDK, and notice server.

Everything but the VMs is real: HTTP to the fake resource manager, or boto3 on moto, and sockets to the agents. A
granted VM appears at once, and its worker is ready at once. The run waits for more VMs than it will ever get, so that
it never trains. For the controller and its waits, time runs ``scale`` times as fast.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from manager.controller.decide import decide
from manager.controller.state.actions import ReleaseNodes, RequestNodes, StartWorker
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import Event, NodeAppeared, NodesGranted, Tick, WorkerAnswered, WorkerLost
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, initial_state
from manager.engine.joining.notice_server import NoticeServer
from manager.engine.loop.event_queue import EventQueue
from manager.engine.vms.budget import Spending
from manager.engine.vms.provisioning import Provisioner
from manager.journal.records import Fact
from manager.providers.interface.provider import Provider, end_all
from morph.contract.cluster import Limits, Policy
from morph.contract.messages import WorkerReady
from morph.contract.rules import RequestRules, Rules
from simulator import plan_table, synthetic_profile
from tests.providers.azure_world import NODE_SECRET, Line, provider
from tests.providers.fake_arm import FakeArm
from tests.waiting import PATIENCE

BOUND_S = 60.0 * PATIENCE

KEEP = 2
Case = Callable[[Any, Path], list[str]]


class Cases(dict[str, Case]):
    """Cases by the name of their fault; a call with a name is a decorator that adds a function as this case."""

    def __call__(self, name: str) -> Callable[[Case], Case]:
        return lambda function: self.setdefault(name, function)


QUIET = re.compile(
    r"nothing is due|.* is ready|\d+ workers? (is ready|are ready|could start).*|waiting a while for \d+ more"
    r"|.* its worker is started"
)


def config(**requests: float) -> ControllerConfig:
    """Return the configuration of a run that keeps ``KEEP`` VMs and never begins to train."""
    profile = synthetic_profile(num_sections=2, batch_size=8, micro_batch_size=2)
    # time runs so fast that, on a busy machine, each answer would come after its time-out and each notice would be void
    rules = Rules(requests=RequestRules(**{"answer_s": 600.0, "notice_grace_s": 1e5, **requests}))
    return ControllerConfig(
        job="tiny",
        fingerprint=profile.job.fingerprint,
        plans=plan_table(profile, KEEP),
        units={"u": (0, 1)},
        unit_bytes={"u": 1},
        num_steps=100,
        policy=Policy(start_patience_s=1e7, order_timeout_s=1e7, rules=rules),
        expected_nodes=1000,
        target_nodes=KEEP,
    )


class Dying(Line):
    """The manager's connection to Azure, which dies with the manager once its first request for a VM was carried out.

    ``over``: set when the thread that waits for an answer, which never comes, may end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dead, self.over = threading.Event(), threading.Event()  # type: ignore[assignment]

    def on_request(self, request: Any) -> None:
        request.context.options.setdefault("enforce_https", False)
        self._stand()

    def on_response(self, request: Any, response: Any) -> None:
        if request.http_request.method == "PUT" and "/virtualMachines/" in request.http_request.url:
            self.dead.set()
        self._stand()

    def _stand(self) -> None:
        if self.dead.is_set():
            self.over.wait(BOUND_S)
            raise RuntimeError("the manager is gone")  # not an error of Azure, so nothing is retried


@dataclass
class World:
    """One manager.

    ``never_join``: VMs that are granted and do not come up. ``look_every_s``: by the real clock. ``arm``: the stand-in
    for a cloud, of which ``open_provider`` makes a provider; by default Azure's.
    """

    arm: Any
    directory: Path
    state: ControllerState = field(default_factory=lambda: initial_state(config()))
    limits: Limits = field(default_factory=Limits)
    scale: float = 20.0
    port: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    never_join: set[str] = field(default_factory=set)
    look_every_s: float | None = None
    open_provider: Callable[..., Provider] = provider
    told: list[str] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begin_s, self._skipped_s = time.monotonic(), 0.0
        self._skipping = threading.Lock()
        self.wake_at_s: float | None = None
        self.over = threading.Event()
        self.waited_s: list[float] = []  # only at the end, where nothing but waiting lets time pass
        self.event_queue = EventQueue()
        self.provider = self.open_provider(self.arm, self.directory, **self.options)
        self.shell = Provisioner(
            self.provider,
            self.event_queue,
            Spending(self.limits, self.now_s),
            self.pause,
            look_every_s=self.look_every_s,
            end_all=partial(end_all, pause=self.waited_s.append, clock=lambda: sum(self.waited_s)),
        )
        self.server = NoticeServer(self.event_queue, NODE_SECRET, port=self.port)

    def now_s(self) -> float:
        return 1e6 + (time.monotonic() - self._begin_s) * self.scale + self._skipped_s

    def skip(self, passed_s: float) -> None:
        """Advance the controller's clock by this many seconds."""
        with self._skipping:
            self._skipped_s += passed_s

    def pause(self, wait_s: float) -> bool:
        """Let a wait of the requesting thread pass at once; return whether the run is over."""
        self.skip(wait_s)
        return self.over.is_set()

    def tell(self, event: Event) -> None:
        """Give the controller an event, and carry out its actions."""
        decision = decide(self.state, event, self.now_s())
        self.state, self.wake_at_s = decision.state, decision.wake_at_s
        self.told += [part for part in decision.reason.sentence.split("; ") if not QUIET.fullmatch(part)]
        self.shell.know(decision.state.workers)
        for action in decision.actions:
            if isinstance(action, RequestNodes):
                self.shell.request(action)
            elif isinstance(action, ReleaseNodes):
                self.shell.release(action)
            elif isinstance(action, StartWorker):
                ready = WorkerReady(worker=action.worker, pid=1, setup_s=1.0)
                self.tell(WorkerAnswered(worker=action.worker, answer=ready))
        if isinstance(event, NodesGranted):
            self.chosen += [event.detail] if event.detail else []
            for node in event.nodes:
                if node not in self.never_join:
                    self.tell(NodeAppeared(node=node, request=event.request))

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Continue until a condition holds; after ``BOUND_S``, fail with everything that was reported."""
        until_s = time.monotonic() + BOUND_S
        while not holds():
            assert time.monotonic() < until_s, f"waited {BOUND_S:g} s for {what}: {self.told}"
            stamped = self.event_queue.get(0.01)
            if stamped is not None and isinstance(stamped.item, Fact):
                self._hear(stamped.item)
            elif stamped is not None:
                self.tell(stamped.item)
            elif self.wake_at_s is not None and self.now_s() >= self.wake_at_s:
                self.tell(Tick())

    def _hear(self, fact: Fact) -> None:
        if fact.name != "vm_granted":
            self.told.append(f"{fact.name.replace('_', ' ')}: {re.sub(r': $', ': over', fact.detail)}")

    def begin(self) -> None:
        """Adopt the VMs that the controller knows, and request the first ones."""
        requests = self.state.provisioning.requests
        booting = {node for request in requests.values() for node in request.granted}
        self.shell.begin({*self.state.workers, *booting}, [name for name, request in requests.items() if request.count])
        self.tell(Tick())

    def lose(self, node: str, cause: str = "its connection closed") -> None:
        self.tell(WorkerLost(worker=node, cause=cause))

    def ready(self) -> list[str]:
        return sorted(name for name, entry in self.state.workers.items() if entry.node is NodeState.READY)

    def until_whole(self, *, without: str = "") -> None:
        """Continue until all VMs that the run keeps are up."""
        self.until(lambda: len(self.ready()) == KEEP and without not in self.ready(), f"{KEEP} VMs")
        assert set(self.ready()) <= {vm.name for vm in self.provider.list()}

    def has(self, part: str) -> bool:
        return any(part in sentence for sentence in self.told)

    def die(self) -> None:
        """End the manager's process, and no VM."""
        self.over.set()
        self.server.close()

    def end(self) -> None:
        self.die()
        self.shell.close()
        while (stamped := self.event_queue.get(0.0)) is not None:
            if isinstance(stamped.item, Fact):
                self._hear(stamped.item)

    def close(self) -> None:
        """End the run unless it has ended, and remove everything that it has on the cloud."""
        if not self.over.is_set():
            self.end()
            self.provider.dismantle()


@contextmanager
def world(arm: FakeArm, directory: Path, **options: Any) -> Iterator[World]:
    """Open a manager; at the end of the block it has nothing left on the cloud."""
    opened = World(arm, directory, **options)
    try:
        yield opened
    finally:
        opened.close()
    assert arm.machines == {}, "VMs are left"
    assert arm.sets == {}, "the scale set is left"


@contextmanager
def whole(arm: FakeArm, directory: Path, **options: Any) -> Iterator[World]:
    with world(arm, directory, **options) as run:
        run.begin()
        run.until_whole()
        yield run

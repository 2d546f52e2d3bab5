"""Where every node-second of a run went. Integer nanoseconds inside, so that the parts add up to the whole exactly."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import Field

from manager.controller.actions import EndWorker, Finish, ReleaseNodes
from manager.controller.events import (
    Event,
    ManagerResumed,
    ManifestWritten,
    NodeAppeared,
    NodesGranted,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.reasons import ReasonCode
from manager.controller.state import Phase
from manager.journal.records import DecisionRecord
from morph.contract.base import Value
from morph.contract.messages import Prepared, WorkerId, WorkerReady

NS_PER_S = 1_000_000_000


class Part(StrEnum):
    """What a node's time is spent on, from its grant (its appearance, where none is asked for) until it is gone.

    ``COMPUTE``: forward, recompute and backward of steps that count. ``BUBBLE``: the rest of those steps: waiting for
    messages, reducing, the manager's round. ``LOST``: steps that were given up or whose result was lost, and attempts
    that overflowed. ``MORPH``: forming another shape. ``CHECKPOINT``: the last commit and its files, for which training
    is over. ``WAITING``: ready while no shape is formed. ``WARMING``: booting, and until its worker is ready.
    ``SPARE``: ready and without a place.
    """

    COMPUTE = "compute"
    BUBBLE = "bubble"
    LOST = "lost"
    MORPH = "morph"
    CHECKPOINT = "checkpoint"
    WAITING = "waiting"
    WARMING = "warming"
    SPARE = "spare"


class Account(Value):
    """Node-seconds of a run, by part. ``total_ns`` is summed apart, over the nodes' lives."""

    parts_ns: dict[Part, int]
    total_ns: int = Field(ge=0)

    def part_s(self, part: Part) -> float:
        """Node-seconds of one part."""
        return self.parts_ns[part] / NS_PER_S

    def share(self, part: Part) -> float:
        """Share of the whole, 0 to 1; 0 when there is no whole yet."""
        return self.parts_ns[part] / self.total_ns if self.total_ns else 0.0

    @property
    def total_s(self) -> float:
        """All node-seconds."""
        return self.total_ns / NS_PER_S

    def dollars(self, usd_per_node_hour: float) -> float:
        """What all of it costs at a price per node and hour."""
        return self.total_s / 3600 * usd_per_node_hour


_OF_MEMBERS = {
    Phase.RESHAPING: Part.MORPH,
    Phase.ABORTING: Part.MORPH,
    Phase.COMMITTING: Part.CHECKPOINT,
    Phase.SEALING: Part.CHECKPOINT,
}
_UNFORMED = (Phase.STARTING, Phase.WAITING, Phase.HOLDING)


@dataclass
class Ledger:
    """Follows a journal's lines. Call ``advance`` with each line's time before what the line says is taken in.

    A clock that was set back stands until it has caught up.
    """

    now_ns: int = 0
    phase: Phase = Phase.STARTING
    members: frozenset[WorkerId] = frozenset()
    appeared_ns: dict[WorkerId, int] = field(default_factory=dict)
    warming: set[WorkerId] = field(default_factory=set)
    parts_ns: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))
    lives_ns: int = 0
    open_ns: int = 0
    settled_ns: dict[int, tuple[int, int]] = field(default_factory=dict)

    def account(self) -> Account:
        """Return what is booked so far; the step under way counts as bubble until it is decided."""
        parts_ns = {**self.parts_ns, Part.BUBBLE: self.parts_ns[Part.BUBBLE] + self.open_ns}
        living_ns = sum(self.now_ns - appeared_ns for appeared_ns in self.appeared_ns.values())
        return Account(parts_ns=parts_ns, total_ns=self.lives_ns + living_ns)

    def begin_session(self, time_s: float) -> None:
        """A manager begins with nodes of its own; those of an earlier one were gone when its journal ended."""
        self._give_up_step()
        self._gone(list(self.appeared_ns))
        self.now_ns = max(self.now_ns, _ns(time_s))
        self.phase, self.members = Phase.STARTING, frozenset()
        self.settled_ns.clear()

    def advance(self, time_s: float) -> None:
        """Book the time since the last line."""
        passed_ns = max(0, _ns(time_s) - self.now_ns)
        self.now_ns += passed_ns
        num_warming = len(self.warming)
        num_members = 0 if self.phase in _UNFORMED else len(self.members)
        num_idle = len(self.appeared_ns) - num_warming - num_members
        self.parts_ns[Part.WARMING] += passed_ns * num_warming
        self.parts_ns[Part.WAITING if self.phase in _UNFORMED else Part.SPARE] += passed_ns * num_idle
        if self.phase is Phase.TRAINING:
            self.open_ns += passed_ns * num_members
        elif num_members:
            self.parts_ns[_OF_MEMBERS[self.phase]] += passed_ns * num_members

    def take(self, event: Event, record: DecisionRecord, decided: Collection[Prepared] = ()) -> None:
        """Take in an event and what was decided; ``decided``: every member's answer, if that decided a step."""
        match event:
            case NodesGranted(nodes=nodes) if record.reason.code is ReasonCode.NODES_GRANTED:
                for node in nodes:  # from now on it is paid for
                    self._begin(node)
            case NodeAppeared(node=node):
                self._begin(node)
            case WorkerAnswered(answer=WorkerReady()):
                self.warming.discard(event.worker)
            case WorkerLost(worker=worker):
                self._gone([worker])
            case ManagerResumed(living=living):  # of the others that warm up it is told apart
                self._gone([node for node in self.appeared_ns if node not in self.warming and node not in living])
            case ManifestWritten(version=version):
                for step in [step for step in self.settled_ns if step < version]:
                    del self.settled_ns[step]  # it can be lost no more
        self._gone([action.worker for action in record.actions if isinstance(action, EndWorker)])
        self._gone([node for action in record.actions if isinstance(action, ReleaseNodes) for node in action.nodes])
        if decided:
            self._settle(decided)
        if record.reshape is not None:
            self.members = frozenset(slot.worker for slot in record.reshape.slots) & set(self.appeared_ns)
        if record.reason.code is ReasonCode.OVERFLOW_RETRY or record.phase is not Phase.TRAINING:
            self._give_up_step()
        self._set_back(record.version)
        self.phase = record.phase
        if any(isinstance(action, Finish) for action in record.actions):
            self._gone(list(self.appeared_ns))

    def _begin(self, node: WorkerId) -> None:
        if node not in self.appeared_ns:
            self.appeared_ns[node] = self.now_ns
            self.warming.add(node)

    def _gone(self, nodes: Collection[WorkerId]) -> None:
        """Nodes are gone, or were given up."""
        for node in nodes:
            appeared_ns = self.appeared_ns.pop(node, None)
            if appeared_ns is not None:
                self.lives_ns += self.now_ns - appeared_ns
        self.warming.difference_update(nodes)
        self.members = self.members.difference(nodes)

    def _settle(self, answers: Collection[Prepared]) -> None:
        """A step is decided: its time was computing, as its members say, and bubble."""
        longest_ns = self.open_ns // max(1, len(self.members))
        compute_ns = min(self.open_ns, sum(min(longest_ns, _compute_ns(answer)) for answer in answers))
        bubble_ns = self.open_ns - compute_ns
        self.parts_ns[Part.COMPUTE] += compute_ns
        self.parts_ns[Part.BUBBLE] += bubble_ns
        self.settled_ns[next(iter(answers)).step] = (compute_ns, bubble_ns)
        self.open_ns = 0

    def _set_back(self, version: int) -> None:
        """Steps from ``version`` on are lost."""
        for step in [step for step in self.settled_ns if step >= version]:
            compute_ns, bubble_ns = self.settled_ns.pop(step)
            self.parts_ns[Part.COMPUTE] -= compute_ns
            self.parts_ns[Part.BUBBLE] -= bubble_ns
            self.parts_ns[Part.LOST] += compute_ns + bubble_ns

    def _give_up_step(self) -> None:
        self.parts_ns[Part.LOST] += self.open_ns
        self.open_ns = 0


def _compute_ns(answer: Prepared) -> int:
    return _ns(answer.times.forward_s + answer.times.recompute_s + answer.times.backward_s)


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)

"""What simulated workers send ahead: each stream keeps the version of what its receiver has of every unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from simulated_worker import SimulatedWorker
from simulated_world import World

from manager.controller.state.actions import SendPreCopy
from manager.controller.state.events import Event, PreCopyReported
from morph.contract.messages import PreCopyOrder, PreCopyReport, ReshapeOrder

Key = tuple[int, str, str]


@dataclass
class Stream:
    """From one sender to one receiver: ``versions`` is what the receiver has, or will have, of each unit."""

    units: tuple[str, ...]
    versions: dict[str, int] = field(default_factory=dict)
    follows: bool = False
    broken: bool = False
    left: bool = False
    """everything is with the receiver, and the sender is through with it"""


class SimulatedPreCopy:
    """Every stream of a history."""

    def __init__(self, world: World, tell: Callable[[Event], None], workers: dict[str, SimulatedWorker]) -> None:
        self.world, self.tell, self.workers = world, tell, workers
        self.streams: dict[Key, Stream] = {}
        self.num_taken = self.num_given_up = 0

    def order(self, action: SendPreCopy) -> None:
        """An order is on its way, on the control lane."""
        if not self.world.chance(self.world.faults.lost_message):
            self.world.at(self.world.lag_s(), lambda: self.receive(action.worker, action.order))
        if self.world.chance(self.world.faults.doubled):
            self.world.at(self.world.between(0.0, 3), lambda: self.receive(action.worker, action.order))

    def receive(self, name: str, order: PreCopyOrder) -> None:
        """A worker gets an order: it drops what an older one said."""
        worker = self.workers[name]
        if not worker.alive or order.number < worker.ahead_number:
            return
        if order.number == worker.ahead_number:
            self.report(name, order.number)
            return
        self.end(name)
        worker.ahead_number = order.number
        for move in order.moves:
            if name == move.sender:
                key = order.number, name, move.receiver
                if key not in self.streams:
                    mine = tuple(entry.unit for entry in order.moves if entry.receiver == move.receiver)
                    self.streams[key] = Stream(mine)

    def begin_step(self, name: str, version: int) -> None:
        """A step begins: a sender copies further units, and all of them arrive after a while, or never."""
        for key, stream in self.of(name, sending=True):
            if stream.broken or len(stream.versions) == len(stream.units):
                continue
            for unit in stream.units:
                if unit in stream.versions:
                    continue
                if self.workers[name].units.get(unit) != version:
                    raise self.world.broken(f"{name} is to send {unit} ahead at {version}, it has another version")
                stream.versions[unit] = version
                if self.world.random.random() < 0.3:
                    break  # the others at a later step
            if len(stream.versions) == len(stream.units):
                self.world.at(self.world.between(0.05, 1.5), lambda key=key: self.arrive(key))

    def arrive(self, key: Key) -> None:
        """Everything of a stream has arrived, if its receiver expects it; or the stream breaks."""
        number, sender, receiver = key
        stream = self.streams[key]
        if self.world.chance(self.world.faults.broken_stream):
            self.give_up(key)
        expected = self.workers[receiver].ahead_number == number and self.workers[sender].ahead_number == number
        if not stream.broken and expected:
            stream.follows = True
            self.report(receiver, number)

    def report(self, name: str, number: int) -> None:
        """Tell how far it is: now and then the news comes twice, late or never."""
        if not self.workers[name].alive:
            return
        streams = [stream for key, stream in self.of(name, sending=False) if key[0] == number]
        whole = [stream for stream in streams if stream.follows and not stream.broken]
        error = "a stream broke off" if any(stream.broken for stream in streams) else None
        report = PreCopyReport(number=number, following=tuple(u for s in whole for u in s.units), error=error)
        event = PreCopyReported(worker=name, report=report)
        if not self.world.chance(self.world.faults.lost_message):
            self.world.at(self.world.lag_s(), lambda: self.tell(event))
        if self.world.chance(self.world.faults.doubled):
            self.world.at(self.world.between(0.0, 3), lambda: self.tell(event))

    def apply(self, name: str, version: int) -> None:
        """A sender applies step ``version``: what follows it does too."""
        for _, stream in self.of(name, sending=True):
            for unit, held in stream.versions.items():
                if not stream.broken:
                    if held != version:
                        raise self.world.broken(f"{unit}, sent ahead by {name}, is at {held}, not {version}")
                    stream.versions[unit] = version + 1

    def keep(self, name: str, order: ReshapeOrder) -> None:
        """A reshape begins: what it does not use is dropped."""
        used = {(order.ahead, entry.peer, entry.worker) for entry in order.sources if entry.kind == "ahead"}
        for key, stream in self.of(name, sending=True) + self.of(name, sending=False):
            if key not in used:
                stream.broken = True

    def is_broken(self, name: str, order: ReshapeOrder) -> bool:
        """Whether a worker waits in vain for what was sent ahead, or for it to arrive."""
        keys = {
            (order.ahead, entry.peer, entry.worker)
            for entry in order.sources
            if entry.kind == "ahead" and name in (entry.worker, entry.peer)
        }
        return any(key not in self.streams or self.streams[key].broken for key in keys)

    def take(self, name: str, peer: str, unit: str, order: ReshapeOrder) -> bool:
        """Take a unit that was sent ahead; whether it is what the order says."""
        assert order.ahead is not None, "sent ahead, and no number"
        stream = self.streams[order.ahead, peer, name]
        self.num_taken += 1
        return not stream.broken and stream.follows and stream.versions.get(unit) == order.version

    def change_over(self, name: str, *, went_well: bool) -> None:
        """A worker answers its reshape: what it sent has left, unless it gave up; what it expected it took."""
        for _, stream in self.of(name, sending=True):
            stream.left |= went_well
        if not went_well:
            self.end(name)

    def end(self, name: str) -> None:
        """A worker drops what it sends and expects, or dies: who is at the other end sees it."""
        for key, stream in self.of(name, sending=True) + self.of(name, sending=False):
            if not (stream.broken or stream.left):
                self.give_up(key)

    def give_up(self, key: Key) -> None:
        """A stream breaks."""
        self.num_given_up += 1
        self.streams[key].broken = True
        number, _, receiver = key
        if self.workers[receiver].ahead_number == number:
            self.world.at(self.world.between(0.01, 1), lambda: self.report(receiver, number))

    def of(self, name: str, *, sending: bool) -> list[tuple[Key, Stream]]:
        """The streams that a worker sends, or receives, and is not through with."""
        end = 1 if sending else 2
        return [(key, stream) for key, stream in self.streams.items() if key[end] == name and not stream.left]

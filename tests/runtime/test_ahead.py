"""Pre-copied units over real connections between threads: the receiver's are the sender's, bit for bit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from morph.checkpoint.unit_files import to_payload
from morph.contract.decided import Decided, LossScale
from morph.contract.errors import GenerationAborted, PeerLost
from morph.contract.messages import PreCopyMove, PreCopyOrder, ReshapeOrder, Slot, StateSource, StepOrder
from morph.cutting.sections.section import ParameterUnit
from morph.runtime.attendants import outgoing
from morph.runtime.attendants.pre_copies import PreCopyLane
from morph.runtime.attendants.wire import Frame, Rendezvous, StreamContext, send_frame
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.unit_state import MakeOptimizer, UnitState, UpdateRules
from tests.manager.simulated_job import make_plan
from tests.waiting import BOUND_S, poll_until

UNITS = {
    "s0": ParameterUnit("s0", (0,), ("in.weight", "in.bias")),
    "s1": ParameterUnit("s1", (1,), ("mid.weight",)),
    "s0+s5": ParameterUnit("s0+s5", (0, 5), ("tied",)),
}
NUM_MICRO_BATCHES = 4
MOST_BEHIND = 2
SECRET = "of the run"


class FakeStore:
    """A rendezvous store within one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._condition = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._condition:
            self._values[key] = value.encode()
            self._condition.notify_all()

    def get(self, key: str) -> bytes:
        with self._condition:
            if not self._condition.wait_for(lambda: key in self._values, BOUND_S):
                raise RuntimeError(f"nobody set {key}")
            return self._values[key]


def adam(parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=0.01)


def momentum(parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


class FakeWorkload:
    """Makes units; an emulated link may hold back what arrives."""

    def __init__(self, optimizer: MakeOptimizer, rules: UpdateRules, *, exact: bool) -> None:
        self._make: Callable[..., UnitState] = lambda unit, parameters: UnitState(
            unit, parameters, optimizer, num_micro_batches=NUM_MICRO_BATCHES, exact=exact, rules=rules
        )
        self.open = threading.Event()
        self.open.set()

    def make_unit_copy(self, unit: str, num_micro_batches: int) -> UnitState:
        assert num_micro_batches == NUM_MICRO_BATCHES
        return self._make(UNITS[unit], {name: torch.zeros(64, 3) for name in UNITS[unit].parameters})

    def trained(self, unit: str, seed: int) -> UnitState:
        draw = torch.Generator().manual_seed(seed)
        return self._make(UNITS[unit], {n: torch.randn(64, 3, generator=draw) for n in UNITS[unit].parameters})

    def arrive(self, num_bytes: int) -> None:
        assert num_bytes >= 0
        self.open.wait(BOUND_S)

    def adopt(self, unit_copy: UnitState) -> UnitState:
        return unit_copy


class Party:
    """One worker's lane, with units that it trains."""

    def __init__(self, name: str, store: FakeStore, workload: FakeWorkload, *units: str) -> None:
        self.name, self.workload = name, workload
        self.news = threading.Event()
        fakes: Any = {"open_store": lambda: nullcontext(store), "faults": FaultPlan(())}
        context = StreamContext(worker=name, secret=SECRET, listen_host="127.0.0.1", **fakes)
        self.lane = PreCopyLane(context, workload, self.news.set)  # type: ignore[arg-type]
        self.units = {unit: workload.trained(unit, index) for index, unit in enumerate(units)}

    def begin_step(self) -> None:
        current: Any = None
        self.lane.at_version(current, StepOrder(generation=1, step=0), self.units)

    def flush(self, interrupt: Interrupt) -> None:
        self.lane.after_reshape(reshape_of(0, None), {}, interrupt)

    def decide(self, step: int, decided: Decided | None = None, attempts: int = 1) -> None:
        """Run a step on made-up gradients, repeat it as often as it overflows, and apply it."""
        for attempt in range(attempts):
            for unit, state in self.units.items():
                if attempt:
                    assert state.reduced is not None
                    state.rescale(state.reduced)
                state.reduced = reduced_of(state, step, unit)
        self.lane.before_apply(self.units, decided)
        for state in self.units.values():
            state.apply(decided)

    def following(self) -> tuple[str, ...]:
        report = self.lane.report()
        return report.following if report else ()


def reduced_of(state: UnitState, step: int, unit: str) -> Any:
    draw = torch.Generator().manual_seed(100 * step + list(UNITS).index(unit))
    accumulator = state.new_accumulator()
    for _ in range(NUM_MICRO_BATCHES * len(UNITS[unit].sections)):
        for name, parameter in state.parameters.items():
            accumulator.add(name, torch.randn(parameter.shape, generator=draw))
    return accumulator.finish(NUM_MICRO_BATCHES, step)


def moves(sender: str, receiver: str, *units: str) -> tuple[PreCopyMove, ...]:
    return tuple(PreCopyMove(unit=unit, sender=sender, receiver=receiver) for unit in units)


def order_of(number: int, *entries: PreCopyMove) -> PreCopyOrder:
    return PreCopyOrder(number=number, num_micro_batches=NUM_MICRO_BATCHES, moves=entries)


def reshape_of(version: int, number: int | None, *sources: StateSource) -> ReshapeOrder:
    slots = (Slot(worker="a", stage=0, replica=0),)
    return ReshapeOrder(generation=2, version=version, plan=make_plan(1, 1), slots=slots, sources=sources, ahead=number)


def ahead(receiver: str, unit: str, sender: str) -> StateSource:
    return StateSource(worker=receiver, unit=unit, kind="ahead", peer=sender)


def train_until_all_follow(
    sender: Party, receiver: Party, *units: str, decide: Callable[[int], None] | None = None
) -> int:
    """Train the sender until the receiver follows; never let the stream fall so far behind that it is given up."""
    deadline_s, step = time.monotonic() + BOUND_S, next(iter(sender.units.values())).version
    while set(receiver.following()) != set(units):
        assert time.monotonic() < deadline_s, "the receiver does not follow"
        sender.begin_step()
        receiver.news.wait(0.05)
        poll_until(lambda: all(each._unsent_updates <= MOST_BEHIND for each in sender.lane._outgoing), "updates to go")
        (decide or sender.decide)(step)
        step += 1
    return step


def bits(tensors: dict[str, Tensor]) -> bytes:
    return to_payload(tensors)


@pytest.fixture
def parties() -> Iterator[Callable[..., tuple[Party, Party]]]:
    made: list[Party] = []

    def make(optimizer: MakeOptimizer = adam, rules: UpdateRules = UpdateRules(), *, exact: bool = True) -> Any:  # noqa: B008
        store, workload = FakeStore(), FakeWorkload(optimizer, rules, exact=exact)
        made.extend([Party("a", store, workload, *UNITS), Party("b", store, workload)])
        return made[-2], made[-1]

    yield make
    for party in made:
        party.lane.end_reshape()


def hand_over(sender: Party, receiver: Party, version: int, number: int = 1) -> dict[str, UnitState]:
    """Change the shape at this version: the sender applies its last prepared step, and the receiver takes its units."""
    order = reshape_of(version, number, *(ahead("b", unit, "a") for unit in UNITS))
    interrupt = Interrupt(2)
    for party in (sender, receiver):
        party.lane.before_reshape(order)
    sender.decide(version - 1)
    units = {unit: receiver.lane.adopt(unit, version, interrupt) for unit in UNITS}
    sender.flush(interrupt)
    return units


RULES = {
    "plain": UpdateRules(),
    "clipping": UpdateRules(clip_grad_norm=0.5),
    "schedule": UpdateRules(make_scheduler=halving),
    "loss scale": UpdateRules(loss_scale=LossScale(exponent=8, growth_steps=2)),
}


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("optimizer", [adam, momentum])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_followed_units_equal_the_senders_at_every_later_version(
    parties: Callable[..., tuple[Party, Party]], optimizer: MakeOptimizer, rules: UpdateRules, exact: bool
) -> None:
    sender, receiver = parties(optimizer, rules, exact=exact)
    clips = rules.clip_grad_norm is not None
    order = order_of(1, *moves("a", "b", *UNITS))
    for party in (sender, receiver):
        party.lane.take(order)

    def decide(step: int, *, skipped: bool = False) -> None:
        norm = 3.0 + step if clips and not skipped else None
        sender.decide(step, Decided(version=step + 1, gradient_norm=norm, skipped=skipped))

    version = train_until_all_follow(sender, receiver, *UNITS, decide=decide)
    for step in range(version, version + 4):
        sender.begin_step()
        decide(step, skipped=rules.loss_scale is not None and step == version + 1)
    version += 4
    interrupt = Interrupt(2)
    for unit, state in sender.units.items():
        taken = receiver.lane.adopt(unit, version, interrupt)
        assert taken.version == state.version == version
        assert taken.exponents == state.exponents
        assert bits(taken.tensors()) == bits(state.tensors())
    for unit in UNITS:
        for state in (sender.units[unit], receiver.lane.adopt(unit, version, interrupt)):
            state.reduced = reduced_of(state, version, unit)
            state.apply(Decided(version=version + 1, gradient_norm=2.0 if clips else None))
        assert bits(receiver.lane.adopt(unit, version, interrupt).tensors()) == bits(sender.units[unit].tensors())


def test_scales_that_grew_in_a_skipped_step_arrive_too(
    parties: Callable[..., tuple[Party, Party]],
) -> None:
    """A skipped step changes no weight, but its attempts changed the scales of its sums."""
    sender, receiver = parties(adam, RULES["loss scale"])
    for party in (sender, receiver):
        party.lane.take(order_of(1, *moves("a", "b", *UNITS)))
    version = train_until_all_follow(sender, receiver, *UNITS)
    before = dict(sender.units["s0"].exponents)
    for state in sender.units.values():
        state.exponents = {name: exponent + 3 for name, exponent in state.exponents.items()}
    sender.decide(version, Decided(version=version + 1, skipped=True))
    taken = receiver.lane.adopt("s0", version + 1, Interrupt(2))
    assert taken.exponents == sender.units["s0"].exponents != before


def test_at_the_boundary_only_the_last_step_is_outstanding(parties: Callable[..., tuple[Party, Party]]) -> None:
    sender, receiver = parties()
    for party in (sender, receiver):
        party.lane.take(order_of(1, *moves("a", "b", *UNITS)))
    version = train_until_all_follow(sender, receiver, *UNITS)
    poll_until(lambda: receiver.lane.adopt("s1", version, Interrupt(1)).version == version, "the last update")
    incoming = receiver.lane._incoming
    before = incoming.received_bytes
    units = hand_over(sender, receiver, version + 1)
    assert {unit: bits(state.tensors()) for unit, state in units.items()} == {
        unit: bits(state.tensors()) for unit, state in sender.units.items()
    }
    whole = sum(len(bits(state.tensors())) for state in units.values())
    assert 0 < incoming.received_bytes - before < 0.5 * whole


def test_a_lost_sender_costs_the_receiver_only_the_units_it_sent(
    parties: Callable[..., tuple[Party, Party]],
) -> None:
    sender, receiver = parties()
    for party in (sender, receiver):
        party.lane.take(order_of(1, *moves("a", "b", *UNITS)))
    version = train_until_all_follow(sender, receiver, *UNITS)
    sender.lane.end_reshape()
    poll_until(lambda: (report := receiver.lane.report()) is not None and report.error is not None, "the news")
    with pytest.raises(PeerLost, match=r"a hung up|the sender hung up within a frame"):
        receiver.lane.adopt("s0", version + 1, Interrupt(2))


def test_a_receiver_that_goes_does_not_disturb_the_training_of_its_sender(
    parties: Callable[..., tuple[Party, Party]],
) -> None:
    sender, receiver = parties()
    for party in (sender, receiver):
        party.lane.take(order_of(1, *moves("a", "b", *UNITS)))
    version = train_until_all_follow(sender, receiver, *UNITS)
    receiver.lane.end_reshape()
    for step in range(version, version + 5):
        sender.begin_step()
        sender.decide(step)
    (stream,) = sender.lane._outgoing
    poll_until(lambda: stream.error is not None, "the sender to see it")
    with pytest.raises(PeerLost, match="broke off"):
        sender.flush(Interrupt(2))


def test_a_stream_that_cannot_keep_up_is_given_up_early(
    parties: Callable[..., tuple[Party, Party]],
) -> None:
    sender, receiver = parties()
    receiver.workload.open.clear()  # nothing that is under way arrives
    for party in (sender, receiver):
        party.lane.take(order_of(1, *moves("a", "b", "s0")))
    sender.begin_step()
    (stream,) = sender.lane._outgoing
    whole = stream._begun_bytes
    most, steps = 0, 0
    while stream.error is None and steps < 60:
        sender.decide(steps)
        most, steps = max(most, stream._unsent_bytes), steps + 1
    receiver.workload.open.set()
    assert stream.error is not None
    assert "cannot keep up" in stream.error
    update = sum(parameter.nbytes for parameter in sender.units["s0"].parameters.values())
    assert most <= 2 * whole + (outgoing.MOST_UPDATES_BEHIND + 1) * update
    assert steps > outgoing.MOST_UPDATES_BEHIND


def test_an_abort_ends_the_wait_for_what_was_sent_ahead(parties: Callable[..., tuple[Party, Party]]) -> None:
    sender, receiver = parties()
    for party in (sender, receiver):
        party.lane.take(order_of(1, *moves("a", "b", *UNITS)))
    version = train_until_all_follow(sender, receiver, *UNITS)
    interrupt = Interrupt(2)
    timer = threading.Timer(0.1, interrupt.abort)
    timer.start()
    with pytest.raises(GenerationAborted):
        receiver.lane.adopt("s0", version + 1, interrupt)
    timer.join()


def test_a_newer_order_replaces_an_older_one_and_a_late_one_is_ignored(
    parties: Callable[..., tuple[Party, Party]],
) -> None:
    sender, receiver = parties()
    for party in (sender, receiver):
        party.lane.take(order_of(1, *moves("a", "b", "s0")))
        party.lane.take(order_of(3, *moves("a", "b", "s1")))
        party.lane.take(order_of(2, *moves("a", "b", "s0+s5")))
    train_until_all_follow(sender, receiver, "s1")
    assert receiver.lane.report() is None  # it was reported already
    receiver.lane.take(order_of(3, *moves("a", "b", "s1")))
    assert receiver.following() == ("s1",)  # asked again, it reports again
    for party in (sender, receiver):
        party.lane.take(order_of(4))
        assert party.lane._incoming is None
        assert party.lane._outgoing == ()


def test_a_change_that_does_not_use_what_was_sent_drops_it(parties: Callable[..., tuple[Party, Party]]) -> None:
    sender, receiver = parties()
    for party in (sender, receiver):
        party.lane.take(order_of(1, *moves("a", "b", *UNITS)))
    version = train_until_all_follow(sender, receiver, *UNITS)
    for party in (sender, receiver):
        party.lane.before_reshape(reshape_of(version, None, StateSource(worker="b", unit="s0", kind="peer", peer="a")))
    sender.flush(Interrupt(2))  # there is nothing to wait for
    with pytest.raises(PeerLost, match="dropped"):
        receiver.lane.adopt("s0", version, Interrupt(2))


@pytest.mark.parametrize(
    ("guess", "more"),
    [
        ("guessed", {}),
        ("", {}),
        (SECRET, {"worker": "c"}),
        (SECRET, {"proof": "x" * 100_000}),
        (SECRET, {"proof": None}),
    ],
)
def test_a_stranger_without_the_secret_is_rejected(
    parties: Callable[..., tuple[Party, Party]], guess: str, more: dict[str, Any]
) -> None:
    sender, receiver = parties()
    receiver.lane.take(order_of(1, *moves("a", "b", "s0")))
    incoming = receiver.lane._incoming
    assert incoming is not None
    stranger = Rendezvous(1, "b", guess)
    with incoming._open_store() as store:
        told = store.get(stranger.key).decode()
    host, port, *_ = told.split(" ")
    with (
        socket.create_connection((host, int(port)), BOUND_S) as connection,
        pytest.raises((ConnectionError, OSError)),
    ):
        send_frame(connection, Frame({**stranger.hello(told, "a"), **more}, {}))
    if guess != SECRET:  # nor does a sender of another run send its units here
        with pytest.raises(ConnectionError, match="someone else"):
            stranger.address(told)
    sender.lane.take(order_of(1, *moves("a", "b", "s0")))
    train_until_all_follow(sender, receiver, "s0")


def test_the_end_of_a_stream_is_reported_at_once_at_both_ends(parties: Callable[..., tuple[Party, Party]]) -> None:
    sender, receiver = parties()
    order = order_of(1, *moves("a", "b", *UNITS))
    for party in (sender, receiver):
        party.lane.take(order)
    version = train_until_all_follow(sender, receiver, *UNITS)
    (stream,) = sender.lane._outgoing
    stream._put(Frame({"kind": "update", "of": object()}, {}))  # not an error that a connection or the store raises
    interrupt = Interrupt(2, BOUND_S)
    with pytest.raises(PeerLost, match="broke off: TypeError"):
        sender.flush(interrupt)
    with pytest.raises(PeerLost, match="a hung up"):
        receiver.lane.adopt(next(iter(UNITS)), version + 1, interrupt)

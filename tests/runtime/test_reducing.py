"""Reductions of several workers in threads, over rings that complete an operation once every member has begun it."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from morph.contract.decided import LossScale
from morph.contract.errors import GenerationAborted
from morph.contract.plan import reduction_rounds
from morph.contract.salvage import Salvage
from morph.cutting.sections.section import ParameterUnit
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state import reduction as reducing
from morph.runtime.state.accumulators import Accumulator, ExactAccumulator, FastAccumulator, Reduced
from morph.runtime.state.fixed_point import first_exponent
from morph.runtime.state.reduction import Reduction
from morph.runtime.state.unit_state import UnitState
from morph.runtime.step.sums import Rings, StepSums
from tests.waiting import PATIENCE

WAIT_S = 100.0 * PATIENCE


@dataclass
class Operation:
    """One collective, with what each member gave."""

    kind: str
    size: int
    given: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    done: bool = False


class FakeRings:
    """The rings of all workers; an operation fails if its kind or size differs from the others' n-th operation."""

    def __init__(self, interrupts: dict[str, Interrupt]) -> None:
        self.interrupts = interrupts
        self.log: dict[str, list[str]] = {}
        self._operations: dict[str, list[Operation]] = {}
        self._lock = threading.Lock()

    def begin(self, ring: FakeRing, kind: str, into: Tensor, given: Tensor) -> Operation:
        number = len(ring.begun)
        ring.begun.append(kind)
        with self._lock:
            operations = self._operations.setdefault(ring.name, [])
            if number == len(operations):
                operations.append(Operation(kind, given.numel()))
            operation = operations[number]
            assert (operation.kind, operation.size) == (kind, given.numel()), f"{ring.name}: out of order"
            operation.given[ring.rank] = into, given
            if len(operation.given) == ring.size:
                _complete(operation)
        for interrupt in self.interrupts.values():
            interrupt.notify()
        return operation


def _complete(operation: Operation) -> None:
    members = [operation.given[rank] for rank in range(len(operation.given))]
    if operation.kind == "exchange":
        rows = torch.stack([given for _, given in members])  # (sender, receiver, elements)
        for rank, (into, _) in enumerate(members):
            into.copy_(rows[:, rank])
    elif operation.kind == "gather":
        whole = torch.cat([given for _, given in members])
        for into, _ in members:
            into.copy_(whole)
    else:
        most = functools.reduce(torch.fmax, [given for _, given in members])  # as gloo may do: NaN is lost
        for into, _ in members:
            into.copy_(most)
    operation.done = True


@dataclass
class FakePending:
    operation: Operation
    interrupt: Interrupt

    def wait(self, what: str) -> float:
        return self.interrupt.wait_for(lambda: self.operation.done, what, WAIT_S)


class FakeRing:
    """A ring like ``morph.runtime.groups.channels.Ring``."""

    def __init__(self, rings: FakeRings, name: str, members: tuple[str, ...], me: str) -> None:
        self.name, self.size, self.rank = name, len(members), members.index(me)
        self.begun: list[str] = []
        self._rings, self._interrupt = rings, rings.interrupts[me]

    def exchange(self, received: Tensor, sent: Tensor) -> FakePending:
        return self._begin("exchange", received, sent)

    def gather(self, gathered: Tensor, own: Tensor) -> FakePending:
        return self._begin("gather", gathered, own)

    def reduce(self, tensor: Tensor, operation: Any) -> FakePending:
        return self._begin("reduce", tensor, tensor.clone())

    def _begin(self, kind: str, into: Tensor, given: Tensor) -> FakePending:
        return FakePending(self._rings.begin(self, kind, into, given), self._interrupt)


def in_threads(works: dict[str, Callable[[], None]]) -> None:
    """Run one function for each worker; raise the first failure."""
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


def made(kind: str, size: int, num: int) -> Accumulator:
    like = {"w": torch.zeros(size), "b": torch.zeros(3), "d": torch.zeros(2, dtype=torch.float64)}
    like |= {"c": torch.zeros(3, dtype=torch.complex64), "of one": torch.zeros(2), "of none": torch.zeros(2)}
    if kind == "fast":
        return FastAccumulator(like)
    return ExactAccumulator(like, dict.fromkeys(like, first_exponent(num)), num)


def merged(kind: str, size: int, num: int, reduced: Accumulator) -> Reduced:
    """Return what another worker restores from one worker's part of a step given up after its reduction."""
    assert reduced.is_reduced
    partial, other = reduced.partial(), made(kind, size, num)
    assert partial is not None
    other.merge(partial)
    return other.finish(num, 0)


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", [reducing.PIECE_BYTES, 200])
@pytest.mark.parametrize("kind", ["exact", "fast"])
@pytest.mark.parametrize(("num_members", "size"), [(2, 64), (3, 100), (5, 1), (70, 9)])
def test_every_member_gets_the_mean_of_all_and_can_hand_it_on(
    kind: str, num_members: int, size: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducing, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(reducing, "SHARE_BYTES", 16)
    names = tuple(f"w{index}" for index in range(num_members))
    interrupts = {name: Interrupt(1) for name in names}
    rings = FakeRings(interrupts)
    generator = torch.Generator().manual_seed(size)
    units = 3
    own = {name: [made(kind, size, num_members) for _ in range(units)] for name in names}
    alone = [made(kind, size, num_members) for _ in range(units)]
    types = {"w": torch.float32, "b": torch.float32, "d": torch.float64, "c": torch.complex64}
    for unit, name in itertools.product(range(units), names):
        for tensor, count in (("w", size), ("b", 3), ("d", 2), ("c", 3), *[("of one", 2)] * (name == names[-1])):
            gradient = torch.randn(count, generator=generator, dtype=types.get(tensor, torch.float32))
            own[name][unit].add(tensor, gradient)
            alone[unit].add(tensor, gradient)
    kept = {name: [[part.sums.clone() for part in one.parts] for one in own[name]] for name in names}
    found: dict[str, list[Reduced]] = {}
    again: dict[str, list[Reduced]] = {}

    def work(name: str) -> None:
        ring: Any = FakeRing(rings, "ring", names, name)
        reduction = Reduction(interrupts[name], num_members)
        chance = random.Random(name)
        for accumulator in own[name]:
            if chance.random() < 0.5:
                threading.Event().wait(0.002)  # others are faster
            reduction.put(accumulator, ring)
        reduction.finish()
        for accumulator, wanted in zip(own[name], kept[name], strict=True):
            for part, sums in zip(accumulator.parts, wanted, strict=True):
                assert torch.equal(part.sums, sums)
        again[name] = [merged(kind, size, num_members, accumulator) for accumulator in own[name]]
        found[name] = [accumulator.finish(num_members, 0) for accumulator in own[name]]

    in_threads({name: lambda name=name: work(name) for name in names})
    expected = [accumulator.finish(num_members, 0) for accumulator in alone]
    for name, unit in itertools.product(names, range(units)):
        assert found[name][unit].exponents == expected[unit].exponents
        assert set(found[name][unit].gradients) == set(again[name][unit].gradients) == {*types, "of one"}
        for tensor, want in expected[unit].gradients.items():
            have = found[name][unit].gradients[tensor]
            assert torch.equal(have, found[names[0]][unit].gradients[tensor])
            assert torch.equal(have, want) if kind == "exact" else torch.allclose(have, want, atol=1e-6)
            taken = again[name][unit].gradients[tensor]
            assert torch.equal(taken, want) if kind == "exact" else torch.allclose(taken, want, atol=1e-6)


def reduced_by(own: dict[str, Accumulator], num: int) -> list[Reduced]:
    """Let all workers reduce their sums of ``num`` micro-batches; return each worker's result."""
    interrupts = {name: Interrupt(1) for name in own}
    rings = FakeRings(interrupts)
    found: dict[str, Reduced] = {}

    def work(name: str) -> None:
        reduction = Reduction(interrupts[name], num)
        reduction.put(own[name], cast("Any", FakeRing(rings, "ring", tuple(own), name)))
        reduction.finish()
        found[name] = own[name].finish(num, 0)

    in_threads({name: lambda name=name: work(name) for name in own})
    return [found[name] for name in own]


def holding(accumulator: Accumulator, **gradients: Tensor) -> Accumulator:
    for name, gradient in gradients.items():
        accumulator.add(name, gradient)
    return accumulator


def test_an_overflow_at_one_member_is_known_to_all() -> None:
    own = {
        "w0": holding(made("exact", 8, 2), b=torch.full((3,), 1e9)),
        "w1": holding(made("exact", 8, 2), b=torch.ones(3)),
    }
    one, other = reduced_by(own, 2)
    assert one.overflowed
    assert other.overflowed
    assert one.exponents == other.exponents


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_at_one_member_is_known_to_all(broken: float) -> None:
    scale = LossScale(exponent=1, growth_steps=2)
    own = {
        name: holding(ExactAccumulator({"w": torch.zeros(3)}, {"w": 10}, 2, scale), w=torch.tensor([1.0, value, 3.0]))
        for name, value in {"w0": broken, "w1": 2.0}.items()
    }
    assert [reduced.non_finite for reduced in reduced_by(own, 2)] == [True, True]


@pytest.mark.parametrize(
    ("index", "value", "non_finite"),
    [(0, math.nan, True), (150, math.inf, True), (299, -math.inf, True), (7, 3e38, False), (None, 3e38, False)],
)
def test_each_piece_of_fast_sums_is_checked_for_finite_values(
    index: int | None, value: float, non_finite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducing, "PIECE_BYTES", 200)
    monkeypatch.setattr(reducing, "SHARE_BYTES", 16)
    gradients = {name: torch.ones(300) for name in ("w0", "w1", "w2")}
    gradients["w1"][slice(None) if index is None else index] = value
    scale = LossScale(exponent=1, growth_steps=2)
    own = {name: holding(FastAccumulator({"w": torch.zeros(300)}, scale), w=given) for name, given in gradients.items()}
    assert [reduced.non_finite for reduced in reduced_by(own, 3)] == [non_finite] * 3


def test_a_mean_that_its_own_type_cannot_hold_is_known_to_all() -> None:
    own: dict[str, Accumulator] = {}
    for name in ("w0", "w1"):
        like = {"w": torch.zeros(8, dtype=torch.float16)}
        own[name] = FastAccumulator(like, LossScale(exponent=1, growth_steps=2))
        own[name].add("w", torch.tensor([6e4, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 6e4]))
        own[name].add("w", torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 6e4]))
    assert [reduced.non_finite for reduced in reduced_by(own, 1)] == [True, True]


def test_an_aborted_generation_ends_the_wait_and_the_thread() -> None:
    interrupts = {"w0": Interrupt(1), "w1": Interrupt(1)}
    ring: Any = FakeRing(FakeRings(interrupts), "ring", ("w0", "w1"), "w0")
    reduction = Reduction(interrupts["w0"], 2)
    accumulator = made("fast", 4, 2)
    accumulator.add("w", torch.ones(4))
    reduction.put(accumulator, ring)
    interrupts["w0"].abort()
    with pytest.raises(GenerationAborted):
        reduction.finish()
    reduction._thread.join(WAIT_S)
    assert not reduction._thread.is_alive()
    assert accumulator.partial() is not None


def test_a_failed_reduction_keeps_no_reference_to_its_ring() -> None:
    """The last owner of a group waits for its operations, and garbage collection may run in any thread."""
    interrupts = {"w0": Interrupt(1), "w1": Interrupt(1)}
    ring: Any = FakeRing(FakeRings(interrupts), "ring", ("w0", "w1"), "w0")
    found = weakref.ref(ring)
    reduction = Reduction(interrupts["w0"], 2)
    gc.disable()
    try:
        for _ in range(2):
            reduction.put(made("exact", 4, 2), ring)
        interrupts["w0"].abort()
        with pytest.raises(GenerationAborted):
            reduction.finish()
        reduction._thread.join(WAIT_S)
        del ring
        assert found() is None
    finally:
        gc.enable()


UNITS = {"s0": (0,), "s1": (1,), "s2": (2,), "s3": (3,), "s0+s3": (0, 3), "s1+s2": (1, 2), "s0+s1": (0, 1)}


def state_of(name: str) -> UnitState:
    unit = ParameterUnit(id=name, sections=UNITS[name], parameters=(f"{name}.w",), buffers=())
    return UnitState(unit, {f"{name}.w": torch.zeros(5)}, _sgd, num_micro_batches=4, exact=True)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "cuts",
    [
        *(((cut, cut)) for cut in ((0, 4), (0, 2, 4), (0, 1, 4), (0, 1, 2, 3, 4))),
        *itertools.permutations(((0, 4), (0, 2, 4), (0, 1, 3, 4)), 2),
    ],
    ids=str,
)
def test_units_are_reduced_once_complete_in_an_order_common_to_members(
    cuts: tuple[tuple[int, ...], tuple[int, ...]], seed: int
) -> None:
    """Some replicas have no micro-batches, pipelines have different cuts, and ties across stages form a cycle."""
    stages_of_kinds = [[range(first, end) for first, end in itertools.pairwise(cut)] for cut in dict.fromkeys(cuts)]
    stages = [stage for kind in stages_of_kinds for stage in kind]
    ends = list(itertools.accumulate(map(len, stages_of_kinds), initial=0))
    pipelines = [range(first, end) for first, end in itertools.pairwise(ends)]
    pipelines = pipelines if len(pipelines) == 2 else 2 * pipelines
    shares = {0: (0, 1, 2, 3), 1: ()} if seed % 2 else {0: (0, 1), 1: (2, 3)}
    workers = {f"w{stage}.{replica}": (stage, replica) for replica in shares for stage in pipelines[replica]}
    interrupts = {name: Interrupt(1) for name in workers}
    fake = FakeRings(interrupts)
    means: dict[str, list[Tensor]] = {}
    lock = threading.Lock()

    def stages_of(unit: str) -> tuple[int, ...]:
        return tuple(index for index, stage in enumerate(stages) if set(UNITS[unit]) & set(stage))

    split = {unit for unit in UNITS for pipeline in pipelines if len(set(pipeline).intersection(stages_of(unit))) > 1}

    rounds = reduction_rounds([cut[:-1] for cut in dict.fromkeys(cuts)], 4)

    def work(name: str) -> None:
        stage, replica = workers[name]
        rings: dict[str, Any] = {}
        mine = [unit for unit in UNITS if stage in stages_of(unit)]
        of_unit = {unit: "ring/" + "+".join(map(str, stages_of(unit))) for unit in mine}
        for unit in mine:
            members = tuple(other for other, (place, _) in workers.items() if place in stages_of(unit))
            rings.setdefault(of_unit[unit], FakeRing(fake, of_unit[unit], members, name))
        states = {unit: state_of(unit) for unit in mine}
        given = Rings(of_unit, split, rounds, lambda unit: rings[of_unit[unit]], interrupts[name], FaultPlan([]))
        salvage: Salvage | None = None
        sums = StepSums(states, stages[stage], shares[replica], 4, 3, given, salvage=salvage, keep=True)
        chance = random.Random(f"{name}/{seed}")
        for micro_batch in shares[replica]:
            sink = sums.of(micro_batch)
            for section in reversed(stages[stage]):
                for unit in mine:
                    if section in UNITS[unit]:
                        sink.add(section, f"{unit}.w", torch.full((5,), micro_batch + 0.25 * section))
                if chance.random() < 0.3:
                    threading.Event().wait(0.001)
                sink.done(section)
            sums.count(micro_batch)
        sums.finish_reduction()
        found = {unit: sums.accumulators[unit].finish(4, 0).gradients[f"{unit}.w"] for unit in mine}
        with lock:
            for unit, mean in found.items():
                means.setdefault(unit, []).append(mean)

    in_threads({name: lambda name=name: work(name) for name in workers})
    for unit, sections in UNITS.items():
        want = sum(micro_batch + 0.25 * section for micro_batch in range(4) for section in sections) / 4
        assert len(means[unit]) == sum(stage in stages_of(unit) for stage, _ in workers.values())
        assert all(torch.equal(mean, torch.full((5,), want)) for mean in means[unit])

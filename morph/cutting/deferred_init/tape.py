"""Records a model's constructor, and later carries out only the operations on which a requested tensor depends.

The constructor runs under a ``FakeTensorMode``, so that no weight takes memory. Below Python every operation that makes
or changes a storage is written on a tape. Each random operation is seeded by the job's seed and its number on the tape,
so that a weight does not depend on which others are materialised; or the tape keeps the state of a generator that the
constructor has seeded. Tensors that hold data from elsewhere (``torch.tensor([...])``) are real.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
_EMPTY = ("aten::empty", "aten::new_empty")
_GENERATOR = "Optional[Generator]"
_OVERWRITES = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.copy_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
    aten.bernoulli_.float,
    aten.exponential_.default,
    aten.log_normal_.default,
    aten.cauchy_.default,
}


class CannotRecord(Exception):
    """The constructor does something that a tape cannot record."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor of the constructor: the number of its storage, and its view of the storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation on the tape; tensors in ``args`` and ``kwargs`` are references, or data.

    ``writes``: the storages among ``reads`` that it changes, ``overwrites`` in whole. ``results``: in flat order.
    ``draw``: its number among the random operations, or the state of a generator that was seeded.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: int | None
    results: tuple[TensorRef | None, ...]
    creates: frozenset[int]
    draw: int | Tensor | None


@dataclass(eq=False)
class Tape:
    """Operations of one constructor, in order."""

    seed: int
    operations: list[Operation] = field(default_factory=list)
    num_draws: int = 0
    untouched: Tensor | None = None
    """During the constructor: the state of the global generator as long as the constructor does not seed it."""
    _storages: dict[int, tuple[int, torch.UntypedStorage]] = field(default_factory=dict)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage was made on this tape."""
        return isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata in self._storages

    def reference(self, tensor: Tensor) -> TensorRef:
        """Return the reference of a fake tensor; CannotRecord: not made on this tape, or not a plain tensor."""
        if not self.knows(tensor):
            raise CannotRecord("a tensor comes from outside the constructor")
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise CannotRecord("a tensor is not dense")
        if not all(isinstance(size, int) for size in tensor.shape):
            raise CannotRecord("a size depends on values in a tensor")
        number, _ = self._storages[tensor.untyped_storage()._cdata]
        return TensorRef(
            number, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        )

    def add_storage(self, tensor: Tensor) -> int:
        """Give the tensor's storage a number; the storage is kept alive, so that its identity is not used again."""
        storage = tensor.untyped_storage()
        return self._storages.setdefault(storage._cdata, (len(self._storages), storage))[0]

    def next_draw(self) -> int:
        """Return the number of a further random operation."""
        self.num_draws += 1
        return self.num_draws - 1

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """While the block runs, draws from generators that it seeds itself are recorded with their states."""
        torch.rand(_odd_number(self.seed))  # no seed that the constructor may set gives this state
        self.untouched = torch.default_generator.get_state()
        try:
            yield
        finally:
            self.untouched = None

    def seeded_generator(self, given: torch.Generator | None) -> torch.Generator | None:
        """Return the generator, if the constructor has seeded it. Raises CannotRecord for one not of the CPU."""
        if self.untouched is None:
            return None
        if given is not None and given.device.type != "cpu":
            raise CannotRecord("a generator is not on the CPU")
        if given is not None and given is not torch.default_generator:
            return given
        with unset_fake_temporarily():
            is_seeded = not torch.equal(torch.default_generator.get_state(), self.untouched)
        return torch.default_generator if is_seeded else None

    def drawn_with(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        into: Sequence[Tensor],
        given: torch.Generator | None,
    ) -> Any:
        """Return ``Operation.draw`` for an operation about to be recorded, and move its generator on."""
        generator = None if any(tensor.is_meta for tensor in into) else self.seeded_generator(given)
        if generator is None:
            return self.next_draw()
        references = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TensorRef)]
        with unset_fake_temporarily(), torch.no_grad():
            state = generator.get_state()
            if function in _OVERWRITES:  # only the target's shape matters
                made = [_laid_out_as(reference) for reference in references]
            else:
                made = self.materialise(references)
            real = dict(zip(references, made, strict=True))
            real_args, real_kwargs = tree_map(
                lambda value: real[value] if isinstance(value, TensorRef) else value, (args, kwargs)
            )
            _draw(function, real_args, real_kwargs, generator)
        return state

    def write_initialiser(
        self, function: Callable[..., object], target: Tensor, *numbers: float, generator: torch.Generator | None
    ) -> None:
        """Record a Python function that fills ``target`` at random, in a loop that depends on the numbers."""
        reference = self.reference(target)
        storages = frozenset((reference.storage,))
        self.operations.append(
            Operation(
                function=function,
                args=(reference, *numbers),
                kwargs={},
                reads=storages,
                writes=storages,
                overwrites=reference.storage if _is_whole(target) else None,
                results=(),
                creates=frozenset(),
                draw=self.drawn_with(function, (reference, *numbers), {}, [target], generator),
            )
        )

    def made_by(self, function: Callable[..., Tensor], args: tuple[object, ...], like: Tensor) -> Tensor:
        """Record a Python function that makes a tensor of data, and return its fake counterpart."""
        made = torch.empty(like.shape, dtype=like.dtype, device="cpu")  # recorded: it makes the storage
        self.operations[-1] = replace(self.operations[-1], function=function, args=args, kwargs={})
        return made

    def needed_for(self, wanted: Iterable[int], num_operations: int | None = None) -> list[Operation]:
        """Return, in order, the operations on which these storages' contents after ``num_operations`` depend."""
        needed, settled = set(wanted), set[int]()
        chosen: list[Operation] = []
        for operation in reversed(self.operations[:num_operations]):
            changes = (operation.writes & needed) - settled
            if not changes and not operation.creates & needed:
                continue
            chosen.append(operation)
            reads = operation.reads
            if operation.overwrites is not None:
                settled.add(operation.overwrites)
                reads -= {operation.overwrites} if _reads_only_as_target(operation) else set()
                needed.add(operation.overwrites)
            needed |= reads
            settled -= reads
        return chosen[::-1]

    def materialise(self, references: Sequence[TensorRef], num_operations: int | None = None) -> list[Tensor]:
        """Return real tensors on the CPU, with their values after the first ``num_operations``; None: after all."""
        wanted = {reference.storage for reference in references}
        operations = self.needed_for(wanted, num_operations)
        last_use: dict[int, int] = {}
        for place, operation in enumerate(operations):
            last_use.update(dict.fromkeys(operation.reads | operation.creates, place))
        ending: dict[int, list[int]] = {}
        for storage, place in last_use.items():
            ending.setdefault(place, []).append(storage)
        storages: dict[int, torch.UntypedStorage] = {}
        with unset_fake_temporarily(), torch.no_grad():
            for place, operation in enumerate(operations):
                _replay(operation, storages, self.seed)
                for storage in ending.get(place, ()):
                    if storage not in wanted:
                        storages.pop(storage, None)
            return [_compact(_tensor(storages, reference)) for reference in references]


class RecordTape(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Writes a tape; entered inside the ``FakeTensorMode`` that makes the tensors."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out ``func``, and record it if it makes or changes a storage and does not read a batch."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._run_on_data(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            (value,) = self._tape.materialise([self._tape.reference(args[0])])
            with unset_fake_temporarily():
                return value.item()
        foreign = any(isinstance(tensor, FakeTensor) and not self._tape.knows(tensor) for tensor in tensors)
        result = func(*args, **kwargs)  # without values, so that no generator moves on
        if not foreign:
            self._write(func, args, kwargs, result)
        return result

    def _run_on_data(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        with unset_fake_temporarily():
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return func(*args, **kwargs)
            if self._tape.seeded_generator(_given_generator(args, kwargs)) is not None:
                return func(*args, **kwargs)
            return _draw(func, args, kwargs, _generator(self._tape.seed, self._tape.next_draw()))

    def _write(self, func: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        tape = self._tape
        written = written_tensors(func, args, kwargs)
        if any(not isinstance(tensor, FakeTensor) for tensor in written):
            raise CannotRecord(f"{func} changes a tensor that holds data")
        new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor) and not tape.knows(leaf)]
        if not written and not new:
            return
        packed_args, packed_kwargs = tree_map(self._pack, (args, kwargs))
        references = [leaf for leaf in tree_leaves((packed_args, packed_kwargs)) if isinstance(leaf, TensorRef)]
        draw = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = _given_generator(args, kwargs)
            draw = tape.drawn_with(func, packed_args, packed_kwargs, written or new, given)
        creates = frozenset(tape.add_storage(tensor) for tensor in new)
        writes = frozenset(tape.reference(tensor).storage for tensor in written)
        tape.operations.append(
            Operation(
                function=func,
                args=packed_args,
                kwargs=packed_kwargs,
                reads=frozenset(reference.storage for reference in references),
                writes=writes,
                overwrites=_overwritten(func, packed_args, written),
                results=tuple(
                    tape.reference(leaf) if isinstance(leaf, FakeTensor) else None for leaf in tree_leaves(result)
                ),
                creates=creates,
                draw=draw,
            )
        )

    def _pack(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return self._tape.reference(value)
        if isinstance(value, Tensor):
            with unset_fake_temporarily():
                return value.detach().clone()
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return None if isinstance(value, torch.Generator) else value


def written_tensors(func: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among the arguments that ``func`` changes."""
    tensors: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return tensors


def _overwritten(func: OpOverload, args: Any, written: Sequence[Tensor]) -> int | None:
    """Return the storage of which ``func`` replaces every byte."""
    if func not in _OVERWRITES or len(written) != 1:
        return None
    target: TensorRef = args[0]
    return target.storage if _is_whole(written[0]) else None


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _reads_only_as_target(operation: Operation) -> bool:
    others = tree_leaves((operation.args[1:], operation.kwargs))
    return all(leaf.storage != operation.overwrites for leaf in others if isinstance(leaf, TensorRef))


def _replay(operation: Operation, storages: dict[int, torch.UntypedStorage], seed: int) -> None:
    args, kwargs = tree_map(
        lambda value: _tensor(storages, value) if isinstance(value, TensorRef) else value,
        (operation.args, operation.kwargs),
    )
    if operation.draw is None:
        result = operation.function(*args, **kwargs)
    else:
        result = _draw(operation.function, args, kwargs, _generator(seed, operation.draw))
    if not operation.creates:
        return
    is_empty = isinstance(operation.function, OpOverload) and operation.function._schema.name.startswith(_EMPTY)
    for value, reference in zip(tree_leaves(result), operation.results, strict=True):
        if reference is None or reference.storage not in operation.creates:
            continue
        if tuple(value.stride()) != reference.stride or value.storage_offset() != reference.offset:
            value = torch.empty_strided(reference.size, reference.stride, dtype=reference.dtype).copy_(value)
        if is_empty:
            value.zero_()  # fill it: an uninitialised weight would differ between workers
        storages[reference.storage] = value.untyped_storage()


def _draw(function: Callable[..., Any], args: Any, kwargs: Any, generator: torch.Generator) -> Any:
    """Carry out a random operation with a generator, as with the global one in the same state.

    Those that take none (dropout, recurrent layers) draw from the global one, which is restored.
    """
    taker, place = (function, None) if not isinstance(function, OpOverload) else _taking_generator(function)
    if taker is None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(generator.get_state())
            result = function(*args, **kwargs)
            after = torch.default_generator.get_state()
        generator.set_state(after)
        return result
    if place is not None and place < len(args):
        return taker(*args[:place], generator, *args[place + 1 :], **kwargs)
    return taker(*args, **{**kwargs, "generator": generator})


@cache
def _taking_generator(operation: OpOverload) -> tuple[OpOverload | None, int | None]:
    """Return the overload of an operation that also takes a generator, and the generator's place."""

    def arguments(overload: OpOverload) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in overload._schema.arguments]

    packet = operation.overloadpacket
    wanted = set(arguments(operation)) | {("generator", _GENERATOR)}
    for overload in (operation, *(getattr(packet, name) for name in packet.overloads())):
        parameters = arguments(overload)
        if set(parameters) == wanted:
            return overload, parameters.index(("generator", _GENERATOR))
    return None, None


def _tensor(storages: dict[int, torch.UntypedStorage], reference: TensorRef) -> Tensor:
    empty = torch.empty(0, dtype=reference.dtype)
    return empty.set_(storages[reference.storage], reference.offset, reference.size, reference.stride)


def _compact(tensor: Tensor) -> Tensor:
    """Release a storage that is larger than the tensor."""
    return tensor if _is_whole(tensor) else tensor.clone()


def _given_generator(args: Any, kwargs: Any) -> torch.Generator | None:
    return next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)), None)


def _laid_out_as(reference: TensorRef) -> Tensor:
    return torch.empty_strided(reference.size, reference.stride, dtype=reference.dtype)


def _odd_number(seed: int) -> int:
    return 1 + 2 * (_seed(seed, -1) % 50_000)


def _generator(seed: int, draw: int | Tensor) -> torch.Generator:
    generator = torch.Generator()
    return generator.set_state(draw) if isinstance(draw, Tensor) else generator.manual_seed(_seed(seed, draw))


def _seed(seed: int, draw: int) -> int:
    digest = hashlib.sha256(f"initial weights {seed} {draw}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

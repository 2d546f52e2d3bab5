"""A table of facts about memory by storage, so that views share an entry; it keeps no storage alive."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from morph.tracing.findings import Kind, SourceLocation

_SWEEP_EVERY = 4096


@dataclass(frozen=True)
class Tag:
    """The units whose data a tensor holds.

    ``units``: sections or parameter units; more than one after an operation that mixed them. ``roots``: keys of the
    findings through which they mixed.
    """

    units: frozenset[str]
    roots: frozenset[tuple[Kind, str, SourceLocation]] = frozenset()


@dataclass
class Known:
    """One storage.

    Attributes:
        born: The epoch in which the present value was made or first seen.
        outside: Whether no watched operation made it.
        tag: The units whose data it holds; None while it holds no unit's data.
        owner: The unit to which Morph itself ties it (parameter, gradient, saved optimizer state).
        kept: Whether it is in the state that Morph saves, even if it holds no unit's data.
        users: Units with whose tensors it, or a value made from it, was used.
        sources: Older tensors without a unit from which it was made.
        changed: Whether its value lives from step to step and changes.
        read_at: The operation and line that first read it together with a unit's data.
    """

    reference: StorageWeakRef
    born: int
    outside: bool
    tag: Tag | None = None
    owner: str | None = None
    kept: bool = False
    users: set[str] = field(default_factory=set)
    sources: tuple[Known, ...] = ()
    label: str = ""
    changed: bool = False
    read_at: tuple[str, SourceLocation] | None = None


class Storages:
    """The table. A weak reference keeps a storage's address from being used again, so that keys stay true."""

    def __init__(self) -> None:
        self.epoch = 0
        self._known: dict[int, Known] = {}

    def find(self, tensor: Tensor) -> Known | None:
        """Return the entry of the tensor's storage."""
        return self._known.get(tensor.untyped_storage()._cdata)

    def see(self, tensor: Tensor, *, outside: bool) -> Known:
        """Return the entry of the tensor's storage, which is made if it is new."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            if len(self._known) % _SWEEP_EVERY == _SWEEP_EVERY - 1:
                self._sweep()
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            known = self._known[storage._cdata] = Known(reference, self.epoch, outside)
        return known

    def _sweep(self) -> None:
        gone = [key for key, entry in self._known.items() if entry.reference.expired()]  # type: ignore[no-untyped-call]
        for key in gone:
            del self._known[key]

    def entries(self) -> list[Known]:
        """Return all entries."""
        return list(self._known.values())

    def own(self, tensor: Tensor, unit: str, *, holds_data: bool, label: str) -> None:
        """Tie a tensor to a unit: writing another unit's data into it does not change its owner.

        Memory that several units share belongs to all of them.
        """
        known = self.see(tensor, outside=False)
        known.kept = True
        known.label = label
        if holds_data or known.tag is not None:
            others = known.tag.units if known.owner is not None and known.tag else frozenset()
            known.owner = unit
            known.tag = Tag(others | {unit})

    def disown_all(self) -> None:
        """Forget every owner; before owners are named anew at the start of a step."""
        for known in self._known.values():
            known.owner = None
            known.kept = False


def covers_its_storage(tensor: Tensor) -> bool:
    """Whether writing all of the tensor leaves nothing of its storage's old value."""
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes() and tensor.is_contiguous()

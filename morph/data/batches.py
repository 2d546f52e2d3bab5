"""Makes a loss's batch from items of a data set: a nest of tensors, which Morph handles as named entries.

An item, or the batch that ``collate_fn`` makes of several, may nest dicts, mappings such as ``BatchEncoding``, tuples,
lists and dataclasses. Its tensors, arrays and numbers are *entries*, named by their path (``inputs.ids``, ``0.mask``);
a :class:`Form` is the nest without its entries, from which the batch for the loss is rebuilt.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from morph.contract.errors import JobError, wrong_job
from morph.data.lengths import Shape, pad, padding_of
from morph.data.order import EpochPlace
from morph.data.seeding import own_generators, seed_of

Collate = Callable[[list[Any]], Any]
Entries = dict[str, Tensor]
ALONE = "samples"
"""The name of the only entry of an item that is a tensor and not a nest."""
_MOST_LISTED = 64
_ALLOWED = (
    "a nest (dict, tuple, list, dataclass) of dense tensors, numpy arrays and numbers; text, which stays on the host"
)


class HostText:
    """Stands for text in a batch: text is not sent to devices, and no loss can be traced through it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object) -> Any:
        raise wrong_job(
            f"batch entry {self._name!r}",
            "is text, which stays on the host: a loss gets only tensors",
            allowed="numbers that the data set or collate_fn makes from it",
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __str__ = _refuse

    def __repr__(self) -> str:
        return f"<text {self._name!r}, on the host>"


@dataclass(frozen=True)
class Form:
    """A nest without its tensors.

    ``value``: the constant (number, flag or None), the same in every batch. ``make``: the type of a nest, with its
    ``keys`` and ``parts``. ``template``: a nest of that type to copy, if it is a dataclass.
    """

    kind: Literal["entry", "text", "constant", "nest"]
    name: str = ""
    value: object = None
    make: type = object
    keys: tuple[Any, ...] = ()
    parts: tuple[Form, ...] = ()
    template: Any = field(default=None, compare=False, repr=False)

    def build(self, entries: Mapping[str, Tensor], texts: Mapping[str, Any] | None = None) -> Any:
        """Return the nest around these entries; without ``texts``, each text is a ``HostText``."""
        if self.kind == "entry":
            return entries[self.name]
        if self.kind == "text":
            return HostText(self.name) if texts is None else texts[self.name]
        if self.kind == "constant":
            return self.value
        values = [part.build(entries, texts) for part in self.parts]
        if self.template is not None:
            made = copy.copy(self.template)
            for key, value in zip(self.keys, values, strict=True):
                object.__setattr__(made, key, value)
            return made
        if issubclass(self.make, Mapping):
            return self.make(dict(zip(self.keys, values, strict=True)))  # type: ignore[call-arg]  # as mappings do
        return self.make(*values) if hasattr(self.make, "_fields") else self.make(values)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Flat:
    """A nest taken apart; ``texts`` by name, like ``entries``."""

    entries: Entries
    texts: dict[str, Any]
    form: Form


@dataclass
class _Flattening:
    """``numbers``: numbers are entries, not constants. ``lists``: lists of them are entries too, other objects are
    text.
    """

    where: str
    numbers: bool
    lists: bool
    entries: Entries = field(default_factory=dict)
    texts: dict[str, Any] = field(default_factory=dict)

    def form(self, value: Any, name: str) -> Form:
        """Take ``value`` apart, and return its form."""
        if isinstance(value, np.ndarray | np.generic) and np.asarray(value).dtype.kind in "biufc":
            value = torch.as_tensor(value)
        if self.lists and isinstance(value, list) and value and all(type(item) in (int, float, bool) for item in value):
            value = torch.tensor(value)
        is_number = isinstance(value, int | float | complex)
        if is_number and self.numbers:
            value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                raise self._refused(name, str(value.layout))
            return Form("entry", self._put(self.entries, name, value))
        if value is None or is_number:
            return Form("constant", name, value)
        texts = isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(x, str | bytes) for x in value)
        if texts or isinstance(value, str | bytes | np.ndarray):
            return Form("text", self._put(self.texts, name, value))
        return self._nest(value, name)

    def _nest(self, value: Any, name: str) -> Form:
        template = None
        if isinstance(value, Mapping):
            keys, values = tuple(value), list(value.values())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            keys = tuple(field.name for field in dataclasses.fields(value))
            values, template = [getattr(value, key) for key in keys], copy.copy(value)
            for key in keys:
                object.__setattr__(template, key, None)
        elif isinstance(value, tuple | list):
            keys, values = getattr(type(value), "_fields", tuple(range(len(value)))), list(value)
            if len(values) > _MOST_LISTED and not isinstance(values[0], Tensor | Mapping | tuple | list):
                raise self._refused(name, f"a {type(value).__name__} of {len(values)} values")
        elif self.lists:
            return Form("text", self._put(self.texts, name, value))
        else:
            raise self._refused(name, type(value).__name__)
        named = zip([f"{name}.{key}" if name else str(key) for key in keys], values, strict=True)
        parts = tuple(self.form(part, its_name) for its_name, part in named)
        return Form("nest", name, None, type(value), keys, parts, template)

    def _put(self, where: dict[str, Any], name: str, value: Any) -> str:
        name = name or ALONE
        if name in self.entries or name in self.texts:
            raise self._refused(name, "two entries of this name")
        where[name] = value
        return name

    def _refused(self, name: str, what: str) -> JobError:
        shown = f"{name!r}: {what}" if name else what
        return wrong_job(self.where, "is not a sample", shown, _ALLOWED)


def flat_sample(sample: object, where: str, *, collated: bool = False) -> Flat:
    """Take an item apart into its form, entries and texts.

    ``where``: the name of the item in errors. ``collated``: whether ``collate_fn`` makes batches of items, which may
    then hold anything.
    """
    return _flat(sample, _Flattening(where, numbers=True, lists=collated))


def _flat(value: object, taking: _Flattening) -> Flat:
    form = taking.form(value, "")
    if not taking.entries and not taking.lists:
        raise wrong_job(taking.where, "is not a sample: it holds no tensor", allowed=_ALLOWED)
    return Flat(taking.entries, taking.texts, form)


@dataclass(frozen=True)
class Recipe:
    """How micro-batches are made of samples. ``shapes``: the shapes of samples' entries, if there are buckets."""

    seed: int = 0
    collate_fn: Collate | None = None
    buckets: tuple[int, ...] = ()
    padding: Mapping[str, float] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    def read(self, dataset: Any, places: Iterable[EpochPlace]) -> list[Any]:
        """Return samples; the draws of each from the global generators depend only on (seed, epoch, index)."""
        samples, places = [], list(places)
        expect = getattr(dataset, "expect_samples", None)
        if expect is not None:
            expect(self.seed, places)
        with own_generators() as seed_all:
            for epoch, index in places:
                seed_all(seed_of(self.seed, "sample", epoch, index))
                samples.append(dataset[index])
        return samples

    def flat(self, sample: object, where: str) -> Flat:
        """Take an item apart for inspection."""
        return flat_sample(sample, where, collated=self.collate_fn is not None)

    def rows(self, dataset: Any, indices: Sequence[int]) -> list[Entries]:
        """Return the entries of some samples, each as in a batch of its own, without padding."""
        alone = replace(self, shapes={})
        made = (alone.batch(self.read(dataset, [(0, i)]), [(0, i)], "dataset()").entries for i in indices)
        return [{name: entry[0] for name, entry in entries.items()} for entries in made]

    def like(self, dataset: Any) -> Entries:
        """Return the entries of a typical sample, in the longest bucket; without buckets, those of item 0."""
        if not self.buckets:
            return self.rows(dataset, [0])[0]
        sizes = {name: (shape.at(self.buckets[-1]), shape.dtype) for name, shape in self.shapes.items()}
        return {name: torch.empty(size, dtype=dtype, device="meta") for name, (size, dtype) in sizes.items()}

    def nest(self, samples: Sequence[Any], places: Sequence[EpochPlace], field: str, length: int | None = None) -> Any:
        """Return one batch of samples, made as a ``DataLoader`` does; dataclasses are stacked too.

        The draws of ``collate_fn`` from the global generators depend only on the seed and the samples' places.
        """
        if self.collate_fn is None or self.shapes:
            made = self.batch(samples, places, field, None, length)
            return made.form.build(made.entries, made.texts)
        return self._collated(samples, places)

    def _collated(self, samples: Sequence[Any], places: Sequence[EpochPlace]) -> Any:
        assert self.collate_fn is not None
        with own_generators(seed_of(self.seed, "collate", *(number for place in places for number in place))):
            return self.collate_fn(list(samples))

    def batch(
        self,
        samples: Sequence[Any],
        places: Sequence[EpochPlace],
        field: str,
        keys: Iterable[str] | None = None,
        length: int | None = None,
    ) -> Flat:
        """Return one batch of samples, taken apart; every entry is [len(samples), ...].

        ``field`` names the data set in errors. ``keys``: the requested entries, if they can be made separately; None:
        all. Samples are padded to ``length``; None: to the smallest bucket that holds them, if there are any.
        """
        if self.collate_fn is None:
            wheres = [f"{field}[{index}]" for _, index in places]
            flats = [flat_sample(sample, where) for sample, where in zip(samples, wheres, strict=True)]
            self._pad([flat.entries for flat in flats], wheres, length, rows=False)
            return _stacked(flats, flats[0].entries if keys is None else keys)
        collated = _flat(self._collated(samples, places), _Flattening("collate_fn()", numbers=False, lists=False))
        for name, entry in collated.entries.items():
            if not entry.dim() or len(entry) != len(samples):
                raise wrong_job(
                    f"collate_fn()[{name!r}]",
                    f"returns an entry without one row for each of the {len(samples)} samples",
                    str(tuple(entry.shape)),
                    "the samples as the first dimension of every tensor; packed texts as items of the data set",
                )
        self._pad([collated.entries], ["collate_fn()"], length, rows=True)
        return collated

    def _pad(self, parts: Sequence[Entries], fields: Sequence[str], length: int | None, *, rows: bool) -> None:
        if not self.shapes:
            return
        if length is None:
            sizes = [
                size
                for part in parts
                for name, shape in self.shapes.items()
                if name in part
                for size, declared in zip(part[name].shape[rows:], shape.sizes, strict=False)
                if declared is None
            ]
            longest = max(sizes, default=self.buckets[0])
            length = next((bucket for bucket in self.buckets if bucket >= longest), self.buckets[-1])
        for part, of in zip(parts, fields, strict=True):
            for name, shape in self.shapes.items():
                if name in part:
                    value, where = padding_of(name, self.padding), f"{of}[{name!r}]"
                    part[name] = pad(part[name], shape, length, value, rows=rows, field=where)

    def alike(
        self,
        samples: Sequence[Any],
        places: Sequence[EpochPlace],
        like: Mapping[str, Tensor],
        field: str,
        allowed: str,
        keys: Iterable[str] | None = None,
        length: int | None = None,
    ) -> Entries:
        """Return one batch of samples, whose entries must have the shapes for which the sections were made.

        ``like``: a sample with the right entries and shapes. ``length``: as for ``batch``; if given, padding makes the
        shapes equal.
        """
        if self.shapes:
            batch = self.batch(samples, places, field, keys, length).entries
            for name in like.keys() - batch.keys() if keys is None else ():
                raise wrong_job(f"{field}[{name!r}]", "is missing in a sample", allowed=allowed)
            return batch
        if self.collate_fn is None:
            for sample, (_, index) in zip(samples, places, strict=True):
                where = f"{field}[{index}]"
                require_alike(
                    flat_sample(sample, where).entries, like, where, f"{allowed}; pad or crop samples in the data set"
                )
            return self.batch(samples, places, field, keys).entries
        batch = self.batch(samples, places, field, keys).entries
        rows = {name: entry[0] for name, entry in batch.items()}
        require_alike(rows, like, "collate_fn()", f"{allowed}, for each sample; pad to one length")
        return batch


def _stacked(flats: Sequence[Flat], keys: Iterable[str]) -> Flat:
    first = flats[0]
    texts = {name: [flat.texts.get(name) for flat in flats] for name in first.texts}
    return Flat({key: stack_entry([flat.entries for flat in flats], key) for key in keys}, texts, first.form)


def stack_entry(samples: Sequence[Mapping[str, Tensor]], key: str) -> Tensor:
    """Stack one entry of the samples to [len(samples), ...].

    Raises JobError if a sample lacks the entry, or its entry differs in shape or dtype from the first sample's.
    """
    for position, sample in enumerate(samples):
        if key not in sample:
            have = ", ".join(sorted(sample))
            raise wrong_job(f"dataset item {key!r}", "is missing in a sample", allowed=have)
        first, value = samples[0][key], sample[key]
        if value.shape != first.shape or value.dtype != first.dtype:
            raise wrong_job(
                f"dataset item {key!r}",
                f"differs between samples of one micro-batch (sample {position} against sample 0)",
                f"{tuple(value.shape)} {value.dtype} and {tuple(first.shape)} {first.dtype}",
                "equal shapes and dtypes; pad or crop samples in the data set, or pad in collate_fn",
            )
    return torch.stack([sample[key] for sample in samples])


def require_alike(sample: Mapping[str, Tensor], like: Mapping[str, Tensor], field: str, allowed: str) -> None:
    """Refuse a sample that lacks an entry of another, or has one of another shape or type.

    Raises JobError if an entry is missing or differs; the message names it after ``field``, and ends with ``allowed``.
    """
    for key, wanted in like.items():
        entry = sample.get(key)
        if entry is None or entry.shape != wanted.shape or entry.dtype != wanted.dtype:
            raise wrong_job(
                f"{field}[{key!r}]",
                "differs from the others",
                "nothing" if entry is None else f"{tuple(entry.shape)} {entry.dtype}",
                f"{tuple(wanted.shape)} {wanted.dtype}, {allowed}",
            )

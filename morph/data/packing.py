"""Packing: several documents in one sample of fixed length, each with its own positions, as in transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from morph.contract.errors import wrong_job
from morph.data.batches import flat_sample
from morph.data.lengths import IGNORED, LABELS, checked_lengths, padding_of
from morph.data.order import OfDataSet

POSITIONS = "position_ids"


def packs(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Distribute documents among samples: the longest first, each to the fullest sample that has room for it.

    ``lengths`` are of the documents, each at most ``length``, that of a sample. Returns the numbers of each sample's
    documents, ascending; samples are in the order of their first documents.
    """
    packed: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms = 0  # bit r: a sample has room for r more tokens
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        size = lengths[document]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            place = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, place = length, len(packed)
            packed.append([])
        packed[place].append(document)
        with_room.setdefault(room - size, []).append(place)
        rooms |= 1 << (room - size)
    return sorted(sorted(pack) for pack in packed)


class Packed:
    """A data set of packed samples: dicts of the documents' concatenated entries, and ``position_ids``.

    Positions begin at 0 in each document; so transformers and :func:`document_mask` find where it begins. The rest of a
    sample is padded as one more document. The first entry of ``labels`` of each document is ignored, because it would
    be predicted from the previous document.

    Args:
        dataset: A data set of documents: dicts of tensors, arrays or lists, each as long as the document.
        length: The length of a sample.
        lengths: The length of each document, or a function of the data set that returns the lengths.
        padding: The values with which entries are padded, by name; default 0, and -100 for ``labels``.

    Raises:
        JobError: ``lengths`` are not lengths, or a document is longer than a sample.
    """

    def __init__(
        self, dataset: Any, length: int, lengths: OfDataSet, padding: Mapping[str, float] | None = None
    ) -> None:
        known = checked_lengths(lengths(dataset) if callable(lengths) else lengths, len(dataset), [length], "dataset")
        self._dataset, self._length, self._padding = dataset, length, padding or {}
        self._lengths = known
        self.packs = packs(known.tolist(), length)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample, every entry of which is [length]; JobError if one of a document is not as long as the
        document."""
        return self.sample(self.packs[index])

    def sample(self, documents: Sequence[int]) -> dict[str, Tensor]:
        """Return the sample of these documents, which fit into it, in this order; errors are those of items."""
        parts: dict[str, list[Tensor]] = {}
        sizes = [int(self._lengths[document]) for document in documents]
        for document, size in zip(documents, sizes, strict=True):
            for name, entry in self._document(document, size).items():
                parts.setdefault(name, []).append(entry)
        room = self._length - sum(sizes)
        for name, entries in parts.items():
            if room:
                entries.append(entries[0].new_full((room, *entries[0].shape[1:]), padding_of(name, self._padding)))
        positions = [torch.arange(size) for size in (*sizes, room)]
        return {name: torch.cat(entries) for name, entries in parts.items()} | {POSITIONS: torch.cat(positions)}

    def _document(self, document: int, size: int) -> dict[str, Tensor]:
        field = f"dataset[{document}]"
        entries = flat_sample(self._dataset[document], field, collated=True).entries
        for name, entry in entries.items():
            if not entry.dim() or len(entry) != size or name == POSITIONS:
                raise wrong_job(
                    f"{field}[{name!r}]",
                    "cannot be packed",
                    str(list(entry.shape)),
                    f"entries of the document's length, {size}, and none named {POSITIONS}",
                )
        if LABELS in entries and size:
            entries[LABELS] = torch.cat([entries[LABELS].new_full((1,), IGNORED), entries[LABELS][1:]])
        return entries


def document_mask(position_ids: Tensor, *, causal: bool = True) -> Tensor:
    """Return which tokens attend to which in packed samples: those of one document, with ``causal`` only earlier ones.

    Args:
        position_ids: int [samples, length], 0 where a document begins.
        causal: Whether tokens attend only to themselves and earlier tokens.

    Returns:
        bool [samples, 1, length, length], as ``scaled_dot_product_attention`` takes it: the query's place first.
    """
    document = (position_ids == 0).cumsum(-1)
    same = document[:, None, :, None] == document[:, None, None, :]
    if not causal:
        return same
    places = torch.arange(position_ids.shape[-1], device=position_ids.device)
    return same & (places[:, None] >= places[None, :])

"""Chooses the samples on which a loss is tried: pairs that differ as much as samples of the data set can."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from morph.data.batches import ALONE, flat_sample

IGNORED = (-100, 0, -1, 1)
"""Values of elements that losses ignore."""
_VALUE = "value"
_FEWEST_PAIRS, _MOST_PAIRS = 4, 32
_MOST_LABELS = 64
_MOST_COUNTED = 1 << 20


@dataclass(frozen=True)
class Look:
    """What matters of one sample: ``labels``, values of each entry with few; ``amounts``, by entry and value."""

    index: int
    amounts: Mapping[str, Mapping[object, float]]
    labels: Mapping[str, frozenset[float]]


def look(index: int, sample: Any) -> Look:
    """Return the properties of one sample."""
    amounts: dict[str, dict[object, float]] = {}
    labels: dict[str, frozenset[float]] = {}
    for key, entry in entries(sample).items():
        if entry.numel() == 1 and not entry.is_complex():
            amounts[key] = {_VALUE: float(entry)}
            labels[key] = frozenset(amounts[key].values())
            continue
        amounts[key] = {ignored: int((entry != ignored).sum()) for ignored in IGNORED}
        if not (entry.is_floating_point() or entry.is_complex()) and entry.numel() <= _MOST_COUNTED:
            labels[key] = frozenset(map(float, torch.unique(entry).tolist()))
    return Look(index, amounts, labels)


def entries(sample: Any) -> dict[str, Tensor]:
    """Return tensors and numbers of a sample, by their key or position in it."""
    tensors = flat_sample(sample, "dataset()", collated=True).entries
    return {name if name.isdecimal() or name == ALONE else repr(name): entry for name, entry in tensors.items()}


def unlike_pairs(looks: Sequence[Look]) -> list[tuple[int, int]]:
    """Return pairs of unlike samples, the most different ones first; entries take turns, so that none hides another."""
    keys = sorted(looks[0].amounts, key=lambda key: _VALUE not in looks[0].amounts[key])
    queues = [[*_extremes(looks, key), *_contrasts(looks, key)] for key in keys]
    pairs = dict.fromkeys(pair for row in itertools.zip_longest(*queues) for pair in row if pair is not None)
    spare = [(look.index, other.index) for look, other in zip(looks[::2], looks[1::2], strict=False)]
    spare = spare or [(looks[0].index, looks[0].index)]
    return [*list(pairs)[:_MOST_PAIRS], *spare[: max(0, _FEWEST_PAIRS - len(pairs))]]


def _extremes(looks: Sequence[Look], key: str) -> Iterator[tuple[int, int]]:
    largest, pair = 0.0, None
    for what in looks[0].amounts[key]:
        known = [look for look in looks if math.isfinite(look.amounts.get(key, {}).get(what, math.nan))]
        if known:
            low, high = (function(known, key=lambda look: look.amounts[key][what]) for function in (min, max))
            least, most = low.amounts[key][what], high.amounts[key][what]
            spread = (most - least) / max(abs(least), abs(most), 1e-30)
            if spread > largest:
                largest, pair = spread, (low.index, high.index)
    if pair is not None:
        yield pair


def _contrasts(looks: Sequence[Look], key: str) -> Iterator[tuple[int, int]]:
    """Yield samples with each label: the rarest and the commonest label first, then the next rarest, and so on."""
    shown = Counter(label for look in looks for label in look.labels.get(key, ()))
    if not 1 < len(shown) <= _MOST_LABELS:
        return
    order = sorted(shown, key=lambda label: (shown[label], label))
    used: set[int] = set()

    def first(label: float, without: float) -> Look:
        having = [look for look in looks if label in look.labels.get(key, ())]
        alone = [look for look in having if without not in look.labels[key]] or having
        return next((look for look in alone if look.index not in used), alone[0])

    for place in range((len(order) + 1) // 2):
        rare, common = order[place], order[-1 - place] if order[-1 - place] != order[place] else order[-1]
        one = first(rare, common)
        used.add(one.index)
        other = first(common, rare)
        used.add(other.index)
        if one.index != other.index:
            yield one.index, other.index

"""Bytes of the state of any run of sections, in which a unit that several of them use counts once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from morph.contract.profile import Profile

Ints = npt.NDArray[np.int64]


class HeldBytes:
    """Bytes of parameters, optimizer state, sums of gradients, and mean gradients during reduction."""

    def __init__(self, profile: Profile) -> None:
        sections = profile.sections
        own = {
            "parameters": [section.parameter_bytes for section in sections],
            "optimizer": [section.optimizer_bytes for section in sections],
            "sums": [section.gradient_bytes for section in sections],
            "gradients": [s.parameter_bytes if s.reduced_bytes is None else s.reduced_bytes for s in sections],
        }
        self._sums = {part: running_sums(values) for part, values in own.items()}
        self._twice = _counted_twice(profile, own)

    def __call__(self, part: str, begin: Ints, end: Ints) -> Ints:
        """Return the bytes of a part for runs of sections from ``begin`` to before ``end``, arrays that broadcast."""
        sums = self._sums[part]
        held: Ints = sums[end] - sums[begin] - (0 if self._twice is None else self._twice[part][begin, end])
        return held


def running_sums(values: Sequence[int] | Ints) -> Ints:
    """Return 0, the first value, the sum of the first two and so on: [values + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(values, np.int64))])


def _counted_twice(profile: Profile, own: Mapping[str, Sequence[int]]) -> dict[str, Ints] | None:
    """Return, by part, the bytes that sections begin..end-1 count repeatedly: [K + 1, K + 1]; None: none."""
    shared = [unit for unit in profile.units if len(set(unit.sections)) > 1 and unit.parameter_bytes]
    if not shared:
        return None
    size = profile.num_sections + 1
    tables = {part: np.zeros((size, size), np.int64) for part in own}
    for unit in shared:
        uses = np.zeros(size, np.int64)
        uses[np.array(sorted(set(unit.sections))) + 1] = 1
        before = np.cumsum(uses)
        more = np.maximum(0, before[None, :] - before[:, None] - 1)
        first = unit.sections[0]
        share = unit.parameter_bytes / max(1, profile.sections[first].parameter_bytes)
        for part, table in tables.items():
            known = unit.optimizer_bytes if part == "optimizer" else None
            table += more * (round(own[part][first] * share) if known is None else known)
    return tables

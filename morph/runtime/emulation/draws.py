"""Durations of a step's tasks and messages: medians, or draws from the profile's quantiles.

The uniform numbers belong to (seed, step, kind, section, micro-batch), exactly as the simulator's do (its draw is the
step): a rehearsal and a simulation with one seed have the same luck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from morph.contract.emulation import Duration

Seconds = npt.NDArray[np.float64]
KINDS = ("forward", "recompute", "backward", "activation", "gradient")


class Luck:
    """The times of one step.

    Args:
        seed: Of the draws; None: medians.
        step: The step.
        num_sections: K.
        num_micro_batches: N over all replicas.
    """

    def __init__(self, seed: int | None, step: int, num_sections: int, num_micro_batches: int) -> None:
        self._seed = seed
        self._step = step
        self._shape = (num_sections, num_micro_batches)

    def times_s(self, kind: str, sections: Mapping[int, Duration], micro_batches: Sequence[int]) -> Seconds:
        """Of each micro-batch (by global number), what these sections take together."""
        total: Seconds = self.section_times_s(kind, sections, micro_batches).sum(axis=0)
        return total

    def section_times_s(self, kind: str, sections: Mapping[int, Duration], micro_batches: Sequence[int]) -> Seconds:
        """Of each section and micro-batch: float64[sections, micro-batches]."""
        times_s = np.empty((len(sections), len(micro_batches)))
        varied = {section: duration for section, duration in sections.items() if duration.quantiles_s}
        if self._seed is None:
            varied = {}
        for row, duration in zip(times_s, sections.values(), strict=True):
            row[:] = duration.median_s
        if varied:
            assert self._seed is not None
            random = np.random.default_rng([self._seed, self._step, KINDS.index(kind)])
            numbers = random.random(self._shape)
            for row, (section, duration) in zip(times_s, sections.items(), strict=True):
                if section in varied:
                    at = np.linspace(0.0, 1.0, len(duration.quantiles_s))
                    row[:] = np.interp(numbers[section, list(micro_batches)], at, duration.quantiles_s)
        return times_s

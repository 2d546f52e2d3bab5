"""Task and message times drawn from the quantiles that calibration kept.

A draw of a timing is its quantile function, linear between neighbouring quantiles, at a uniform number. The numbers
depend on (seed, draw, kind, section, micro-batch of the global batch) but not on the shape, so that shapes with the
same m are compared under the same jitter (common random numbers). Sections are drawn independently and summed to a
stage. A timing without quantiles always has its median.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from morph.contract.profile import LinkProfile, Profile, SendTime, Timing
from simulator.inputs.transfer import Curve

Floats = npt.NDArray[np.float64]
_TASKS = ("forward", "recompute", "backward")
_MESSAGES = ("activation", "gradient")


@dataclass(frozen=True)
class Spread:
    """Times of the mini-batch under jitter, in seconds, over ``num_draws`` draws."""

    mean_s: float
    p5_s: float
    p95_s: float
    draws_s: tuple[float, ...]

    @property
    def num_draws(self) -> int:
        """How many mini-batches were drawn."""
        return len(self.draws_s)


def spread_of(draws_s: Sequence[float]) -> Spread:
    """Return the mean, and the 5th and 95th percentile, of draws."""
    low, high = np.percentile(draws_s, [5, 95])
    return Spread(float(np.mean(draws_s)), float(low), float(high), tuple(draws_s))


def has_jitter(profile: Profile, micro_batch_size: int) -> bool:
    """Whether the time of any task or message has quantiles to draw from."""
    tasks = (
        timing
        for section in profile.sections
        for timing in (section.forward[micro_batch_size], section.backward[micro_batch_size])
    )
    links = (profile.intra_node, profile.inter_node)
    messages = (entry.time for link in links for kind in _MESSAGES for entry in getattr(link, kind))
    return any(timing.quantiles_s for timing in (*tasks, *messages))


class JitterDraw:
    """The uniform numbers of one draw, and the resulting times; ``num_micro_batches``: N of the global batch."""

    def __init__(self, profile: Profile, micro_batch_size: int, num_micro_batches: int, seed: int, draw: int) -> None:
        self._profile, self._m = profile, micro_batch_size
        self._shape = (len(profile.sections), num_micro_batches)
        self._seeds = (seed, draw)
        self._known: dict[str, Floats] = {}

    def _numbers(self, kind: str) -> Floats:
        """Return the uniform numbers for a kind of task or message: float64[K, N] in [0, 1)."""
        if kind not in self._known:
            number = (*_TASKS, *_MESSAGES).index(kind)
            self._known[kind] = np.random.default_rng([*self._seeds, number]).random(self._shape)
        return self._known[kind]

    def task_sums_ns(self, kind: str) -> Floats:
        """Return running sums over sections of "forward", "recompute" or "backward" times: float64[K + 1, N]."""
        measured = "backward" if kind == "backward" else "forward"
        numbers = self._numbers(kind)
        times = np.empty_like(numbers)
        for index, section in enumerate(self._profile.sections):
            times[index] = drawn_ns(getattr(section, measured)[self._m], numbers[index])
        return np.concatenate([np.zeros((1, numbers.shape[1])), np.cumsum(times, axis=0)])

    def message_ns(self, kind: str, section: int, link: LinkProfile, size_bytes: float) -> Floats:
        """Return times of the "activation" or "gradient" that crosses the cut behind a section: float64[N]."""
        return _at(_quantiles_ns(getattr(link, kind), size_bytes), self._numbers(kind)[section])


class MeanJitter:
    """The mean of several draws, with the interface of one; see :class:`JitterDraw` for the arguments."""

    def __init__(
        self, profile: Profile, micro_batch_size: int, num_micro_batches: int, seed: int, num_draws: int
    ) -> None:
        self._draws = [(profile, micro_batch_size, num_micro_batches, seed, draw) for draw in range(num_draws)]
        self._sent_bytes = [float(micro_batch_size * section.output_bytes_per_sample) for section in profile.sections]
        self._known: dict[tuple[str, int], Floats] = {}

    def task_sums_ns(self, kind: str) -> Floats:
        return self._mean((kind, 0), lambda jitter: jitter.task_sums_ns(kind))

    def message_ns(self, kind: str, section: int, link: LinkProfile, size_bytes: float) -> Floats:  # noqa: ARG002
        """See :meth:`JitterDraw.message_ns`; for the size that the section sends."""
        sent = list(enumerate(self._sent_bytes))
        of_all = self._mean(
            (kind, id(link)),
            lambda jitter: np.stack([jitter.message_ns(kind, index, link, size) for index, size in sent]),
        )
        times: Floats = of_all[section]
        return times

    def _mean(self, key: tuple[str, int], of: Callable[[JitterDraw], Floats]) -> Floats:
        if key not in self._known:
            total = of(JitterDraw(*self._draws[0]))
            for draw in self._draws[1:]:
                total += of(JitterDraw(*draw))
            self._known[key] = total / len(self._draws)
        return self._known[key]


def drawn_ns(timing: Timing, numbers: Floats) -> Floats:
    """Return the times of one timing at uniform numbers in [0, 1)."""
    if not timing.quantiles_s:
        return np.full(numbers.shape, timing.median_s * 1e9)
    return _at(np.asarray(timing.quantiles_s) * 1e9, numbers)


def message_quantiles_ns(times: Sequence[SendTime], size_bytes: float) -> Floats:
    """Return even quantiles of a message of any size, interpolated like the median; one number if there are none."""
    by_size = {entry.size_bytes: entry.time for entry in times}
    longest = max((len(timing.quantiles_s) for timing in by_size.values()), default=0) or 1
    levels = np.linspace(0, 1, longest)
    drawn = [drawn_ns(timing, levels) for timing in by_size.values()]
    at_levels = [Curve(list(by_size), [float(times_ns[level]) for times_ns in drawn]) for level in range(longest)]
    size = np.array([size_bytes])
    return np.maximum.accumulate([float(curve(size)[0]) for curve in at_levels])


@lru_cache(maxsize=4096)
def _quantiles_ns(times: tuple[SendTime, ...], size_bytes: float) -> Floats:
    return message_quantiles_ns(times, size_bytes)


def _at(quantiles_ns: Floats, numbers: Floats) -> Floats:
    """Return the piecewise linear quantile function at these numbers."""
    if len(quantiles_ns) == 1:
        return np.full(numbers.shape, quantiles_ns[0])
    times: Floats = np.interp(numbers * (len(quantiles_ns) - 1), np.arange(len(quantiles_ns)), quantiles_ns)
    return times

"""What "best" means: examples per second, dollars per example, or progress under revocations.

*Dollars per example* of a shape: price per hour of the whole nodes that it uses, times the mini-batch's time, divided
by its M samples. Idle nodes are assumed to be given back, so shapes with fewer replicas than possible are considered,
too.

*Expected progress* of a shape that uses U of V nodes, examples per second:

    progress = sum over n of p(n) M/T'(n) exp(-h c) x/(exp(x) - 1),    x = h T'(n)

p(n): probability that n nodes live. Each living node is revoked r times a second, b nodes together; each missing one is
replaced after w seconds on average (both memoryless), so the stationary p follows from the balance of the flows between
n and n + 1; for b = 1 it is binomial: each node lives for 1/(1 + r w) of the time, whatever the distribution of w.

T(n): time of the mini-batch: if n >= U that of the shape, else that of the best shape for n nodes of average size. h:
revocations a second that hit a node in use; each ends the mini-batch under way and costs a pause c, which restarts at
another revocation. So training runs for exp(-h c) of the time, of which the share x/(exp(x) - 1) counts: each
revocation loses half a mini-batch if mini-batches are short, and everything if none is ever completed. g: replacements
a second that a faster shape can use; they join between mini-batches, with one pause for all, so T'(n) = T(n) + c (1 -
exp(-g T'(n) exp(h c))).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from morph.contract import ranges
from simulator.engine.times import Flags, Floats, Ints
from simulator.inputs.request import PlanRequest

Shape = tuple[int, int]
"""(P, D)"""

_TAIL = 1e-7
"""Numbers of living nodes that are less probable than this are ignored."""
_MOST_FALLBACKS = 128
"""The most numbers of living nodes for which a shape is looked up; the rates of others are interpolated."""
_LARGE = 1e200
"""Chances, before their sum is made 1, are divided by this where they exceed it, so that none overflows."""


class Objective(Protocol):
    """A cost to minimise, which does not decrease when a shape's mini-batch takes longer."""

    def cost(self, shape: Shape, mini_batch_s: float) -> float:
        """Return the cost of a shape whose mini-batch takes so long."""

    def least_cost(self, shape: Shape, mini_batch_s: float) -> float:
        """Return a lower bound of the cost, which is quick to compute."""

    def value(self, shape: Shape, mini_batch_s: float) -> float:
        """Return the objective's value in readable form."""


@dataclass(frozen=True)
class Fastest:
    """Most examples per second."""

    batch_size: int

    def cost(self, shape: Shape, mini_batch_s: float) -> float:  # noqa: ARG002 - the shape plays no part
        """Return the seconds of a mini-batch."""
        return mini_batch_s

    least_cost = cost

    def value(self, shape: Shape, mini_batch_s: float) -> float:  # noqa: ARG002 - the shape plays no part
        """Return examples per second."""
        return self.batch_size / mini_batch_s


@dataclass(frozen=True)
class Cheapest:
    """Fewest dollars per example; ``usd_per_h``: the price of a GPU."""

    batch_size: int
    usd_per_h: float

    def cost(self, shape: Shape, mini_batch_s: float) -> float:
        """Return dollars per example."""
        return self.usd_per_h * shape[0] * shape[1] / 3600 * mini_batch_s / self.batch_size

    least_cost = cost

    def value(self, shape: Shape, mini_batch_s: float) -> float:
        """Return dollars per example."""
        return self.cost(shape, mini_batch_s)


@dataclass(frozen=True)
class Revocations:
    """How often nodes are revoked, for how long a morph then stops training (``pause_s``), and when nodes are replaced.

    ``replacement_s``: from a revocation until the replacement is in use. ``together``: the number of nodes that one
    revocation takes; all living ones if fewer are left.
    """

    per_hour: float
    pause_s: float = PlanRequest.pause_s
    replacement_s: float = PlanRequest.replacement_s
    together: int = 1

    def __post_init__(self) -> None:
        ranges.REVOCATIONS_PER_HOUR.check("revocations_per_hour", self.per_hour)
        ranges.PAUSE_S.check("pause_s", self.pause_s)
        ranges.REPLACEMENT_S.check("replacement_s", self.replacement_s)
        ranges.GPUS.check("revoked_together", self.together)

    def living(self, num_nodes: int) -> Floats:
        """Return the stationary probabilities that 0, 1, ..., ``num_nodes`` nodes live: float64[V + 1].

        The flows between n and n + 1 balance: p(n) (V - n)/w = sum over k = n + 1 to n + b of p(k) k r/b.
        """
        gone = self.per_hour / 3600 * self.replacement_s / self.together
        chances, falls = np.zeros(num_nodes + 1), np.zeros(num_nodes + 1)  # falls: p(k) k r w / b
        chances[num_nodes], falls[num_nodes] = 1.0, num_nodes * gone
        for number in range(num_nodes - 1, -1, -1):
            chances[number] = falls[number + 1 : number + 1 + self.together].sum() / (num_nodes - number)
            falls[number] = chances[number] * number * gone
            if chances[number] > _LARGE:
                chances, falls = chances / _LARGE, falls / _LARGE
        normed: Floats = chances / chances.sum()
        return normed


@dataclass(frozen=True)
class _Living:
    """Probable numbers n of living nodes, each with its probability and the best shape's rate, examples per second.

    ``used``: the fewest nodes with which a shape has that rate. ``grows``: whether one more node makes it faster.
    """

    numbers: Ints
    chances: Floats
    rates: Floats
    used: Ints
    grows: Flags


@dataclass(frozen=True)
class MostProgress:
    """Most progress under revocations.

    ``batch_size``: M; ``num_nodes``: V; ``num_used``: returns U of a shape. ``fallback`` returns the examples per
    second of the best shape when this many nodes are missing, or 0 if no shape fits.
    """

    batch_size: int
    revocations: Revocations
    num_nodes: int
    num_used: Callable[[Shape], int]
    fallback: Callable[[int], float]

    def cost(self, shape: Shape, mini_batch_s: float) -> float:
        """Return the seconds per example, including pauses."""
        value = self.value(shape, mini_batch_s)
        return 1.0 / value if value > 0 else math.inf

    def least_cost(self, shape: Shape, mini_batch_s: float) -> float:  # noqa: ARG002 - the shape plays no part
        """Return the seconds per example without revocations."""
        return mini_batch_s / self.batch_size

    def value(self, shape: Shape, mini_batch_s: float) -> float:
        """Return examples per second, including pauses."""
        given, living, planned = self.revocations, self._living, self.num_used(shape)
        numbers, per_s = living.numbers, given.per_hour / 3600
        whole = numbers >= planned
        rates = np.where(
            whole, self.batch_size / mini_batch_s, np.minimum(self.batch_size / mini_batch_s, living.rates)
        )
        used = np.where(whole, planned, np.minimum(planned, living.used))
        hits_per_s = per_s * self._hit(numbers, used)
        joins_per_s = np.zeros(len(numbers))
        if given.replacement_s > 0:
            joins_per_s = np.where(living.grows & ~whole, (self.num_nodes - numbers) / given.replacement_s, 0.0)
        training = rates > 0
        trained_s = self.batch_size / np.where(training, rates, 1.0)
        share = np.exp(-hits_per_s * given.pause_s)
        step_s = trained_s
        for _ in range(2):  # more pauses make a step longer, so that more nodes join during it
            elapsed_s = step_s / np.maximum(share, 1e-300)
            step_s = trained_s + given.pause_s * -np.expm1(-joins_per_s * elapsed_s)
        steps = np.clip(hits_per_s * step_s, 1e-12, 700.0)
        kept = share * steps / np.expm1(steps)
        return float((living.chances * np.where(training, self.batch_size / step_s * kept, 0.0)).sum())

    @cached_property
    def _living(self) -> _Living:
        chances = self.revocations.living(self.num_nodes)
        likely = np.flatnonzero(chances >= _TAIL)
        numbers = np.arange(likely[0], min(self.num_nodes, likely[-1] + 1) + 1)
        requested = np.unique(
            np.linspace(numbers[0], numbers[-1], min(len(numbers), _MOST_FALLBACKS)).round().astype(int)
        )
        known = [self.fallback(self.num_nodes - number) if number else 0.0 for number in requested.tolist()]
        rates = np.maximum.accumulate(np.interp(numbers, requested, known))
        return _Living(
            numbers=numbers,
            chances=chances[numbers],
            rates=rates,
            used=numbers[np.searchsorted(rates, rates)],
            grows=np.append(rates[1:] > rates[:-1], False),
        )

    @cached_property
    def _log_factorials(self) -> Floats:
        return np.concatenate([np.zeros(1), np.cumsum(np.log(np.arange(1, self.num_nodes + 1)))])

    def _hit(self, living: Ints, used: Ints) -> Floats:
        """Return the rate of revocations that hit one of the ``used`` nodes, relative to the rate of one node.

        Revocations of n ``living`` nodes, b at once, are n/b times as frequent as those of one node, and the share
        1 - C(n - used, b)/C(n, b) of them hits a used node.
        """
        together = self.revocations.together
        spared = living - used - together

        def at(numbers: Ints) -> Floats:
            found: Floats = self._log_factorials[np.maximum(0, numbers)]
            return found

        missed = np.exp(at(living - used) - at(spared) - at(living) + at(living - together))
        hits: Floats = living / together * (1 - np.where(spared >= 0, missed, 0.0))
        return hits

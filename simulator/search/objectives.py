"""What "best" means: examples per second, dollars per example, or progress under revocations.

*Dollars per example* of a shape: price per hour of the nodes that it uses, whole nodes, times the mini-batch's time
over its M samples. Nodes that it leaves idle are taken to be given back. Shapes with fewer replicas than there is room
for are looked at too.

*Expected progress* of a shape that uses U of V nodes, examples per second:

    progress = sum over n of p(n) M/T'(n) exp(-h c) x/(exp(x) - 1),    x = h T'(n)

p(n): chance that n nodes live. Each living node is revoked r times a second, b at once; each missing one is replaced
after w seconds on average (both memoryless), so the stationary p follows from the balance of what crosses between n and
n + 1; for b = 1 it is binomial, each node living for 1/(1 + r w) of the time, however long replacements take.

T(n): T of the shape as long as n >= U, else that of the best shape for the n that live (of nodes of average size). h:
revocations a second that hit one of the nodes in use; each ends the mini-batch under way and costs a pause c, which
starts over if another one comes. So training continues for exp(-h c) of the time, and x/(exp(x) - 1) of it counts: half
a mini-batch is lost each time where these are short, everything where none is ever completed. g: replacements a second
that a faster shape can use; they are taken in between mini-batches, with one pause for all, so
T'(n) = T(n) + c (1 - exp(-g T'(n) exp(h c))).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from morph.contract import ranges
from morph.contract.errors import PlanError
from simulator.inputs.request import PlanRequest, Price

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Shape = tuple[int, int]
"""(P, D)"""

_TAIL = 1e-7
"""Numbers of living nodes less likely than this are left out."""
_MOST_FALLBACKS = 128
_LARGE = 1e200


class Objective(Protocol):
    """Something to be small, which never falls when a shape's mini-batch takes longer."""

    def cost(self, shape: Shape, mini_batch_s: float) -> float:
        """Of a shape whose mini-batch takes so long."""

    def least_cost(self, shape: Shape, mini_batch_s: float) -> float:
        """No more than the cost, and known at once."""

    def value(self, shape: Shape, mini_batch_s: float) -> float:
        """The same as a person wants to read it."""


@dataclass(frozen=True)
class Fastest:
    """Most examples per second."""

    batch_size: int

    def cost(self, shape: Shape, mini_batch_s: float) -> float:  # noqa: ARG002 - the shape plays no part
        """Seconds of a mini-batch."""
        return mini_batch_s

    least_cost = cost

    def value(self, shape: Shape, mini_batch_s: float) -> float:  # noqa: ARG002 - the shape plays no part
        """Examples per second."""
        return self.batch_size / mini_batch_s


@dataclass(frozen=True)
class Cheapest:
    """Fewest dollars per example."""

    batch_size: int
    usd_per_h: Callable[[Shape], float]

    def cost(self, shape: Shape, mini_batch_s: float) -> float:
        """Dollars per example."""
        return self.usd_per_h(shape) / 3600 * mini_batch_s / self.batch_size

    least_cost = cost

    def value(self, shape: Shape, mini_batch_s: float) -> float:
        """Dollars per example."""
        return self.cost(shape, mini_batch_s)


@dataclass(frozen=True)
class Revocations:
    """How often nodes are taken, and what that costs.

    Args:
        per_hour: How often each living node is revoked.
        pause_s: What a morph stops training for.
        replacement_s: From the revocation of a node until another one has taken its place.
        together: How many nodes one revocation takes, or all that live if those are fewer.
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
        """Chances that 0, 1, ..., ``num_nodes`` nodes live, in the long run: float64[V + 1].

        What comes from above across the line between n and n + 1 is what goes up across it:
        p(n) (V - n)/w = sum over k = n + 1 to n + b of p(k) k r/b.
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
    """Numbers n of living nodes that are likely enough, and of each its chance and what the best shape for it does.

    ``used``: the fewest nodes with which it is as fast. ``grows``: whether one more node would make it faster.
    """

    numbers: Ints
    chances: Floats
    rates: Floats
    used: Ints
    grows: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MostProgress:
    """Most progress under revocations.

    Args:
        batch_size: M.
        revocations: Their rate and what they cost.
        num_nodes: V.
        num_used: U of a shape.
        fallback: Examples per second of the best shape when this many nodes are missing; 0: none fits.
    """

    batch_size: int
    revocations: Revocations
    num_nodes: int
    num_used: Callable[[Shape], int]
    fallback: Callable[[int], float]

    def cost(self, shape: Shape, mini_batch_s: float) -> float:
        """Seconds per example, pauses included."""
        value = self.value(shape, mini_batch_s)
        return 1.0 / value if value > 0 else math.inf

    def least_cost(self, shape: Shape, mini_batch_s: float) -> float:  # noqa: ARG002 - the shape plays no part
        """Seconds per example if nothing is ever revoked."""
        return mini_batch_s / self.batch_size

    def value(self, shape: Shape, mini_batch_s: float) -> float:
        """Examples per second, pauses included."""
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
        for _ in range(2):  # the more pauses, the longer a step, the more nodes join during it
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
        """Revocations that take one of the ``used`` nodes, over those of one node.

        n ``living`` nodes are revoked n/b times as often as one, b at once; 1 - C(n - used, b)/C(n, b) of that hits.
        """
        together = self.revocations.together
        spared = living - used - together

        def at(numbers: Ints) -> Floats:
            found: Floats = self._log_factorials[np.maximum(0, numbers)]
            return found

        missed = np.exp(at(living - used) - at(spared) - at(living) + at(living - together))
        hits: Floats = living / together * (1 - np.where(spared >= 0, missed, 0.0))
        return hits


def usd_per_h_of(price: Price, used_sizes: Mapping[int, int]) -> float:
    """Price per hour of nodes, given how many of each size are used.

    Raises:
        PlanError: a size without a price, or a price below 0.
    """
    total = 0.0
    for size, number in used_sizes.items():
        per_gpu = cast("Mapping[int, float]", price).get(size) if isinstance(price, Mapping) else price
        if per_gpu is None or per_gpu not in ranges.USD_PER_HOUR:
            sizes = ", ".join(map(str, sorted(used_sizes)))
            allowed = f"{ranges.USD_PER_HOUR} in dollars per GPU-hour, for nodes of {sizes} GPUs"
            raise PlanError("is not a price", field="usd_per_gpu_hour", value=price, allowed=allowed)
        total += per_gpu * size * number
    return total

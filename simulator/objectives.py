"""What "best" means: examples per second, dollars per example, or progress under revocations.

*Dollars per example* of a shape: price per hour of the nodes that it uses, whole nodes, times the mini-batch's time
over its M samples. Nodes that it leaves idle are taken to be given back. Shapes with fewer replicas than there is room
for are looked at too.

*Expected progress* of a shape that uses U of V nodes, examples per second:

    progress = sum over n of Poisson(n; V r w) rate(n)  /  (1 + r U (1 + q) c + r U T/2)

r: revocations per node and second, each node on its own (memoryless; zones that go down together are not in it); w:
seconds until a revoked node is replaced, so that on average V r w nodes are missing; rate(n): M/T as long as no more
than the V - U idle spares are missing, else the rate of the best shape for the GPUs that are left (of nodes of average
size); c: pause of one morph, and q = P(n >= V - U), the share of revocations that find no spare and so cost a second
morph when the replacement comes; T/2: the half mini-batch that a revocation loses on average. The revocation of a spare
costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from morph.contract.errors import PlanError

ObjectiveName = Literal["examples_per_s", "usd_per_example", "progress"]
Price = float | Mapping[int, float]
Shape = tuple[int, int]
"""(P, D)"""

PAUSE_S = 1.0
REPLACEMENT_S = 120.0
_TAIL = 1e-4


class Objective(Protocol):
    """Something to be small, which never falls when a shape's mini-batch takes longer."""

    def cost(self, shape: Shape, mini_batch_s: float) -> float:
        """Of a shape whose mini-batch takes so long."""

    def value(self, shape: Shape, mini_batch_s: float) -> float:
        """The same as a person wants to read it."""


@dataclass(frozen=True)
class Fastest:
    """Most examples per second."""

    batch_size: int

    def cost(self, shape: Shape, mini_batch_s: float) -> float:  # noqa: ARG002 - the shape plays no part
        """Seconds of a mini-batch."""
        return mini_batch_s

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

    def value(self, shape: Shape, mini_batch_s: float) -> float:
        """Dollars per example."""
        return self.cost(shape, mini_batch_s)


@dataclass(frozen=True)
class Revocations:
    """How often nodes are taken, and what that costs."""

    per_hour: float
    pause_s: float = PAUSE_S
    replacement_s: float = REPLACEMENT_S

    def __post_init__(self) -> None:
        values = {"revocations_per_hour": self.per_hour, "pause_s": self.pause_s, "replacement_s": self.replacement_s}
        for field, value in values.items():
            if not (math.isfinite(value) and value >= 0):
                raise PlanError("is out of range", field=field, value=value, allowed="0 or more")


@dataclass(frozen=True)
class MostProgress:
    """Most progress under revocations.

    Args:
        batch_size: M.
        revocations: Their rate and what they cost.
        num_nodes: V.
        num_used: U of a shape.
        fallback: Examples per second of the best shape when so many nodes are missing.
    """

    batch_size: int
    revocations: Revocations
    num_nodes: int
    num_used: Callable[[Shape], int]
    fallback: Callable[[int], float]

    def cost(self, shape: Shape, mini_batch_s: float) -> float:
        """Seconds per example, pauses included."""
        return 1.0 / self.value(shape, mini_batch_s)

    def value(self, shape: Shape, mini_batch_s: float) -> float:
        """Examples per second, pauses included."""
        given = self.revocations
        used, per_s = self.num_used(shape), given.per_hour / 3600
        spares, rate = self.num_nodes - used, self.batch_size / mini_batch_s
        chances = poisson(self.num_nodes * per_s * given.replacement_s)
        kept = sum(chances[: spares + 1])
        reached = kept * rate + sum(
            chance * min(rate, self.fallback(missing)) for missing, chance in enumerate(chances) if missing > spares
        )
        without_spare = sum(chances[spares:])
        lost_s = given.pause_s * (1 + without_spare) + mini_batch_s / 2
        return reached / (1 + per_s * used * lost_s)


def poisson(mean: float) -> list[float]:
    """Chances of 0, 1, 2, ... events, until less than 1 in 10,000 is left, which the last one takes."""
    chances = [math.exp(-mean)]
    while 1 - sum(chances) > _TAIL and len(chances) < 1000:
        chances.append(chances[-1] * mean / len(chances))
    chances[-1] += max(0.0, 1 - sum(chances))
    return chances


def usd_per_h_of(price: Price, used_sizes: Mapping[int, int]) -> float:
    """Price per hour of nodes, given how many of each size are used.

    Raises:
        PlanError: a size without a price, or a price below 0.
    """
    total = 0.0
    for size, number in used_sizes.items():
        per_gpu = price if isinstance(price, int | float) else price.get(size)
        if per_gpu is None or not (math.isfinite(per_gpu) and per_gpu >= 0):
            allowed = f"0 or more dollars per GPU-hour, for nodes of {', '.join(map(str, sorted(used_sizes)))} GPUs"
            raise PlanError("is no price", field="usd_per_gpu_hour", value=price, allowed=allowed)
        total += per_gpu * size * number
    return total

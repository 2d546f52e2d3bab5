"""The sums of one step: buckets of gradients, which are reduced during the backward, and other values for all members.

Each step has its own sums, so that reductions of an abandoned ring cannot write into those of the next ring. Nothing is
applied before all sums are complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from morph.contract.errors import InputError
from morph.contract.messages import WEIGHT
from morph.elastic.settings import DIGEST_BYTES, Digest
from morph.runtime.groups.channels import Ring
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.accumulators import (
    Accumulator,
    ExactAccumulator,
    FastAccumulator,
    Reduced,
    change_like,
    change_of,
)
from morph.runtime.state.fixed_point import first_exponent
from morph.runtime.state.parts import Memory
from morph.runtime.state.reduction import Reduction

Accumulation = Literal["exact", "fast"]
BUCKET_BYTES = 25 * 2**20
LOSS, JOINING, DIGEST = "/loss", "/joining", "/digest"  # and WEIGHT, "/weight"
"""Names of sums other than gradients and buffers; a parameter's name cannot begin with a slash."""


def buckets_of(parameters: Mapping[str, Parameter]) -> list[list[str]]:
    """Return names by bucket, in the order in which a backward usually reaches them: the last first."""
    buckets: list[list[str]] = []
    size = BUCKET_BYTES
    for name, parameter in reversed(list(parameters.items())):
        if size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += parameter.numel() * parameter.element_size()
    return buckets


@dataclass(frozen=True)
class Kind:
    """How sums are formed; the same for every member.

    ``buckets``: parameters that were trained in the previous step. ``late``: other parameters that are trained now. A
    member cannot know whether the others train the late parameters too before it has their digests, so in this step
    these are reduced after everything else.
    """

    accumulation: Accumulation
    num_contributions: int
    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Tensor]
    buckets: Sequence[Sequence[str]]
    late: Sequence[Sequence[str]] = ()


class Signals:
    """Numbers other than gradients that all workers need, summed over the ring."""

    def __init__(self, loss: float, rate: float | None, digest: Digest, *, has_joiners: bool) -> None:
        told = torch.tensor([loss, rate or 0.0, rate is not None, has_joiners], dtype=torch.float64)
        self._told = torch.cat((told, digest.numbers))
        self._digest = digest

    def reduce(self, ring: Ring | None, num_workers: int) -> tuple[float, float | None, bool]:
        """Return the mean loss, the mean throughput of the workers that know theirs, and whether a joiner waits.

        Raises GenerationAborted or PeerLost if the ring has ended. Raises SettingsDiffer if not all members have the
        same settings.
        """
        if ring is not None:
            ring.reduce(self._told, torch.distributed.ReduceOp.SUM).wait("the others to meet")
        self._digest.check(self._told[4:], num_workers)
        loss, rate, num_rates, joining = self._told[:4].tolist()
        return loss / num_workers, rate / num_rates if num_rates else None, joining > 0


class MemberSums:
    """The sums of one member in one step.

    ``exponents``: scales of exact sums; a missing one is the initial scale. Without ``ring``, this member is alone.
    ``memory`` is on the parameters' device; it may hold blocks of an earlier step whose gradients are applied.
    """

    def __init__(
        self,
        kind: Kind,
        exponents: Mapping[str, int],
        ring: Ring | None,
        interrupt: Interrupt,
        divisor: int,
        memory: Memory,
    ) -> None:
        self._kind, self._ring, self._divisor, self.memory = kind, ring, divisor, memory
        self._interrupt, self._reduction = interrupt, Reduction(interrupt, divisor, memory)
        first = first_exponent(kind.num_contributions)
        is_exact = kind.accumulation == "exact"
        self._aside = {name: change_like(buffer, exact=is_exact) for name, buffer in kind.buffers.items()}
        self._aside |= {name: torch.zeros((), dtype=torch.float64) for name in (LOSS, WEIGHT, JOINING)}
        self._aside[DIGEST] = torch.zeros(8 * DIGEST_BYTES, dtype=torch.float64)
        self._accumulators: list[Accumulator] = []
        for names in (*kind.buckets, *kind.late):
            named = {name: kind.parameters[name] for name in names}
            self._accumulators.append(self._made(named, exponents, first, frozenset(), memory))
        self._accumulator_of = {
            name: one
            for names, one in zip((*kind.buckets, *kind.late), self._accumulators, strict=True)
            for name in names
        }
        self._accumulators.append(self._made(self._aside, exponents, first, frozenset(self._aside), Memory()))
        self._bucket_of = {name: index for index, names in enumerate(kind.buckets) for name in names}
        self._missing = [{name for name in names if kind.parameters[name].requires_grad} for names in kind.buckets]
        self._num_started = 0
        self._digest: Digest | None = None
        self.is_last_share = False

    def _made(
        self,
        named: Mapping[str, Tensor],
        exponents: Mapping[str, int],
        first: int,
        changes: frozenset[str],
        memory: Memory,
    ) -> Accumulator:
        if self._kind.accumulation == "fast":
            return FastAccumulator(named, changes=changes, memory=memory)
        scales = {name: exponents.get(name, first) for name in named}
        return ExactAccumulator(named, scales, self._kind.num_contributions, changes=changes, memory=memory)

    def add_gradient(self, name: str, parameter: Parameter) -> None:
        """Add a parameter's gradient of one share; in the last share this may complete the parameter's bucket.

        Raises InputError if the parameter was not trained when the step began.
        """
        if name not in self._accumulator_of:
            allowed = "changes between two steps, not in the function that returns the loss"
            raise InputError("requires_grad was set within a step", field=name, allowed=allowed)
        gradient = parameter.grad
        assert gradient is not None
        # an embedding with sparse=True has a sparse gradient, but sums are dense
        gradient = gradient if gradient.layout == torch.strided else gradient.to_dense()
        self._accumulator_of[name].add(name, gradient)
        parameter.grad = None
        if self.is_last_share and name in self._bucket_of:
            self._missing[self._bucket_of[name]].discard(name)
            while self._num_started < len(self._missing) and not self._missing[self._num_started]:
                self._start_next()

    def add_loss(self, loss: float, weight: float = 1.0) -> None:
        """Add a share's loss: a mean, or a total with its weight."""
        for name, value in ((LOSS, loss), (WEIGHT, weight)):
            self._accumulators[-1].add(name, torch.tensor(value, dtype=torch.float64))

    def add_changes(self, before: Mapping[str, Tensor]) -> None:
        """Add the change that one share made to the buffers."""
        for name, buffer in self._kind.buffers.items():
            self._accumulators[-1].add(name, change_of(before[name], buffer).cpu())

    def add_joining(self) -> None:
        """Signal that a joiner waits to be let in."""
        self._accumulators[-1].add(JOINING, torch.ones((), dtype=torch.float64))

    def add_digest(self, digest: Digest) -> None:
        """Add the digest of this member's settings, to compare it with those of the ring's other members."""
        self._digest = digest
        self._accumulators[-1].add(DIGEST, digest.numbers)

    def _start_next(self) -> None:
        self._reduction.put(self._accumulators[self._num_started], self._ring)
        self._num_started += 1

    def reduced(self, step: int) -> list[Reduced]:
        """Reduce the remaining sums, wait for all, and return them; sums that are not gradients come last.

        Raises GenerationAborted or PeerLost if the ring has ended. Raises NonFiniteGradient if a gradient is NaN or
        infinite. Raises SettingsDiffer if not all members have the same settings.
        """
        while self._num_started < len(self._kind.buckets):
            self._start_next()
        num_buckets = len(self._kind.buckets)
        *gradients, aside = self._accumulators
        self._reduction.put(aside, self._ring)
        self._reduction.finish()
        first = [accumulator.finish(self._divisor, step) for accumulator in gradients[:num_buckets]]
        signals = aside.finish(self._divisor, step)
        if self._digest is not None and self._ring is not None:
            self._digest.check(signals.gradients[DIGEST] * self._divisor, self._ring.size)
        late = Reduction(self._interrupt, self._divisor, self.memory)
        for accumulator in gradients[num_buckets:]:
            late.put(accumulator, self._ring)
        late.finish()
        return [
            *first,
            *(accumulator.finish(self._divisor, step) for accumulator in gradients[num_buckets:]),
            signals,
        ]

"""How much slower tasks are when workers of one node compute at once (shared caches, memory and clock)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from morph.contract.profile import Contention


def slowdown(measured: Sequence[Contention], num_busy: int) -> float:
    """Time of a task beside ``num_busy - 1`` others on its node, over its time alone.

    In the steady state of a pipeline all its workers compute, so ``num_busy`` is the number of workers on the
    node, or of its cores if those are fewer. Linear between measured numbers (alone: 1) and constant beyond the
    largest; never below 1, and 1 where nothing was measured.
    """
    numbers = [1, *(entry.num_busy for entry in measured)]
    factors = [1.0, *(entry.factor for entry in measured)]
    order = np.argsort(numbers, kind="stable")
    return float(np.interp(num_busy, np.array(numbers)[order], np.array(factors)[order]))

"""Ranges of the numbers that a user gives: they refuse wrong units, typing errors, and what overflows nanoseconds."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from morph.contract.errors import PlanError

SECTIONS = 1000


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included; with ``above``, ``low`` is excluded."""

    low: float
    high: float
    whole: bool = False
    above: bool = False

    @property
    def field(self) -> Any:
        """The range as metadata for ``Annotated``, in a type of the contract."""
        if self.above:
            return Field(strict=True, gt=self.low, le=self.high)
        return Field(strict=True, ge=self.low, le=self.high)

    def __str__(self) -> str:
        number = "a whole number" if self.whole else "a number"
        high = f"{int(self.high)}" if self.whole else f"{self.high:.16g}"
        return f"{number} above {self.low:g}, at most {high}" if self.above else f"{number} from {self.low:g} to {high}"

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool | str):
            return False
        try:
            number = operator.index(value) if self.whole else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            return False
        fits = self.low < number if self.above else self.low <= number
        return fits and number <= self.high and math.isfinite(number)

    def check(self, field: str, value: object) -> None:
        """Refuse an argument that is out of range."""
        if value not in self:
            raise PlanError("is out of range", field=field, value=value, allowed=str(self))


def check_counts(**given: object) -> None:
    """Refuse arguments that are not counts; None is "not given"."""
    for field, value in given.items():
        if value is not None:
            COUNT.check(field, value)


SECONDS = Range(0, 86_400)
"""Seconds of one task or message: up to a day."""
POLICY_SECONDS = Range(0, 1e9, above=True)
"""Seconds of a wait: up to thirty years, for users who want no limit."""
PATIENCE_S = Range(0, 1e9)
"""Seconds of a wait that may also be zero."""
BYTES = Range(0, 2**46, whole=True)
"""Bytes of one section or sample: up to 64 TiB."""
MEMORY_BYTES = Range(1, 2**50, whole=True)
MEMORY_GIB = Range(0, 2**20, above=True)
BYTES_PER_S = Range(0, 1e15, above=True)
COUNT = Range(1, 2**31, whole=True)
GPUS = Range(1, 100_000, whole=True)
MICRO_BATCH = Range(1, 2**20, whole=True)
BATCH = Range(1, 10**9, whole=True)
SLOTS = GPUS
FACTOR = Range(0, 100, above=True)
TOLERANCE = Range(0, 0.5)
"""Factor of a slow worker, or of workers that share a node."""
SEED = Range(0, 2**63 - 1, whole=True)
RUNNERS_UP = Range(0, 2**31, whole=True)
DRAWS = Range(1, 1000, whole=True)
REVOCATIONS_PER_HOUR = Range(0, 3600)
PAUSE_S = SECONDS
MTTP_S = Range(1, 1e9)
"""Mean time to preemption of a VM."""
TRACE_SPEED = Range(0.001, 1e9)
REPLACEMENT_S = Range(0, 1e7)
USD_PER_HOUR = Range(0, 1e6)
USD_PER_HOUR_AT_MOST = Range(0, 1e6, above=True)
USD_PER_GB = Range(0, 1000)
GBIT_PER_S = Range(0.0001, 1e5)
"""With less, a message takes longer than a task may (SECONDS)."""
LATENCY_MS = Range(0, 1e5)
USD_AT_MOST = Range(0, 1e9, above=True)
DEVIATIONS = Range(0, 1000)
GAIN = Range(0, 1000)
"""A share of a whole."""

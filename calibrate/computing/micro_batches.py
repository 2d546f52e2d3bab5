"""Which micro-batch sizes to measure (Varuna 4.3: growing m until F(m)/m stops improving)."""

from __future__ import annotations

from collections.abc import Sequence

from morph.contract.errors import JobError

MIN_GAIN = 0.03


def growing_sizes(batch_size: int) -> tuple[int, ...]:
    """Return divisors of M from 1, each at least twice the one before."""
    sizes = [1]
    for candidate in range(2, batch_size + 1):
        if batch_size % candidate == 0 and candidate >= 2 * sizes[-1]:
            sizes.append(candidate)
    return tuple(sizes)


def checked_sizes(sizes: Sequence[int], batch_size: int) -> tuple[int, ...]:
    """Return the sizes ascending.

    Raises:
        JobError: when one does not divide M, or there is none.
    """
    for size in sizes:
        if size <= 0 or batch_size % size:
            raise JobError(
                "does not divide the global batch",
                source="calibration",
                field="micro_batch_size",
                value=size,
                allowed=f"divisors of {batch_size}",
            )
    if not sizes:
        raise JobError("is empty", source="calibration", field="micro_batch_sizes", allowed="at least one size")
    return tuple(sorted(set(sizes)))


def still_improves(seconds_per_sample: Sequence[float]) -> bool:
    """Whether the newest size computes a sample at least 3 % faster than the best before it."""
    if len(seconds_per_sample) < 2:
        return True
    return seconds_per_sample[-1] < (1 - MIN_GAIN) * min(seconds_per_sample[:-1])

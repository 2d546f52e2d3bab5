"""The micro-batch sizes m that are possible for a job."""

from __future__ import annotations

from morph.contract import ranges
from morph.contract.errors import PlanError
from morph.contract.profile import Profile


def num_micro_batches(profile: Profile, micro_batch_size: int) -> int:
    """Return N = M / m. Raises PlanError if M is not divisible by m; the message names the measured m that divide M."""
    batch = profile.job.batch_size
    if batch % micro_batch_size:
        allowed = _list(_divisors(profile)) or "none of those measured"
        raise PlanError(
            f"does not divide the batch of {batch} samples",
            field="micro_batch_size",
            value=micro_batch_size,
            allowed=allowed,
        )
    return batch // micro_batch_size


def possible_micro_batch_sizes(profile: Profile, wanted: int | None = None) -> tuple[int, ...]:
    """Return the possible m in ascending order: ``wanted``, or the job's own, or all that were measured.

    Raises PlanError if ``wanted`` was not measured or does not divide M, or no measured m divides M.
    """
    ranges.check_counts(micro_batch_size=wanted)
    fixed = wanted if wanted is not None else profile.job.micro_batch_size
    if fixed is not None:
        if fixed not in profile.micro_batch_sizes:
            allowed = _list(_divisors(profile)) or _list(profile.micro_batch_sizes)
            raise PlanError("was not measured", field="micro_batch_size", value=fixed, allowed=allowed)
        num_micro_batches(profile, fixed)
        return (fixed,)
    sizes = _divisors(profile)
    if not sizes:
        raise PlanError(
            f"no measured micro-batch size divides the batch of {profile.job.batch_size} samples",
            field="batch_size",
            value=profile.job.batch_size,
            allowed=f"a multiple of one of {_list(profile.micro_batch_sizes)}",
        )
    return sizes


def knee_micro_batch_size(profile: Profile, wanted: int | None = None) -> int:
    """Return the m of a single simulation: the smallest possible m at which F(m)/m stops improving.

    F(m)/m stops improving where the next m is less than 5 % faster per sample (Varuna, section 4.4).
    """
    sizes = possible_micro_batch_sizes(profile, wanted)
    per_sample = [sum(section.forward[m].median_s for section in profile.sections) / m for m in sizes]
    knee = 0
    while knee + 1 < len(sizes) and per_sample[knee + 1] < 0.95 * per_sample[knee]:
        knee += 1
    return sizes[knee]


def _divisors(profile: Profile) -> tuple[int, ...]:
    return tuple(m for m in profile.micro_batch_sizes if profile.job.batch_size % m == 0)


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))

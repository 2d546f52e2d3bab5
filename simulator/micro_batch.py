"""Choosing the micro-batch size m: once per job, so that the arithmetic is the same in every shape."""

from __future__ import annotations

from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from morph.contract.profile import Profile
from simulator.costs import SectionCosts
from simulator.partition import partition_table

KNEE = 0.05


def num_micro_batches(profile: Profile, micro_batch_size: int) -> int:
    """N = M / m.

    Raises:
        PlanError: M is not divisible by m; names the measured m that would do.
    """
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


def choose_micro_batch_size(
    profile: Profile,
    schedule: Schedule,
    memory_bytes: int | None,
    wanted: int | None = None,
    *,
    recompute: bool = True,
) -> int:
    """m: the one wanted, else the job's own, else the smallest m at which F(m)/m stops improving.

    "Stops improving": the next measured m that divides M is less than 5 % faster per sample (Varuna, section
    4.4). A smaller m is taken when not even the deepest pipeline holds that one in memory. The number of
    GPUs plays no part.

    Raises:
        PlanError: the m wanted was not measured or does not divide M, or no measured m divides M.
    """
    fixed = wanted if wanted is not None else profile.job.micro_batch_size
    if fixed is not None:
        if fixed not in profile.micro_batch_sizes:
            allowed = _list(_divisors(profile)) or _list(profile.micro_batch_sizes)
            raise PlanError("was not measured", field="micro_batch_size", value=fixed, allowed=allowed)
        num_micro_batches(profile, fixed)
        return fixed
    sizes = _divisors(profile)
    if not sizes:
        raise PlanError(
            f"no measured micro-batch size divides the batch of {profile.job.batch_size} samples",
            field="batch_size",
            value=profile.job.batch_size,
            allowed=f"a multiple of one of {_list(profile.micro_batch_sizes)}",
        )
    per_sample = [sum(section.forward[m].median_s for section in profile.sections) / m for m in sizes]
    knee = 0
    while knee + 1 < len(sizes) and per_sample[knee + 1] < (1 - KNEE) * per_sample[knee]:
        knee += 1
    while (
        knee > 0
        and memory_bytes is not None
        and not _fits_somehow(SectionCosts(profile, sizes[knee], recompute=recompute), schedule, memory_bytes)
    ):
        knee -= 1
    return sizes[knee]


def _fits_somehow(costs: SectionCosts, schedule: Schedule, memory_bytes: int) -> bool:
    total = costs.profile.job.batch_size // costs.micro_batch_size
    table = partition_table(costs, schedule, num_micro_batches=total, memory_bytes=memory_bytes)
    return any(table.fits(depth) for depth in range(1, costs.num_sections + 1))


def _divisors(profile: Profile) -> tuple[int, ...]:
    return tuple(m for m in profile.micro_batch_sizes if profile.job.batch_size % m == 0)


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))

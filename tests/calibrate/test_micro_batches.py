from __future__ import annotations

import pytest

from calibrate.computing.compute import checked_sizes, growing_sizes, still_improves
from morph.contract.errors import JobError


@pytest.mark.parametrize(
    ("batch_size", "sizes"),
    [(32, (1, 2, 4, 8, 16, 32)), (12, (1, 2, 4, 12)), (15, (1, 3, 15)), (7, (1, 7)), (1, (1,))],
)
def test_sizes_at_least_double_and_divide_the_batch(batch_size: int, sizes: tuple[int, ...]) -> None:
    assert growing_sizes(batch_size) == sizes


def test_measuring_continues_while_a_sample_gets_three_percent_cheaper() -> None:
    assert still_improves([1.0])
    assert still_improves([1.0, 0.96])
    assert not still_improves([1.0, 0.98])
    assert not still_improves([1.0, 0.5, 0.6])


@pytest.mark.parametrize(("sizes", "value"), [((5,), "got 5"), ((2, 0), "got 0"), ((), "is empty")])
def test_sizes_that_do_not_divide_the_batch_are_refused(sizes: tuple[int, ...], value: str) -> None:
    with pytest.raises(JobError, match=value):
        checked_sizes(sizes, 12)


def test_given_sizes_are_sorted_and_unique() -> None:
    assert checked_sizes((4, 2, 4), 12) == (2, 4)

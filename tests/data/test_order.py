from __future__ import annotations

import numpy as np
import pytest

from morph.data import sample_indices


def walk(seed: int, num_steps: int, batch_size: int, dataset_size: int) -> list[int]:
    return [int(i) for step in range(num_steps) for i in sample_indices(seed, step, batch_size, dataset_size)]


@pytest.mark.parametrize(("batch_size", "dataset_size"), [(4, 10), (5, 5), (7, 3), (1, 6), (16, 5)])
def test_every_sample_comes_once_per_epoch(batch_size: int, dataset_size: int) -> None:
    order = walk(3, 40, batch_size, dataset_size)
    for first in range(0, len(order) - dataset_size, dataset_size):
        assert sorted(order[first : first + dataset_size]) == list(range(dataset_size))


def test_the_order_is_the_same_for_every_batch_size() -> None:
    assert walk(3, 30, 4, 11) == walk(3, 10, 12, 11) == walk(3, 120, 1, 11)


def test_a_step_needs_no_step_before_it() -> None:
    late = sample_indices(9, 1000, 8, 100)
    walk(9, 5, 8, 100)
    assert np.array_equal(late, sample_indices(9, 1000, 8, 100))
    assert late.dtype == np.int64


def test_epochs_and_seeds_differ() -> None:
    assert walk(0, 1, 50, 50) != walk(1, 1, 50, 50)
    order = walk(0, 2, 50, 50)
    assert order[:50] != order[50:]


def test_the_order_is_a_promise() -> None:
    assert walk(0, 1, 8, 8) == [6, 3, 1, 4, 5, 2, 7, 0]

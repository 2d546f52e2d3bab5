"""Tests of random cases: one test plays every seed, and a failure names its seed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tests.grids import IS_LONG


def each_seed(num_seeds: int, *, in_long: int = 0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with this many values of ``seed``, from 0 on; its other arguments are fixtures.

    ``in_long``: the number of seeds in `make test-long`, if it is larger.
    """
    count = max(num_seeds, in_long) if IS_LONG else num_seeds

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def every(*args: Any, **fixtures: Any) -> None:
            for seed in range(count):
                try:
                    test(*args, seed=seed, **fixtures)
                except BaseException as error:
                    error.add_note(f"seed {seed}")
                    raise

        asked = inspect.signature(test)
        every.__signature__ = asked.replace(  # type: ignore[attr-defined]
            parameters=[parameter for name, parameter in asked.parameters.items() if name != "seed"]
        )
        return every

    return decorate

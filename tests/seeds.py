"""Tests of random cases: every seed in one test, and a failure says which one it was."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def each_seed(num_seeds: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with ``seed`` from 0 on, so many times; its other arguments are fixtures, the same for all."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def every(*args: Any, **fixtures: Any) -> None:
            for seed in range(num_seeds):
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

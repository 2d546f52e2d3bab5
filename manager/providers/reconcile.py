"""Ending all that a run has: at its end, or of a manager that was killed."""

from __future__ import annotations

import time
from collections.abc import Callable

from manager.providers.provider import AGAIN, Provider

PATIENCE_S = 900.0
"""How long it is tried: longer than providers ask to wait. A forgotten VM ends itself at about that time."""
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 120.0


def end_all(
    provider: Provider,
    *,
    told: Callable[[str], None] = lambda _sentence: None,
    patience_s: float = PATIENCE_S,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """End every VM of a run and what was made beside them; blocks until they are gone, for about ``patience_s``.

    What the same call may mend is tried again, after the pause that the provider asks for or one that grows; the last
    time when the patience is over.

    Args:
        provider: Of the run.
        told: Hears what is left and when it is tried again.
        patience_s: In seconds.
        pause: Waits some seconds.
        clock: Seconds, never going back.

    Raises:
        ProviderError: naming what is left.
    """
    until_s, wait_s = clock() + patience_s, FIRST_PAUSE_S
    while True:
        try:
            provider.dismantle()
            return
        except AGAIN as error:
            left_s = until_s - clock()
            if left_s <= 0:
                raise
            next_s = min(wait_s if error.retry_after_s is None else error.retry_after_s, left_s)
            told(f"{error}; again in {next_s:.3g} s")
        pause(next_s)
        wait_s = min(2 * wait_s, LONGEST_PAUSE_S)

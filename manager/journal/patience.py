"""Waiting until a run directory can be written: nothing is done that is not written down first."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from morph.contract.errors import RunDirStuck

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
MOST_PAUSE_S = 2.0
LIMIT_S = 7 * 86400.0

Result = TypeVar("Result")


def patiently(attempt: Callable[[], Result], limit_s: float = LIMIT_S) -> Result:
    """Attempt something until the run directory lets it; says once that it waits, and once that it goes on. Blocks.

    Raises:
        RunDirStuck: it does not within ``limit_s``.
        KeyboardInterrupt: on a second Ctrl-C, as everywhere.
    """
    begin_s, pause_s, told = time.monotonic(), FIRST_PAUSE_S, False
    while True:
        try:
            result = attempt()
        except RunDirStuck as error:
            if time.monotonic() - begin_s >= limit_s:
                raise
            if not told:
                log.warning("the run pauses: %s; it goes on when that has passed (Ctrl-C twice ends it now)", error)
            told = True
            time.sleep(pause_s)
            pause_s = min(MOST_PAUSE_S, 2 * pause_s)
        else:
            if told:
                log.warning("the run goes on after a pause of %.1f s", time.monotonic() - begin_s)
            return result

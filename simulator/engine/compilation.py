"""How the simulator's inner loops are compiled: cached on disk, without the interpreter lock."""

from __future__ import annotations

from typing import Any

import numba

_njit: Any = numba.njit

compiled: Any = _njit(cache=True, nogil=True)
"""For functions that allocate arrays."""

inlined: Any = _njit(cache=True, nogil=True, inline="always")
"""For small helpers of a loop."""


def _without_reference_counts() -> Any:
    """For loops that allocate nothing: counting references of array arguments took two thirds of their time."""
    try:
        return _njit(cache=True, nogil=True, _nrt=False)
    except (KeyError, NameError):  # an option of numba that its documentation does not promise
        return compiled


loop: Any = _without_reference_counts()

"""Durations as a user writes them: 30s, 10m, 3h, 1h30m; a number alone is in seconds."""

from __future__ import annotations

import re

from morph.contract.errors import InputError
from morph.contract.ranges import Range

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+|\d+(?:\.\d+)?", re.ASCII)


def seconds_of(option: str, text: str, allowed: Range) -> float:
    """Return a duration in seconds.

    Args:
        option: That gives it, for the error.
        text: As given.
        allowed: In seconds.

    Raises:
        InputError: it is none, or out of range.
    """
    if _WHOLE.fullmatch(text) is None:
        raise InputError("is not a duration", field=option, value=text, allowed="such as 30s, 10m, 3h or 1h30m")
    parts = _PART.findall(text)
    duration_s = sum(float(number) * _SECONDS[unit] for number, unit in parts) if parts else float(text)
    if duration_s not in allowed:
        raise InputError("is out of range", field=option, value=text, allowed=f"{allowed}, in seconds")
    return duration_s

"""Since when a VM is paid, by two clocks: Azure's and this machine's. Pure."""

from __future__ import annotations

from datetime import datetime
from email.utils import parsedate_to_datetime

AGREE_S = 2.0
"""Clocks that differ by less are taken for equal: an HTTP date has whole seconds, and is some time under way."""


def paid_since_s(created: datetime | None, answered: str | None, now_s: float) -> float | None:
    """Return the second since 1970, by this machine's clock, from which on a VM is paid; None: Azure does not say.

    Args:
        created: The VM's ``timeCreated``, by Azure's clock.
        answered: The ``Date`` of the answer that it is from, by Azure's clock too.
        now_s: This machine's clock when the answer came.
    """
    if created is None:
        return None
    ahead_s = 0.0
    if answered is not None:
        try:
            ahead_s = parsedate_to_datetime(answered).timestamp() - now_s
        except ValueError:
            ahead_s = 0.0
    if abs(ahead_s) < AGREE_S:
        ahead_s = 0.0
    return min(created.timestamp() - ahead_s, now_s)

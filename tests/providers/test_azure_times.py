from __future__ import annotations

from datetime import UTC, datetime
from email.utils import formatdate

import pytest

from manager.providers.azure.group import paid_since_s

NOW_S = 1_790_000_000.0


@pytest.mark.parametrize(
    ("ahead_s", "told", "paid_s"),
    [
        (0.0, True, 100.25),
        (-0.5, True, 100.25),  # clocks that agree as far as a date in whole seconds can say
        (30.0, True, 100.25),
        (-3600.0, True, 100.25),
        (30.0, False, 70.25),  # without a date there is this machine's clock alone
        (150.0, False, 0.0),
    ],
)
def test_how_long_a_vm_has_been_paid_does_not_depend_on_this_machines_clock(
    ahead_s: float, told: bool, paid_s: float
) -> None:
    azure_s = NOW_S + ahead_s
    created = datetime.fromtimestamp((NOW_S if abs(ahead_s) < 2 else azure_s) - 100.25, UTC)
    answered = formatdate(azure_s, usegmt=True) if told else None
    since_s = paid_since_s(created, answered, NOW_S)
    assert since_s is not None
    assert NOW_S - since_s == pytest.approx(paid_s, abs=1e-3)


@pytest.mark.parametrize("answered", ["", "yesterday", "Mon, 99 Jan 2026 00:00:00 GMT"])
def test_a_date_that_is_none_is_passed_over(answered: str) -> None:
    created = datetime.fromtimestamp(NOW_S - 5.0, UTC)
    assert paid_since_s(created, answered, NOW_S) == NOW_S - 5.0
    assert paid_since_s(None, answered, NOW_S) is None

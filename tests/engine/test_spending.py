from __future__ import annotations

import pytest

from manager.engine.spending import Spending
from manager.providers.provider import Price
from morph.contract.cluster import Limits

PRICE = Price(usd_per_h=0.5, source="test")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def spending(**limits: float) -> tuple[Spending, Clock]:
    clock = Clock()
    return Spending(Limits.model_validate(limits), clock), clock


def test_without_limits_all_is_allowed_whatever_it_costs() -> None:
    assert spending()[0].allowed(7, 100, None) == (7, "")


@pytest.mark.parametrize(("living", "allowed"), [(0, 3), (1, 3), (2, 2), (4, 0), (9, 0)])
def test_there_are_never_more_than_the_user_allows(living: int, allowed: int) -> None:
    assert spending(max_vms=4)[0].allowed(3, living, None)[0] == allowed


@pytest.mark.parametrize(("usd_per_h", "allowed"), [(0.4, 0), (0.5, 1), (1.4, 2), (1.5, 3), (9.0, 3)])
def test_all_vms_together_cost_no_more_an_hour(usd_per_h: float, allowed: int) -> None:
    assert spending(usd_per_h=usd_per_h)[0].allowed(3, 0, PRICE)[0] == allowed


def test_dollars_cannot_be_kept_to_without_a_price() -> None:
    assert spending(usd_per_h=1)[0].allowed(1, 0, None)[0] == 0
    count, why = spending(budget_usd=1)[0].allowed(1, 0, None)
    assert count == 0
    assert "vms.usd_per_h" in why


def test_what_lives_is_added_up_and_the_budget_ends_the_asking() -> None:
    spent, clock = spending(budget_usd=2.0)
    spent.living(4, PRICE)
    clock.now_s += 1800
    assert spent.spent_usd(PRICE) == pytest.approx(1.0)
    assert spent.allowed(1, 4, PRICE) == (1, "")
    spent.living(2, PRICE)
    clock.now_s += 3600
    assert spent.spent_usd(PRICE) == pytest.approx(2.0)
    count, why = spent.allowed(1, 2, PRICE)
    assert (count, "2.00 dollars are spent" in why) == (0, True)
    spent.living(0, PRICE)
    clock.now_s += 3600
    assert spent.spent_usd(PRICE) == pytest.approx(2.0)


def test_what_the_run_cost_before_counts_towards_its_budget() -> None:
    spent = Spending(Limits(budget_usd=2.0), Clock(), before_s=4 * 3600.0)
    assert spent.spent_usd(PRICE) == pytest.approx(2.0)
    assert spent.allowed(1, 0, PRICE)[0] == 0
    assert Spending(Limits(budget_usd=2.0), Clock(), before_s=3 * 3600.0).allowed(1, 0, PRICE) == (1, "")

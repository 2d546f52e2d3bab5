from __future__ import annotations

import pytest

from manager.engine.vms.budget import Before, Spending
from manager.providers.interface.provider import Price, Vm
from morph.contract.cluster import Limits
from tests.waiting import Clock

PRICE = Price(usd_per_h=0.5, source="test")


def spending(**limits: float) -> tuple[Spending, Clock]:
    clock = Clock(100.0)
    return Spending(Limits.model_validate(limits), clock, wall_clock=clock), clock


def vms(count: int, **fields: float) -> list[Vm]:
    """Return this many VMs, without a price of their own unless one is given."""
    return [Vm(name=f"job-1-{index}", request="job-1", **fields) for index in range(count)]  # type: ignore[arg-type]


def test_without_limits_all_is_allowed_whatever_it_costs() -> None:
    assert spending()[0].allowed(7, vms(100), None) == (7, "")


@pytest.mark.parametrize(("living", "allowed"), [(0, 3), (1, 3), (2, 2), (4, 0), (9, 0)])
def test_there_are_never_more_than_the_user_allows(living: int, allowed: int) -> None:
    assert spending(max_vms=4)[0].allowed(3, vms(living), None)[0] == allowed


@pytest.mark.parametrize(("usd_per_h", "allowed"), [(0.4, 0), (0.5, 1), (1.4, 2), (1.5, 3), (9.0, 3)])
def test_all_vms_together_cost_no_more_an_hour(usd_per_h: float, allowed: int) -> None:
    assert spending(usd_per_h=usd_per_h)[0].allowed(3, (), PRICE)[0] == allowed


def test_queued_vms_count_and_cost_once_they_begin() -> None:
    spent, clock = spending(max_vms=4, budget_usd=9)
    waiting = [vm.model_copy(update={"waits": True}) for vm in vms(3)]
    spent.living(waiting, PRICE)
    clock.now_s += 7200
    assert spent.spent_usd(PRICE) == 0
    assert spent.allowed(3, waiting, PRICE)[0] == 1
    spent.living(vms(3, paid_since_s=clock.now_s - 1200), PRICE)
    clock.now_s += 1200
    assert spent.spent_usd(PRICE) == pytest.approx(3 * 0.5 * 2400 / 3600)


def test_dollars_cannot_be_kept_to_without_a_price() -> None:
    assert spending(usd_per_h=1)[0].allowed(1, (), None)[0] == 0
    count, why = spending(budget_usd=1)[0].allowed(1, (), None)
    assert count == 0
    assert "vms.usd_per_h" in why


def test_living_vms_add_up_and_the_budget_ends_requests() -> None:
    spent, clock = spending(budget_usd=2.0)
    spent.living(vms(4), PRICE)
    clock.now_s += 1800
    assert spent.spent_usd(PRICE) == pytest.approx(1.0)
    assert spent.allowed(1, vms(4), PRICE) == (1, "")
    spent.living(vms(2), PRICE)
    clock.now_s += 3600
    assert spent.spent_usd(PRICE) == pytest.approx(2.0)
    count, why = spent.allowed(1, vms(2), PRICE)
    assert (count, "2.00 dollars are spent" in why) == (0, True)
    spent.living((), PRICE)
    clock.now_s += 3600
    assert spent.spent_usd(PRICE) == pytest.approx(2.0)


def test_earlier_costs_of_the_run_count_towards_its_budget() -> None:
    spent = Spending(Limits(budget_usd=2.0), Clock(100.0), before=Before(usd=1.5, unpriced_h=1.0))
    assert spent.spent_usd(PRICE) == pytest.approx(2.0), "hours without a price cost what a VM costs now"
    assert spent.allowed(1, (), PRICE)[0] == 0
    assert Spending(Limits(budget_usd=2.0), Clock(100.0), before=Before(usd=1.9)).allowed(1, (), PRICE) == (1, "")


def test_each_vm_counts_at_its_price_and_future_ones_at_the_highest() -> None:
    spent, clock = spending(budget_usd=9.0, usd_per_h=3.0)
    there = [*vms(2, usd_per_h=0.25), Vm(name="job-2-0", request="job-2", usd_per_h=1.4)]
    spent.living(there, Price(usd_per_h=1.4, source="test"))
    clock.now_s += 1800
    assert spent.spent_usd(PRICE) == pytest.approx(0.95)
    assert spent.allowed(3, there, Price(usd_per_h=1.4, source="test"))[0] == 0, "1.1 dollars an hour are left"
    assert spent.allowed(3, there[:2], Price(usd_per_h=1.4, source="test"))[0] == 1


def test_earlier_costs_of_a_vm_count_once() -> None:
    clock = Clock(100.0)
    new, known = vms(2, usd_per_h=3.6, paid_since_s=40.0)
    before = Before(usd=1.0, vms=[known.name])
    spent = Spending(Limits(budget_usd=9.0), clock, before=before, wall_clock=clock)
    for _ in range(3):
        spent.living([new, known], None)
    assert spent.spent_usd(PRICE) == pytest.approx(1.0 + 3.6 * 60 / 3600)
    spent.living([], None)  # a provider's list may omit a VM
    spent.living([new, known], None)
    clock.now_s += 100
    spent.living([known], None)
    assert spent.spent_usd(PRICE) == pytest.approx(1.0 + 3.6 * 260 / 3600)

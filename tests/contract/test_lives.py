"""Times at which VMs come, get notices and are taken, drawn at a rate or read from a trace."""

from __future__ import annotations

import math
import random

import pytest

from morph.contract.lives import Change, InOrder, Lifetimes, Removals, by_name, recorded
from morph.contract.trace import Trace, parse_trace

MTTP_S, START_S = 10_800.0, 1.8e9
NAMES = [f"job-{request}-{index}" for request in range(100) for index in range(20)]
TRACE = ["time_s,event,node_id", "0,add,a", "0,add,b", "0,add,c", "5,remove,a", "5,remove,b", "6,add,a", "9,remove,c"]


def trace() -> Trace:
    return parse_trace(TRACE, "trace.csv")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [0, 3])
def test_lifetimes_are_exponential_with_the_mean_that_is_asked_for(seed: int, number: int) -> None:
    """A Kolmogorov-Smirnov test with one false alarm in a million; the draws are fixed by their seed."""
    drawn = sorted(by_name(seed, MTTP_S)(vm, number) for vm in NAMES)
    expected = [1 - math.exp(-duration_s / MTTP_S) for duration_s in drawn]
    count = len(drawn)
    distance = max(max((index + 1) / count - value, value - index / count) for index, value in enumerate(expected))
    assert distance < math.sqrt(-0.5 * math.log(1e-6 / 2) / count)


def test_seed_and_names_alone_determine_the_times() -> None:
    since = {vm: START_S + index for index, vm in enumerate(NAMES)}
    schedule = Lifetimes(by_name(7, MTTP_S), START_S)
    taken = schedule.between(since, START_S, math.inf)
    assert taken == schedule.between(dict(reversed(since.items())), START_S, math.inf)
    assert [taking.time_s for taking in taken] == sorted(taking.time_s for taking in taken)
    assert {vm for taking in taken for vm in taking.vms} == set(NAMES)
    (alone,) = schedule.between({NAMES[3]: START_S + 3}, START_S, math.inf)
    assert alone in taken
    assert alone == Change(START_S + 3 + by_name(7, MTTP_S)(NAMES[3], 0), "taken", (NAMES[3],))
    other = Lifetimes(by_name(8, MTTP_S), START_S).between(since, START_S, math.inf)
    assert not {taking.time_s for taking in taken} & {taking.time_s for taking in other}


def test_looking_often_takes_the_same_vms_as_looking_once() -> None:
    since = dict.fromkeys(NAMES[:40], START_S)
    schedule = Lifetimes(by_name(1, 100.0), START_S)
    once = schedule.between(since, START_S, START_S + 60)
    often = [
        taking for second in range(60) for taking in schedule.between(since, START_S + second, START_S + second + 1)
    ]
    firsts = {vm: taking for taking in reversed(often) for vm in taking.vms}
    assert {vm: taking for taking in once for vm in taking.vms} == firsts


def test_an_old_vm_is_not_overdue_and_a_spared_one_lives_anew() -> None:
    old = {"a": START_S - 1e7}
    schedule = Lifetimes(by_name(3, 60.0), START_S)
    first = schedule.between(old, START_S, math.inf)[0].time_s
    assert first == START_S + by_name(3, 60.0)("a", 0)
    again = schedule.between(old, first, math.inf)[0].time_s
    assert again == first + by_name(3, 60.0)("a", 1)


def test_a_trace_gives_how_many_vms_go_and_the_seed_which() -> None:
    schedule = Removals(2, trace(), START_S)
    since = dict.fromkeys(NAMES[:4], START_S)
    taken = schedule.between(since, START_S, math.inf)
    assert [(taking.time_s, len(taking.vms)) for taking in taken] == [(START_S + 5, 2), (START_S + 9, 1)]
    assert len({vm for taking in taken for vm in taking.vms}) == 3
    assert taken == schedule.between(dict(reversed(since.items())), START_S, math.inf)
    assert schedule.between(since, START_S + 5, START_S + 8.9) == ()
    assert schedule.between(since, START_S + 8.9, START_S + 9)[0].time_s == START_S + 9
    assert schedule.end_s == START_S + 9
    drawn = {Removals(seed, trace(), START_S).between(since, START_S, math.inf)[0].vms for seed in range(20)}
    assert len(drawn) > 3
    assert schedule.between({"a": START_S}, START_S, math.inf) == (Change(START_S + 5, "taken", ("a",)),)


def test_a_warning_comes_before_each_end_and_no_sooner_than_its_vm() -> None:
    lives = Lifetimes(by_name(1, 100.0), notice_s=30.0)
    changes = lives.between(dict.fromkeys(NAMES[:40], START_S), -math.inf, math.inf)
    warned = {change.vms: change for change in changes if change.kind == "warned"}
    taken = {change.vms: change for change in changes if change.kind == "taken"}
    assert warned.keys() == taken.keys()
    for vms, change in warned.items():
        assert change.taken_s == taken[vms].time_s
        assert change.time_s == max(START_S, change.taken_s - 30.0)


def test_ordered_lives_come_from_one_generator_and_do_not_change() -> None:
    draw, expected = InOrder(5, 40.0), random.Random(5)
    lives_s = [draw(vm, 0) for vm in ("b", "a", "c")]
    assert lives_s == [expected.expovariate(1 / 40.0) for _ in range(3)]
    assert [draw(vm, 0) for vm in ("b", "a", "c")] == lives_s


def test_the_rest_of_a_trace_is_played_with_its_standing_warnings() -> None:
    head = "time_s,event,node_id,notice_s"
    whole = parse_trace([head, "0,add,a,", "0,add,b,", "5,add,c,", "9,remove,b,4", "9,remove,a,8"], "trace.csv")
    told = [(change.time_s, change.kind, change.vms[0]) for change in recorded(whole)]
    assert told == [
        *((0, "came", "a"), (0, "came", "b"), (1, "warned", "a"), (5, "came", "c"), (5, "warned", "b")),
        *((9, "taken", "b"), (9, "taken", "a")),
    ]
    left = [(change.time_s, change.kind, change.vms[0]) for change in recorded(whole, num_played=3, now_s=6.0)]
    assert left == [(6, "warned", "b"), (6, "warned", "a"), (9, "taken", "b"), (9, "taken", "a")]

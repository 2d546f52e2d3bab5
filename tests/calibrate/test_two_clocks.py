from __future__ import annotations

import random

from calibrate.timing.two_clocks import Exchange, compare, on_one_clock

DAY_NS = 86_400 * 10**9


def exchanges(start_ns: int, offset_ns: int, *, down_ns: int, up_ns: int, seed: int) -> tuple[Exchange, Exchange]:
    """Twenty messages each way; some are late, on either way."""
    draws = random.Random(seed)
    sent, received, sent_back, got_back = [], [], [], []
    now_ns = start_ns
    for number in range(20):
        late_ns = 0 if number % 4 == 3 else draws.randrange(5_000_000)
        sent.append(now_ns)
        received.append(now_ns + down_ns + late_ns + offset_ns)
        sent_back.append(received[-1] + 1_000)
        back_late_ns = 0 if number % 4 == 1 else draws.randrange(5_000_000)
        got_back.append(sent_back[-1] - offset_ns + up_ns + back_late_ns)
        now_ns = got_back[-1] + 1_000
    return (sent, got_back), (received, sent_back)


def test_late_messages_do_not_move_the_offset() -> None:
    first, second = exchanges(400 * DAY_NS, 300 * DAY_NS, down_ns=200_000, up_ns=200_000, seed=1)
    clocks = compare([first], [second])
    assert clocks.on_first(405 * DAY_NS + 300 * DAY_NS) == 405 * DAY_NS


def test_an_unequal_way_shifts_the_offset_by_half_of_the_difference() -> None:
    first, second = exchanges(DAY_NS, -7, down_ns=300_000, up_ns=100_000, seed=2)
    assert compare([first], [second]).offsets_ns == (-7 + 100_000,)


def test_a_drift_between_comparisons_is_evened_out() -> None:
    hour_ns, drift_ns = 3600 * 10**9, 72_000_000  # 20 parts in a million
    early = exchanges(DAY_NS, DAY_NS, down_ns=50_000, up_ns=50_000, seed=3)
    late = exchanges(DAY_NS + hour_ns, DAY_NS + drift_ns, down_ns=50_000, up_ns=50_000, seed=4)
    clocks = compare([early[0], late[0]], [early[1], late[1]])
    middle_ns = DAY_NS + hour_ns // 2
    shown_ns = middle_ns + DAY_NS + drift_ns // 2
    assert abs(clocks.on_first(shown_ns) - middle_ns) < 2_000


def test_stamps_of_odd_ranks_are_shifted_and_of_even_ones_kept() -> None:
    first, second = exchanges(DAY_NS, 1_000, down_ns=10, up_ns=10, seed=5)
    there = {"activation": {"8": [5_000]}, "gradient": {"8": [6_000]}, "all_reduce": {"2/8/1": [(7_000, 8_000)]}}
    here = {**there, "barrier": [(1, 2)], "clock": [first]}
    results = on_one_clock([here, {**there, "barrier": [(9_000, 9_500)], "clock": [second]}, there, there])
    assert {key: results[0][key] for key in there} == there
    assert {key: results[2][key] for key in there} == there
    for moved in (results[1], results[3]):
        assert (moved["activation"]["8"], moved["gradient"]["8"]) == ([4_000], [5_000])
        assert moved["all_reduce"] == {"2/8/1": [(6_000, 7_000)]}
    assert results[1]["barrier"] == [(8_000, 8_500)]

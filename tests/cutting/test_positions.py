from __future__ import annotations

import pytest

from morph.cutting.sections.positions import Position, choose_positions, default_num_sections


def places(*crossing_bytes: int) -> list[Position]:
    """Return places with one unit of compute between neighbours."""
    return [Position(index + 1, index + 1.0, size) for index, size in enumerate(crossing_bytes)]


def test_cuts_fall_on_equal_compute_when_all_cost_the_same() -> None:
    assert choose_positions(places(*[5] * 11), 12.0, 4) == (3, 6, 9)


def test_a_cheaper_position_in_the_window_wins() -> None:
    assert choose_positions(places(5, 5, 5, 1, 5, 5, 5, 1, 5, 5, 5), 12.0, 3) == (4, 8)
    assert choose_positions(places(5, 5, 1, 5, 5, 5, 5, 5, 5, 1, 5), 12.0, 3) == (3, 7)


def test_a_cheaper_position_outside_the_window_loses() -> None:
    assert choose_positions(places(1, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5), 12.0, 2) == (6,)


def test_positions_with_equal_compute_are_one() -> None:
    twins = [Position(1, 1.0, 9), Position(2, 1.0, 4), Position(3, 2.0, 9)]
    assert choose_positions(twins, 3.0, 3) == (2, 3)


def test_every_section_gets_compute() -> None:
    ends = [Position(0, 0.0, 1), Position(1, 1.0, 5), Position(2, 2.0, 5), Position(3, 3.0, 1)]
    assert choose_positions(ends, 3.0, 3) == (1, 2)
    with pytest.raises(ValueError, match="only 3 sections are possible"):
        choose_positions(ends, 3.0, 4)


def test_as_many_sections_as_places_allow_are_found() -> None:
    assert choose_positions(places(9, 1, 9, 1, 9), 6.0, 6) == (1, 2, 3, 4, 5)


def test_the_default_is_one_section_for_two_narrow_positions() -> None:
    blocks = [size for _ in range(6) for size in (9, 9, 1, 9, 9, 1)]
    assert default_num_sections(places(*blocks), len(blocks) + 1.0) == 6
    assert default_num_sections(places(*(blocks * 10)), 10 * len(blocks) + 1.0) == 24
    assert default_num_sections([], 1.0) == 1


def test_repeated_blocks_come_out_equal_although_the_end_is_heavy() -> None:
    sizes = [9, 9, 1] * 12  # twelve blocks of three units, and an end of five that cannot be divided
    assert choose_positions(places(*sizes), len(sizes) + 5.0, 13) == tuple(range(3, 37, 3))


def test_very_narrow_places_near_the_end_do_not_make_an_empty_section() -> None:
    ends = [Position(index + 1, index + 1.0, 1000) for index in range(30)] + [Position(31, 30.5, 4)]
    assert choose_positions(ends, 31.0, 3) == (10, 20)


def test_thousands_of_positions_are_chosen_from_as_well() -> None:
    sizes = ([90] * 39 + [1]) * 60
    assert choose_positions(places(*sizes), len(sizes) + 1.0, 60) == tuple(range(40, 2400, 40))

from __future__ import annotations

import itertools

import torch

from morph.runtime.step.stage import seed_section, stream_seed


def test_every_place_has_a_seed_of_its_own_that_torch_takes() -> None:
    places = list(itertools.product((0, 1, 2**62), range(3), range(12), range(12)))
    seeds = {stream_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_seeds_are_fixed_for_good() -> None:
    """A change would make every checkpoint continue differently."""
    assert stream_seed(0, 0, 0, 0) == 5854343820274218872
    assert stream_seed(1, 2, 3, 4) == 1159737786199761749


def test_the_same_place_draws_the_same_numbers_whatever_was_drawn_before() -> None:
    draws = []
    for warm_up in (0, 17):
        torch.rand(warm_up)
        seed_section(5, 1, 2, 3)
        draws.append(torch.rand(8))
    assert torch.equal(*draws)
    seed_section(5, 1, 2, 4)
    assert not torch.equal(draws[0], torch.rand(8))


def test_sections_draw_what_they_draw_after_torchs_own_seeding() -> None:
    seed_section(1, 2, 3, 4)
    found = torch.rand(8)
    torch.manual_seed(stream_seed(1, 2, 3, 4))
    assert torch.equal(found, torch.rand(8))


def test_seeding_leaves_nothing_behind_for_devices_that_are_not_there() -> None:
    waiting = len(torch.cuda._queued_calls)
    for section in range(20):
        seed_section(0, 0, 0, section)
    assert len(torch.cuda._queued_calls) == waiting

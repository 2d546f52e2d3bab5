from __future__ import annotations

import torch
from torch import Tensor

from calibrate.computing.peak import LiveBytes, peak_bytes

CPU = torch.device("cpu")
KIB = 1024


def block(kib: int = 1) -> Tensor:
    return torch.ones(kib * KIB // 4)


def test_what_is_let_go_no_longer_counts() -> None:
    def work() -> None:
        for _ in range(5):
            block(4)
        kept = [block(), block()]
        del kept

    assert peak_bytes(work, CPU) == 4 * KIB


def test_what_lives_at_once_adds_up() -> None:
    kept: list[Tensor] = []
    assert peak_bytes(lambda: kept.extend(block() for _ in range(3)), CPU) == 3 * KIB


def test_views_and_what_was_there_before_take_nothing() -> None:
    before = block(8)

    def work() -> None:
        before.add_(1.0).view(2, -1)[0].mul_(2.0)

    assert peak_bytes(work, CPU) == 0


def test_a_backward_counts_what_was_saved_for_it_and_its_gradients() -> None:
    weight = block(2).requires_grad_()

    def work() -> None:
        hidden = (weight * 2.0).sigmoid()  # its result is saved; that of the product is not
        torch.autograd.grad(hidden.sum(), weight)

    peak = peak_bytes(work, CPU)
    assert 4 * KIB <= peak <= 8 * KIB


def test_nothing_is_left_when_all_is_gone() -> None:
    with LiveBytes() as live:
        made = block(3)
        assert live.now == 3 * KIB
        del made
    assert (live.now, live.peak) == (0, 3 * KIB)

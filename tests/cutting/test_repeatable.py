"""A forward that depends on more than weights, buffers, batch and torch's random numbers is refused with its line."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import morph
from morph.contract.errors import JobError
from morph.cutting import cut, export_job
from morph.cutting.trial_run.repeatable import Forward as RepeatedForward
from morph.cutting.trial_run.repeatable import _Watch

pytestmark = pytest.mark.slow

ITEMS = [{"x": torch.randn(6, generator=torch.Generator().manual_seed(index))} for index in range(8)]
HERE = Path(__file__)
DRAWN = np.random.default_rng(3)
COUNTED = {"calls": 0}
Forward = Callable[[Any, Tensor], Tensor]


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


class Changing(nn.Module):
    """A model that runs ``between`` among its layers; with ``decides`` it is cut at marks, not by torch.export."""

    def __init__(self, between: Forward, decides: bool) -> None:
        super().__init__()
        self.first, self.second, self.cut = nn.Linear(6, 6), nn.Linear(6, 6), morph.CutPoint()
        self.between, self.decides = between, decides
        self.calls, self.seen, self.plain = 0, list[float](), torch.zeros(6)
        self.kept: Tensor | None = None
        self.numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.decides and x.sum() > 1e9:
            x = x * 2
        x = self.between(self, x)
        return self.second(self.cut(x))


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1  # counts
    return x if self.calls < 1000 else x * 2


def remembers(self: Any, x: Tensor) -> Tensor:
    self.seen.append(0.5)  # remembers
    return x * len(self.seen)


def numbers_itself(self: Any, x: Tensor) -> Tensor:
    return x * next(self.numbers)  # numbers itself


def counts_outside(self: Any, x: Tensor) -> Tensor:
    COUNTED["calls"] += 1  # counts outside
    return x


def draws_from_numpy(self: Any, x: Tensor) -> Tensor:
    return x * float(np.random.rand())  # draws from numpy


def makes_noise(self: Any, x: Tensor) -> Tensor:
    noise = np.random.randn(6)  # makes noise
    return x + torch.from_numpy(noise.astype("float32"))


def draws_from_a_generator(self: Any, x: Tensor) -> Tensor:
    return x * float(DRAWN.random())  # draws from a generator


def may_drop(self: Any, x: Tensor) -> Tensor:
    dropped = random.random() < 0.0001  # may drop
    return x * 2 if dropped else x


def asks_the_clock(self: Any, x: Tensor) -> Tensor:
    return x * (time.perf_counter_ns() % 1000)  # asks the clock


def averages(self: Any, x: Tensor) -> Tensor:
    before = self.kept if self.kept is not None else torch.zeros(6)
    self.kept = before * 0.9 + 0.1 * x.mean(0).detach()  # averages
    return x - self.kept


def averages_in_place(self: Any, x: Tensor) -> Tensor:
    self.plain.mul_(0.9)  # averages in place
    return x - self.plain


def keeps_the_first(self: Any, x: Tensor) -> Tensor:
    if self.kept is None:
        self.kept = x.detach().mean()
    return x - self.kept  # keeps the first


def writes_its_weight(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.second.weight.clamp_(-1, 1)  # writes its weight
    return x


@pytest.mark.parametrize(
    ("between", "what"),
    [
        (counts, "changes attribute calls"),
        (remembers, "changes attribute seen"),
        (numbers_itself, "changes attribute numbers"),
        (counts_outside, "changes global COUNTED"),
        (draws_from_numpy, "draws numpy's random numbers"),
        (makes_noise, "draws numpy's random numbers"),
        (draws_from_a_generator, "changes global DRAWN"),
        (may_drop, "draws Python's random numbers"),
        (asks_the_clock, "gives another result when it is run again on the same samples with the same seed"),
        (averages, "reads a tensor that another forward has made and kept"),
        (averages_in_place, "changes a tensor that existed before"),
        (writes_its_weight, "changes parameter second.weight"),
    ],
)
@pytest.mark.parametrize("decides", [False, True], ids=["exported", "marked"])
def test_hidden_state_of_a_forward_is_refused_with_its_line(
    tools: Any, between: Forward, what: str, decides: bool
) -> None:
    job = tools.make_job(lambda: Changing(between, decides), mean_loss, ITEMS)
    with pytest.raises(JobError) as caught:
        cut(export_job(job), num_sections=None, micro_batch_size=2)
    lines = HERE.read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith(f"  # {between.__name__.replace('_', ' ')}"))
    assert caught.value.source == f"{HERE}:{number}"
    assert f"the forward {what}: a trace keeps one value forever" in caught.value.message
    assert caught.value.allowed


class Loss:
    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.weight *= 0.99  # anneals
        return model(batch["x"]).square().mean() * self.weight


def test_a_loss_that_keeps_a_number_is_refused_with_its_line(tools: Any) -> None:
    with pytest.raises(JobError, match=r"the forward changes attribute Loss\.weight") as caught:
        export_job(tools.make_job(lambda: Changing(lambda _, x: x, decides=False), Loss(), ITEMS))
    lines = HERE.read_text(encoding="utf-8").splitlines()
    assert caught.value.source == f"{HERE}:{next(n for n, line in enumerate(lines, 1) if line.endswith('# anneals'))}"


def keeps_a_mask(self: Any, x: Tensor) -> Tensor:
    if self.kept is None:
        self.kept = torch.arange(6) < 3
    return x * self.kept


def keeps_what_it_saw(self: Any, x: Tensor) -> Tensor:
    self.kept, self.seen, self.calls = x.detach(), [x.mean()], x.shape[0]
    return torch.nn.functional.dropout(x, 0.5) + torch.rand(6)


@pytest.mark.parametrize("between", [keeps_a_mask, keeps_what_it_saw])
@pytest.mark.parametrize("decides", [False, True], ids=["exported", "marked"])
def test_state_made_once_or_rewritten_each_time_is_not_refused(tools: Any, between: Forward, decides: bool) -> None:
    job = tools.make_job(lambda: Changing(between, decides), mean_loss, ITEMS)
    assert len(cut(export_job(job), num_sections=2, micro_batch_size=2).sections) == 2


def test_a_tensor_of_the_first_batch_is_not_kept_for_ever(tools: Any) -> None:
    with pytest.raises(JobError, match="reads a tensor that another forward has made and kept") as caught:
        export_job(tools.make_job(lambda: Changing(keeps_the_first, decides=False), mean_loss, ITEMS))
    assert str(caught.value.source).startswith(f"{HERE}:")


def test_the_generators_are_left_as_they_were(tools: Any) -> None:
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
    export_job(tools.make_job(lambda: Changing(keeps_what_it_saw, decides=False), mean_loss, ITEMS))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_one_section_of_a_marked_model_is_refused_in_the_same_way(tools: Any) -> None:
    exported = export_job(tools.make_job(lambda: Changing(draws_from_numpy, decides=True), mean_loss, ITEMS))
    with pytest.raises(JobError, match="draws numpy's random numbers"):
        cut(exported, num_sections=1, micro_batch_size=2)


def test_reused_memory_is_not_mistaken_for_a_freed_tensor(tools: Any) -> None:
    """Otherwise the same operation could differ by chance in the next run."""
    job = tools.make_job(lambda: Changing(lambda _, x: x, decides=False), mean_loss, ITEMS)
    watch = _Watch(RepeatedForward(job, nn.Module(), {}, {}, run=lambda: None), [])
    with watch:
        made = torch.zeros(3)
    place = made.untyped_storage()._cdata
    assert watch._may_change(made)
    assert watch._may_change(made[1:])  # this one contains a view that no operation made
    del made
    others = []
    for _ in range(1000):
        others.append(torch.zeros(3))
        if others[-1].untyped_storage()._cdata == place:
            break
    else:
        pytest.skip("this allocator did not give the same memory again")
    assert not watch._may_change(others[-1])

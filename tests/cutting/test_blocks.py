from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from morph.cutting import Section, cut, export_job
from morph.cutting.cuts.report import report_cuts

pytestmark = pytest.mark.slow

WIDTH = 16


class Parallel(nn.Module):
    """A block with attention parallel to an MLP, as in GPT-NeoX, which is as narrow inside as between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(self.norm(x)) + self.mlp(self.norm(x))
        return out


class Tower(nn.Module):
    """Blocks whose by-products are all needed at the end, like a mixture of experts' router scores."""

    def __init__(self, num_blocks: int, head: int = 4, *, one_block: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Parallel() for _ in range(1 if one_block else num_blocks))
        self.num_blocks = num_blocks
        self.scores = nn.Linear(WIDTH, 2)
        self.head = nn.Linear(WIDTH, head)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(x)
        scores = []
        for number in range(self.num_blocks):
            x = self.blocks[number % len(self.blocks)](x)
            scores.append(self.scores(x))
        return self.head(x), torch.cat(scores, -1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(8, WIDTH, 3, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layers(x)[0]
        return self.head(hidden), hidden.mean()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out, scores = model(batch["x"])
    return functional.cross_entropy(out.flatten(0, 1), batch["y"].flatten()) + 0.1 * scores.square().mean()


ITEMS = [{"x": torch.linspace(-1, 1, 48).reshape(6, 8) * i, "y": torch.full((6,), i % 4)} for i in range(4)]


def blocks_of(section: Section) -> set[str]:
    """Return the numbers of the blocks whose parameters the section reads."""
    return {name.split(".")[1] for name in section.parameters if name.startswith("blocks.")}


def test_a_model_is_cut_between_its_repeated_blocks(tools: Any) -> None:
    sections = cut(export_job(tools.make_job(lambda: Tower(4), loss, ITEMS)), num_sections=None, micro_batch_size=2)
    assert [blocks_of(section) for section in sections.sections] == [{"0"}, {"1"}, {"2"}, {"3"}]


def test_a_block_that_is_called_again_is_a_block_each_time(tools: Any) -> None:
    job = tools.make_job(lambda: Tower(4, one_block=True), loss, ITEMS)
    sections = cut(export_job(job), num_sections=None, micro_batch_size=2).sections
    assert [blocks_of(section) for section in sections] == [{"0"}] * 4


def test_a_head_as_large_as_a_block_is_its_own_section(tools: Any) -> None:
    job = tools.make_job(lambda: Tower(3, head=60), loss, ITEMS)
    sections = cut(export_job(job), num_sections=None, micro_batch_size=2).sections
    assert [blocks_of(section) for section in sections] == [{"0"}, {"1"}, {"2"}, set()]


def test_more_sections_than_blocks_may_cut_blocks(tools: Any) -> None:
    model = cut(export_job(tools.make_job(lambda: Tower(2), loss, ITEMS)), num_sections=5, micro_batch_size=2)
    assert len(model.sections) == 5


def test_a_report_names_the_operation_that_no_cut_divides(tools: Any) -> None:
    exported = export_job(tools.make_job(Recurrent, loss, ITEMS, num_sections=1))
    why = report_cuts(exported, cut(exported, num_sections=1, micro_batch_size=2)).bound_by
    assert why is not None
    assert "aten.gru.input" in why
    assert f"{__file__}:" in why
    assert "one module for each layer" in why


def test_a_report_of_even_sections_says_nothing_of_bounds(tools: Any) -> None:
    exported = export_job(tools.make_job(lambda: Tower(4), loss, ITEMS))
    assert report_cuts(exported, cut(exported, num_sections=None, micro_batch_size=2)).bound_by is None

"""However sections are grouped into stages, losses and gradients are the same bits: dropout on, recompute or not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from morph.cutting.cuts.cut_model import BoundaryTensor, Section
from morph.data import MicroBatchLoader
from morph.job import MapDataset
from morph.runtime.step.section_run import run_section, section_backward
from morph.runtime.step.stage import LoadBatch, Stage
from tests.runtime.conftest import CutJob
from tests.system.harness import MICRO_BATCH_SIZE, NUM_SECTIONS

MICRO_BATCHES = (0, 1, 2)
PARTITIONS = [
    bounds for count in range(NUM_SECTIONS) for bounds in itertools.combinations(range(1, NUM_SECTIONS), count)
]


@dataclass
class Ran:
    """Losses by micro-batch, and every gradient contribution by (micro-batch, parameter) in order of arrival."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[tuple[int, str], list[Tensor]] = field(default_factory=dict)


def run(tiny: CutJob, bounds: tuple[int, ...], *, recompute: bool, step: int = 0, load: LoadBatch | None = None) -> Ran:
    edges = (0, *bounds, NUM_SECTIONS)
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in tiny.initial.items()}
    stages = [
        Stage(
            tiny.model,
            range(first, end),
            recompute=recompute,
            parameters=parameters,
            load_batch=load or tiny.load,
            seed=tiny.job.seed,
            step=step,
        )
        for first, end in itertools.pairwise(edges)
    ]
    ran = Ran()
    for micro_batch in MICRO_BATCHES:
        values: tuple[Tensor, ...] = ()
        for stage in stages:
            values = stage.forward(micro_batch, values)
            assert not any(value.requires_grad for value in values)
        ran.losses.append(values[0])
    torch.rand(3)  # whatever else draws in between
    for micro_batch in MICRO_BATCHES:
        gradients: tuple[Tensor | None, ...] = (torch.ones(()),)
        for stage in reversed(stages):
            if recompute:
                stage.recompute(micro_batch)
            gradients = stage.backward(
                micro_batch,
                gradients,
                lambda name, gradient, at=micro_batch: ran.gradients.setdefault((at, name), []).append(gradient),
            )
    return ran


@pytest.fixture(scope="module")
def whole(tiny: CutJob) -> Ran:
    """All sections in one stage, without recompute."""
    return run(tiny, (), recompute=False)


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("bounds", PARTITIONS, ids=lambda bounds: "|".join(map(str, bounds)) or "whole")
def test_every_grouping_gives_the_same_bits(tiny: CutJob, whole: Ran, bounds: tuple[int, ...], recompute: bool) -> None:
    ran = run(tiny, bounds, recompute=recompute)
    assert all(torch.equal(one, other) for one, other in zip(ran.losses, whole.losses, strict=True))
    assert ran.gradients.keys() == whole.gradients.keys()
    for place, contributions in whole.gradients.items():
        assert len(ran.gradients[place]) == len(contributions)
        assert all(torch.equal(one, other) for one, other in zip(ran.gradients[place], contributions, strict=True))


@dataclass
class Drawing:
    """The same samples, with random numbers drawn for nothing."""

    inner: MapDataset

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        torch.rand(index + 1)
        return self.inner[index]


def test_what_the_data_set_draws_changes_no_bit_of_the_dropout(tiny: CutJob, whole: Ran) -> None:
    def load(micro_batch: int, keys: Sequence[str]) -> dict[str, Tensor]:
        dataset = Drawing(tiny.job.dataset())
        loader = MicroBatchLoader(dataset, tiny.job.seed, tiny.job.batch_size, MICRO_BATCH_SIZE)  # nothing remembered
        return loader.load(0, micro_batch, keys)

    ran = run(tiny, (1,), recompute=True, load=load)
    assert all(torch.equal(one, other) for one, other in zip(ran.losses, whole.losses, strict=True))
    for place, contributions in whole.gradients.items():
        assert all(torch.equal(one, other) for one, other in zip(ran.gradients[place], contributions, strict=True))


def test_every_parameter_gets_one_contribution_per_section_that_uses_it(tiny: CutJob, whole: Ran) -> None:
    uses = {name: len(unit.sections) for unit in tiny.model.units for name in unit.parameters}
    assert {name: len(whole.gradients[0, name]) for name in uses} == uses
    assert max(uses.values()) == 2


def test_dropout_differs_between_steps_and_micro_batches(tiny: CutJob, whole: Ran) -> None:
    """The control of the tests above: randomness is really on."""
    later = run(tiny, (), recompute=False, step=1)
    assert not torch.equal(later.losses[0], whole.losses[0])


def test_a_recomputing_stage_keeps_no_graph_between_forward_and_backward(tiny: CutJob) -> None:
    stage = Stage(
        tiny.model,
        range(NUM_SECTIONS),
        recompute=True,
        parameters={name: tensor.clone().requires_grad_() for name, tensor in tiny.initial.items()},
        load_batch=tiny.load,
        seed=0,
        step=0,
    )
    stage.forward(0, ())
    assert stage._runs == {}
    assert stage._stored == {0: ()}
    stage.recompute(0)
    assert stage._stored == {}
    stage.backward(0, (torch.ones(()),), lambda name, gradient: None)
    assert stage._runs == {}


class _Frozen(torch.nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        return (hidden * 2,)


def frozen_section() -> Section:
    border = BoundaryTensor("hidden", (2,), torch.float32, requires_grad=False)
    module = torch.fx.symbolic_trace(_Frozen())
    return Section(0, "frozen", (border,), (border,), (), (), "", module)


def test_a_section_with_nothing_to_train_has_an_empty_backward() -> None:
    section = frozen_section()
    ran = run_section(section, (torch.ones(2),), {}, {})
    assert section_backward(section, ran, (None,), {}, pytest.fail) == (None,)

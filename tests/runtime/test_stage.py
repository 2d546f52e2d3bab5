"""However sections are grouped into stages, losses and gradients have the same bits, with dropout, recompute or not."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from morph.cutting.cuts.cut_model import BoundaryTensor, Section
from morph.data import MicroBatchLoader
from morph.jobs.job import MapDataset
from morph.runtime.step.stage import LoadBatch, Stage, run_section, section_backward
from morph.runtime.step.sums import MicroBatchSums
from tests.runtime.conftest import CutJob
from tests.system.harness import MICRO_BATCH_SIZE, NUM_SECTIONS

MICRO_BATCHES = (0, 1, 2)
SECTIONS_BACKWARDS = tuple(reversed(range(NUM_SECTIONS)))
PARTITIONS = [
    bounds for count in range(NUM_SECTIONS) for bounds in itertools.combinations(range(1, NUM_SECTIONS), count)
]


@dataclass
class Ran:
    """Losses by micro-batch, and every gradient contribution by (micro-batch, parameter) in order of arrival."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[tuple[int, str], list[Tensor]] = field(default_factory=dict)
    through: list[tuple[int, int]] = field(default_factory=list)

    def sink(self, micro_batch: int) -> MicroBatchSums:
        def add(section: int, name: str, gradient: Tensor) -> None:
            assert (micro_batch, section) not in self.through, "a gradient of a section that was through"
            self.gradients.setdefault((micro_batch, name), []).append(gradient)

        return MicroBatchSums(add, lambda section: self.through.append((micro_batch, section)))


def run(
    tiny: CutJob,
    bounds: tuple[int, ...],
    *,
    recompute: bool,
    step: int = 0,
    load: LoadBatch | None = None,
    live_sections: int | None = None,
) -> Ran:
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
            live_sections=live_sections,
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
    torch.rand(3)  # other draws in between must not matter
    for micro_batch in MICRO_BATCHES:
        gradients: tuple[Tensor | None, ...] = (torch.ones(()),)
        for stage in reversed(stages):
            if recompute:
                stage.recompute(micro_batch)
            gradients = stage.backward(micro_batch, gradients, ran.sink(micro_batch))
    assert ran.through == [(micro_batch, section) for micro_batch in MICRO_BATCHES for section in SECTIONS_BACKWARDS]
    return ran


@pytest.fixture(scope="module")
def whole(tiny: CutJob) -> Ran:
    """Return the results of all sections in one stage, without recompute."""
    return run(tiny, (), recompute=False)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("bounds", PARTITIONS, ids=lambda bounds: "|".join(map(str, bounds)) or "whole")
def test_every_grouping_gives_the_same_bits(tiny: CutJob, whole: Ran, bounds: tuple[int, ...], recompute: bool) -> None:
    ran = run(tiny, bounds, recompute=recompute)
    assert all(torch.equal(one, other) for one, other in zip(ran.losses, whole.losses, strict=True))
    assert ran.gradients.keys() == whole.gradients.keys()
    for place, contributions in whole.gradients.items():
        assert len(ran.gradients[place]) == len(contributions)
        assert all(torch.equal(one, other) for one, other in zip(ran.gradients[place], contributions, strict=True))


@pytest.mark.parametrize("live_sections", range(1, NUM_SECTIONS + 1))
@pytest.mark.parametrize("bounds", [(), (1,), (3,)], ids=str)
def test_sections_run_again_in_groups_give_the_same_bits(
    tiny: CutJob, whole: Ran, bounds: tuple[int, ...], live_sections: int
) -> None:
    ran = run(tiny, bounds, recompute=True, live_sections=live_sections)
    assert all(torch.equal(one, other) for one, other in zip(ran.losses, whole.losses, strict=True))
    assert {place: len(found) for place, found in ran.gradients.items()} == dict.fromkeys(ran.gradients, 1) | {
        place: len(found) for place, found in whole.gradients.items()
    }
    for place, contributions in whole.gradients.items():
        assert all(torch.equal(one, other) for one, other in zip(ran.gradients[place], contributions, strict=True))


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that operations have made and that are still held, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most_bytes = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Run an operation, and count its results."""
        results = function(*arguments, **(keywords or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._count(result.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.most_bytes = max(self.most_bytes, self.bytes)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.bytes -= self._known.pop(key)


def most_bytes(tiny: CutJob, live_sections: int | None) -> int:
    """Return the most bytes of one micro-batch in a stage of the sections between the first and the last."""
    sections = range(1, NUM_SECTIONS - 1)
    specs = tiny.model.sections[1].inputs, tiny.model.sections[NUM_SECTIONS - 2].outputs
    inputs, gradients = (tuple(torch.ones(spec.shape) for spec in found) for found in specs)
    stage = Stage(
        tiny.model,
        sections,
        recompute=True,
        parameters={name: tensor.clone().requires_grad_() for name, tensor in tiny.initial.items()},
        load_batch=tiny.load,
        seed=0,
        step=0,
        live_sections=live_sections,
    )
    with Held() as held:
        stage.forward(0, inputs)
        stage.recompute(0)
        stage.backward(0, gradients, MicroBatchSums(lambda *_: None, lambda _: None))
    return held.most_bytes


def test_a_stage_holds_less_the_fewer_sections_it_runs_again_at_once(tiny: CutJob) -> None:
    found = [most_bytes(tiny, live_sections) for live_sections in (1, 2, 3, None)]
    assert found[0] < found[1] < found[2]
    assert found[2] == found[3], "a stage of three sections"


@dataclass
class Drawing:
    """The same samples, but each draws random numbers for nothing."""

    inner: MapDataset

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        torch.rand(index + 1)
        return self.inner[index]


def test_draws_of_the_data_set_change_no_bit_of_the_dropout(tiny: CutJob, whole: Ran) -> None:
    def load(micro_batch: int, keys: Sequence[str]) -> dict[str, Tensor]:
        dataset = Drawing(tiny.job.dataset())
        # a new loader remembers no samples
        loader = MicroBatchLoader(dataset, tiny.job.seed, tiny.job.batch_size, MICRO_BATCH_SIZE)
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
    """This is the control of the tests above: randomness is really on."""
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
    assert stage._stored == {0: [()]}
    stage.recompute(0)
    assert stage._stored == {}
    stage.backward(0, (torch.ones(()),), Ran().sink(0))
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

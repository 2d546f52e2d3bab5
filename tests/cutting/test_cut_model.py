from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from morph.contract.errors import JobError
from morph.cutting import ExportedJob, cut, export_job
from morph.jobs.job import Job, load_job
from tests.cutting.zoo import gpt2
from tests.grids import cells
from tests.models.language import DECODER, LENGTH, causal_loss, made

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY_GPT = f"{ROOT}/configs/jobs/tiny_gpt.py:job"
llama = made("LlamaForCausalLM", **{**DECODER, "num_hidden_layers": 4})


def token_items(vocabulary: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = torch.randint(0, vocabulary, (12, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in draw]


class ResidualMLP(nn.Module):
    """A model with in-place activations, a frozen scale, an unused layer and a value that skips several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.full((16,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.arange(16.0) / 16)

    def forward(self, x: Tensor) -> Tensor:
        early = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = x + functional.relu(layer(x) * self.scale + self.shift, inplace=True)
        return (x + early).mean(dim=1)


def mlp_items() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    draws = [torch.randn(16, generator=generator) for _ in range(12)]
    return [{"x": draw, "y": draw.sum()} for draw in draws]


def mlp_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch["x"]), batch["y"])


Case = tuple[Job, ExportedJob, list[dict[str, Tensor]]]


@pytest.fixture(scope="module")
def cases(tools: Any) -> dict[str, Case]:
    jobs = {
        "gpt2": (tools.make_job(gpt2(4), causal_loss, token_items(50)), token_items(50)),
        "gpt2 with dropout": (tools.make_job(gpt2(2, dropout=0.1), causal_loss, token_items(50)), token_items(50)),
        "llama": (tools.make_job(llama, causal_loss, token_items(50)), token_items(50)),
        "mlp": (tools.make_job(ResidualMLP, mlp_loss, mlp_items()), mlp_items()),
    }
    return {name: (job, export_job(job), items) for name, (job, items) in jobs.items()}


@pytest.mark.parametrize(("num_sections", "name"), cells(range(1, 9), ["gpt2", "llama", "mlp"]))
def test_sections_give_the_loss_and_gradients_of_the_uncut_model(
    cases: dict[str, Case], tools: Any, name: str, num_sections: int
) -> None:
    job, exported, items = cases[name]
    batch = tools.stack(items, 4)
    expected_loss, expected = tools.run_whole(job, exported.initial_parameters, batch)
    cut_model = cut(exported, num_sections=num_sections, micro_batch_size=4)
    assert len(cut_model.sections) == num_sections
    loss, gradients = tools.run_sections(cut_model, exported.initial_parameters, batch)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mlp"])
def test_one_graph_serves_every_micro_batch_size(cases: dict[str, Case], tools: Any, name: str) -> None:
    job, exported, items = cases[name]
    for num_samples in (1, 2, 12):
        batch = tools.stack(items, num_samples)
        cut_model = cut(exported, num_sections=3, micro_batch_size=num_samples)
        loss, _ = tools.run_sections(cut_model, exported.initial_parameters, batch)
        assert torch.equal(loss, tools.run_whole(job, exported.initial_parameters, batch)[0])


def test_dropout_repeats_when_each_section_is_seeded_again(cases: dict[str, Case], tools: Any) -> None:
    _, exported, items = cases["gpt2 with dropout"]
    batch = tools.stack(items, 4)
    cut_model = cut(exported, num_sections=5, micro_batch_size=4)
    results = []
    for step in (3, 3, 4):
        seeding = lambda index, step=step: torch.manual_seed(1000 * step + index)  # noqa: E731
        results.append(tools.run_sections(cut_model, exported.initial_parameters, batch, seeding))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])
    assert not torch.equal(results[0][0], results[2][0])


def test_dropout_draws_what_the_uncut_model_draws(cases: dict[str, Case], tools: Any) -> None:
    job, exported, items = cases["gpt2 with dropout"]
    batch = tools.stack(items, 4)
    cut_model = cut(exported, num_sections=5, micro_batch_size=4)
    model = tools.build_whole(job, exported.initial_parameters)
    torch.manual_seed(7)
    expected = job.loss(model, batch)
    torch.manual_seed(7)
    tensors: tuple[Tensor, ...] = ()
    for section in cut_model.sections:
        tensors = section(tensors, batch, exported.initial_parameters)
    assert torch.equal(tensors[0], expected.detach())


def test_each_section_takes_what_the_one_before_gives(cases: dict[str, Case]) -> None:
    for _, exported, _ in cases.values():
        sections = cut(exported, num_sections=6, micro_batch_size=2).sections
        assert sections[0].inputs == ()
        assert [spec.shape for spec in sections[-1].outputs] == [()]
        for before, after in itertools.pairwise(sections):
            assert before.outputs == after.inputs


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_only_the_residual_stream_crosses_a_transformer(cases: dict[str, Case], name: str) -> None:
    sections = cut(cases[name][1], num_sections=4, micro_batch_size=2).sections
    for section in sections[:-1]:
        assert [(spec.shape, spec.requires_grad) for spec in section.outputs] == [((2, LENGTH, 32), True)]
        assert section.outputs[0].num_bytes == 2 * LENGTH * 32 * 4
    assert [section.batch_keys for section in sections] == [("input_ids",), (), (), ("labels",)]


def test_a_value_that_is_used_later_passes_through(cases: dict[str, Case]) -> None:
    sections = cut(cases["mlp"][1], num_sections=4, micro_batch_size=2).sections
    names = [{spec.name for spec in section.outputs} for section in sections[:-1]]
    assert names[0] & names[1] & names[2]


def test_tied_weights_are_one_unit_of_two_sections(cases: dict[str, Case]) -> None:
    cut_model = cut(cases["gpt2"][1], num_sections=5, micro_batch_size=2)
    shared = [unit for unit in cut_model.units if len(unit.sections) > 1]
    assert [(unit.id, unit.sections, unit.parameters) for unit in shared] == [
        ("s0+s4", (0, 4), ("transformer.wte.weight",))
    ]
    assert cases["gpt2"][1].aliases == {"lm_head.weight": "transformer.wte.weight"}


def test_every_used_parameter_is_in_exactly_one_unit(cases: dict[str, Case]) -> None:
    for job, exported, _ in cases.values():
        cut_model = cut(exported, num_sections=5, micro_batch_size=2)
        listed = [name for unit in cut_model.units for name in unit.parameters]
        assert len(listed) == len(set(listed))
        assert set(listed) | set(cut_model.unused_parameters) == set(exported.initial_parameters)
        assert set(listed) == set(cut_model.parameter_specs)
        named = {name for name, parameter in job.model().named_parameters() if parameter.requires_grad}
        assert set(exported.initial_parameters) == named


def test_parameters_that_the_loss_does_not_need_are_reported(cases: dict[str, Case]) -> None:
    cut_model = cut(cases["mlp"][1], num_sections=2, micro_batch_size=2)
    assert cut_model.unused_parameters == ("unused.weight", "unused.bias")


def test_initial_parameters_come_from_the_seed(cases: dict[str, Case]) -> None:
    job, exported, _ = cases["mlp"]
    again = export_job(job).initial_parameters
    other = export_job(replace(job, seed=1)).initial_parameters
    assert all(torch.equal(tensor, again[name]) for name, tensor in exported.initial_parameters.items())
    assert not torch.equal(exported.initial_parameters["layers.0.weight"], other["layers.0.weight"])


def test_exporting_leaves_the_random_state_alone(cases: dict[str, Case]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    export_job(cases["mlp"][0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture(scope="module")
def tiny_gpt() -> ExportedJob:
    return export_job(load_job(TINY_GPT))


def test_equal_blocks_have_equal_signatures(tiny_gpt: ExportedJob) -> None:
    signatures = [section.signature for section in cut(tiny_gpt, num_sections=6, micro_batch_size=2).sections]
    assert signatures[1] == signatures[3]
    assert signatures[2] == signatures[4]
    assert len(set(signatures)) == 4


def test_the_fingerprint_depends_on_model_and_cuts_but_not_on_m(cases: dict[str, Case], tiny_gpt: ExportedJob) -> None:
    """Nor does it depend on the process: see ``test_construct``."""
    prints = {cut(tiny_gpt, num_sections=4, micro_batch_size=m).fingerprint for m in (1, 2, 6)}
    assert len(prints) == 1
    prints.add(cut(tiny_gpt, num_sections=5, micro_batch_size=2).fingerprint)
    prints.add(cut(cases["gpt2"][1], num_sections=4, micro_batch_size=2).fingerprint)
    prints.add(cut(cases["llama"][1], num_sections=4, micro_batch_size=2).fingerprint)
    assert len(prints) == 4


def test_sections_without_a_number_follow_the_blocks(cases: dict[str, Case]) -> None:
    assert 4 <= len(cut(cases["gpt2"][1], num_sections=None, micro_batch_size=2).sections) <= 6
    assert 4 <= len(cut(cases["llama"][1], num_sections=None, micro_batch_size=2).sections) <= 6


def test_more_sections_than_the_model_has_places_is_refused(cases: dict[str, Case]) -> None:
    with pytest.raises(JobError, match=r"num_sections: only \d+ sections are possible \(got 5000\)"):
        cut(cases["mlp"][1], num_sections=5000, micro_batch_size=2)


def test_a_label_says_where_a_section_begins(cases: dict[str, Case]) -> None:
    labels = [section.label for section in cut(cases["gpt2"][1], num_sections=4, micro_batch_size=2).sections]
    assert labels[0].startswith("transformer.")
    assert labels[2].startswith("transformer.h.")

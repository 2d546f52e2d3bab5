from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from morph.cutting import ExportedJob, cut, export_job
from morph.cutting.cuts.report import report_cuts
from morph.jobs.job import Job
from morph.preflight.plain_comparison import QUICK_FLOPS, Limits, compare_with_plain
from tests.cutting.attentions import plainly, traced
from tests.cutting.zoo import NUM_LAYERS, ZOO, causal_loss, phimoe, texts
from tests.grids import cells

pytestmark = pytest.mark.slow

Case = tuple[Job, ExportedJob, dict[str, Tensor], Tensor, Mapping[str, Tensor]]


@pytest.fixture(scope="module")
def case_of(tools: Any) -> Any:
    @cache
    def case(name: str) -> Case:
        model, loss, items = ZOO[name]
        job = tools.make_job(model, loss, items)
        exported = export_job(job)
        batch = tools.stack(items, 4)
        return job, exported, batch, *tools.run_whole(job, exported.initial_state, batch)

    return case


@pytest.mark.parametrize(("name", "num_sections"), cells(list(ZOO), [3, 7]))
def test_a_model_as_it_is_gives_the_uncut_loss_and_gradients(
    case_of: Any, tools: Any, name: str, num_sections: int
) -> None:
    _, exported, batch, expected_loss, expected = case_of(name)
    cut_model = cut(exported, num_sections=num_sections, micro_batch_size=4)
    assert len(cut_model.sections) == num_sections
    loss, gradients = tools.run_sections(cut_model, exported.initial_state, batch)
    assert gradients.keys() == expected.keys()
    assert torch.equal(loss, expected_loss)
    for parameter, gradient in gradients.items():
        assert torch.equal(gradient, expected[parameter]), parameter


LIMITS = Limits(available_bytes=1 << 32, flops=QUICK_FLOPS, device=torch.device("cpu"))


@pytest.mark.parametrize("name", ZOO)
def test_the_comparison_before_a_run_passes_each_model(case_of: Any, name: str) -> None:
    found = compare_with_plain(*case_of(name)[:2], 3, LIMITS)
    assert (found.how, found.num_seeds) == ("whole", 3)
    assert found.largest < 1e-5


def test_routers_with_their_own_backward_have_the_plain_gradients(tools: Any) -> None:
    job = tools.make_job(phimoe, causal_loss, texts())
    exported = export_job(job)
    found = compare_with_plain(job, exported, 3, LIMITS)
    assert found.how == "whole"
    assert found.largest < 1e-5


@pytest.mark.parametrize("name", ZOO)
def test_no_constructor_of_these_is_really_run(case_of: Any, name: str) -> None:
    assert case_of(name)[1].not_recorded is None


@pytest.mark.parametrize("name", ["llama", "qwen2 tied", "qwen3", "mixtral"])
def test_a_traced_decoder_keeps_its_causal_flag_and_its_grouped_keys(case_of: Any, tools: Any, name: str) -> None:
    model, loss, items = ZOO[name]
    assert traced(case_of(name)[1]) == [(False, True, True, 4, 2)] * NUM_LAYERS
    assert plainly(model, loss, tools.stack(items, 4)) == [(False, True, True, 4, 2)] * NUM_LAYERS


def test_an_encoder_with_padding_has_a_mask(case_of: Any) -> None:
    assert traced(case_of("bert")[1]) == [(True, False, False, 4, 4)] * NUM_LAYERS


def _tied(exported: ExportedJob, num_sections: int) -> list[tuple[str, tuple[str, ...]]]:
    units = cut(exported, num_sections=num_sections, micro_batch_size=2).units
    return [(unit.id, unit.parameters) for unit in units if len(unit.sections) > 1]


def test_tied_weights_of_each_design_are_found(case_of: Any) -> None:
    assert _tied(case_of("bert")[1], 3) == [("s0+s2", ("bert.embeddings.word_embeddings.weight",))]
    assert _tied(case_of("qwen2 tied")[1], 3) == [("s0+s2", ("model.embed_tokens.weight",))]
    assert _tied(case_of("llama")[1], 3) == []
    ((sections, names),) = _tied(case_of("t5")[1], 3)
    assert sections == "s0+s1+s2"  # encoder, decoder and output layer
    assert "shared.weight" in names


def test_an_encoders_output_crosses_several_cuts_to_its_decoder(case_of: Any) -> None:
    sections = cut(case_of("t5")[1], num_sections=7, micro_batch_size=2).sections
    crossing = [{spec.name for spec in section.outputs} for section in sections[:-1]]
    assert any(before & after for before, after in itertools.pairwise(crossing))


def test_skips_of_a_unet_are_carried_to_where_they_are_joined(case_of: Any) -> None:
    sections = cut(case_of("unet")[1], num_sections=5, micro_batch_size=2).sections
    crossing = [{spec.name for spec in section.outputs} for section in sections[:-1]]
    assert any(before & after for before, after in itertools.pairwise(crossing))
    assert max(len(names) for names in crossing) == 3


def test_masks_and_labels_are_loaded_where_they_are_read(case_of: Any) -> None:
    sections = cut(case_of("bert")[1], num_sections=3, micro_batch_size=2).sections
    assert ["attention_mask" in section.batch_keys for section in sections].count(True) >= 2
    assert [section.batch_keys.count("labels") for section in sections] == [0, 0, 1]
    for section in sections[:-1]:
        assert all(spec.dtype == torch.float32 for spec in section.outputs)


def test_a_report_tells_unused_parameters_and_constants(case_of: Any) -> None:
    vit, bert = (case_of(name)[1] for name in ("vit", "bert"))
    assert report_cuts(vit, cut(vit, num_sections=2, micro_batch_size=1)).unused_parameters == ()
    sections = report_cuts(bert, cut(bert, num_sections=2, micro_batch_size=1)).sections
    assert sections[0].num_constants > 0


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_a_section_runs_on_the_device_of_what_it_is_given(case_of: Any, name: str) -> None:
    _, exported, batch, *_ = case_of(name)
    far = torch.device("meta")
    parameters = {key: tensor.to(far) for key, tensor in exported.initial_parameters.all_at_once().items()}
    values: tuple[Tensor, ...] = ()
    for section in cut(exported, num_sections=3, micro_batch_size=4).sections:
        values = section(values, {key: batch[key].to(far) for key in section.batch_keys}, parameters)
        assert [value.device for value in values] == [far] * len(section.outputs)
        assert [tuple(value.shape) for value in values] == [spec.shape for spec in section.outputs]

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.harness import PROFILES
from benchmarks.published import GPU_MEMORY_BYTES, MODELS, SHIPPED, published_profile
from benchmarks.published.hardware import half_normal_quantiles_s
from benchmarks.published.profiles import profile_text
from benchmarks.published.speeds import ANCHORS, speed_of
from morph.contract.errors import PlanError
from morph.contract.profile import Profile, load_profile
from simulator import plan, simulate
from simulator.inputs.transfer import AllReduce

KINDS = ("Varuna", "Bamboo", "derived: ", "assumed: ", "not published", "docs/", "this table")


def leaves(value: object, name: str = "") -> Iterator[str]:
    """Dotted fields without list numbers and dictionary keys that are numbers."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from leaves(part, name if re.fullmatch(r"\d+", str(key)) else f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple) and value:
        for part in value:
            yield from leaves(part, name)
    else:
        yield name


@pytest.mark.parametrize("model", SHIPPED)
def test_the_shipped_file_is_what_the_published_figures_give_bit_for_bit(model: str) -> None:
    path = PROFILES / f"{model}.json"
    assert path.read_text(encoding="utf-8") == profile_text(model), "run python -m benchmarks published.profiles"
    assert load_profile(path) == published_profile(model)


def test_no_other_file_is_shipped() -> None:
    assert {path.stem for path in PROFILES.iterdir()} == set(SHIPPED)


@pytest.mark.parametrize("model", SHIPPED)
def test_every_value_has_a_source_or_is_marked_as_derived(model: str) -> None:
    profile = published_profile(model)
    sources = profile.sources
    fields = {field for field in leaves(profile.model_dump(mode="json")) if not field.startswith("sources")}
    prefixes = tuple(sources)
    missing = [field for field in sorted(fields) if not any((field + ".").startswith(key + ".") for key in prefixes)]
    assert missing == []
    assert all(source.startswith((*KINDS, "BERT", "Megatron", "GPT-2")) for source in sources.values())


@pytest.mark.parametrize("model", SHIPPED)
def test_no_source_names_a_field_that_is_not_there(model: str) -> None:
    profile = published_profile(model)
    fields = {*leaves(profile.model_dump(mode="json")), "sources"}
    assert [key for key in profile.sources if not any((field + ".").startswith(key + ".") for field in fields)] == []


@pytest.mark.parametrize(("model", "billions"), [("gpt2-2.5b", 2.5), ("gpt2-8.3b", 8.3), ("bert-large", 0.34)])
def test_the_shape_has_as_many_parameters_as_published(model: str, billions: float) -> None:
    assert MODELS[model].num_parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_what_crosses_a_cut_is_the_published_3_75_mib() -> None:
    sections = published_profile("gpt2-2.5b").sections
    assert {section.output_bytes_per_sample for section in sections[:-1]} == {3.75 * 2**20}


def test_a_parameter_takes_16_bytes_and_two_more_for_morphs_accumulator() -> None:
    for section in published_profile("gpt2-8.3b").sections:
        parameters = section.parameter_bytes / 2
        assert section.optimizer_bytes + section.parameter_bytes + 2 * parameters == 16 * parameters
        assert section.gradient_bytes == 4 * parameters


def test_bert_large_is_26_percent_faster_at_8_than_at_4() -> None:
    speed = speed_of("bert-large")
    assert speed.efficiency(8) / speed.efficiency(4) == pytest.approx(1.26)


@pytest.mark.parametrize("model", MODELS)
def test_no_model_computes_faster_than_the_gpu_and_all_gain_with_m(model: str) -> None:
    efficiencies = [speed_of(model).efficiency(m) for m in (1, 2, 4, 8, 16, 32)]
    assert efficiencies == sorted(efficiencies)
    assert efficiencies[0] > 0.02
    assert efficiencies[-1] < 0.6


@pytest.mark.parametrize("model", SHIPPED)
def test_the_simulator_gives_the_anchor_back(model: str) -> None:
    """Not to the last digit: the anchor's arithmetic knows no exposed latency, optimizer step or commit."""
    anchor = ANCHORS[model]
    simulated = simulate(
        published_profile(model),
        boundaries=MODELS[model].uniform_boundaries(anchor.num_stages),
        num_replicas=anchor.num_replicas,
        micro_batch_size=anchor.micro_batch_size,
        all_reduce="late",
    )
    assert simulated.expected.mini_batch_s == pytest.approx(anchor.mini_batch_s, rel=0.03)


def test_sections_are_uneven_and_the_head_is_heavy_for_the_narrow_model() -> None:
    sections = published_profile("gpt2-2.5b").sections
    embedding, layer, head = (sections[index].forward[4].median_s for index in (0, 1, -1))
    assert embedding < 0.05 * layer
    assert head == pytest.approx(2 * layer, rel=0.1)


def test_the_word_embedding_is_one_unit_of_both_end_sections() -> None:
    profile = published_profile("bert-large")
    tied = [unit for unit in profile.units if len(unit.sections) > 1]
    assert [unit.sections for unit in tied] == [(0, 25)]
    held = sum(section.parameter_bytes for section in profile.sections)
    assert (
        held - tied[0].parameter_bytes
        == 2 * profile.job.num_parameters
        == sum(u.parameter_bytes for u in profile.units)
    )


def test_jitter_is_half_normal() -> None:
    quantiles = half_normal_quantiles_s(1.0)
    assert sum(quantiles) / len(quantiles) == pytest.approx(0.798, rel=0.02)
    assert quantiles[len(quantiles) // 2] == pytest.approx(0.6745, rel=1e-3)
    sent = published_profile("gpt2-2.5b").inter_node.activation[0].time
    assert sent.quantiles_s[0] < 1e-3 < sent.median_s < sent.mean_s < sent.quantiles_s[-1]


def test_links_have_the_published_bandwidth_and_a_slower_network_less_of_it() -> None:
    def seconds_per_gigabyte(profile: Profile) -> float:
        small, large = profile.inter_node.gradient[0], profile.inter_node.gradient[-1]
        return (large.time.median_s - small.time.median_s) / (large.size_bytes - small.size_bytes) * 1e9

    assert seconds_per_gigabyte(published_profile("gpt2-8.3b")) == pytest.approx(0.8)
    assert seconds_per_gigabyte(published_profile("gpt2-8.3b", slower_network=2)) == pytest.approx(1.6)


def test_four_all_reduces_on_one_link_take_nearly_four_times_as_long() -> None:
    profile = published_profile("gpt2-2.5b")
    alone, shared = (int(AllReduce(profile, k).times_ns(8, np.array([1e9]))[0]) for k in (1, 4))
    assert 3.5 < shared / alone < 4


@pytest.mark.slow
def test_plans_fit_from_the_published_minimum_depth_on() -> None:
    profile = published_profile("gpt2-2.5b")
    found = plan(profile, num_gpus=36, memory_bytes=GPU_MEMORY_BYTES)
    assert found.best.pipeline_depth >= 4
    with pytest.raises(PlanError, match="does not fit"):
        plan(profile, num_gpus=2, memory_bytes=GPU_MEMORY_BYTES)


def test_uniform_boundaries_keep_the_embedding_first_and_the_head_last() -> None:
    assert MODELS["gpt2-2.5b"].uniform_boundaries(9) == (0, 7, 13, 19, 25, 31, 37, 43, 49)
    with pytest.raises(ValueError, match="do not divide 54 layers"):
        MODELS["gpt2-2.5b"].uniform_boundaries(7)


@pytest.mark.parametrize(("model", "slower"), [("gpt3", 1.0), ("gpt2-2.5b", 0.0), ("gpt2-2.5b", float("nan"))])
def test_what_cannot_be_built_is_refused_with_what_is_allowed(model: str, slower: float) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        published_profile(model, slower_network=slower)

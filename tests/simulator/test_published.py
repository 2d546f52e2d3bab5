from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from benchmarks.harness import PROFILES
from benchmarks.published import MODELS, SHIPPED, published_profile
from benchmarks.published.estimated import ESTIMATED, estimated_text
from benchmarks.published.profiles import WITH_T4, profile_text, shipped_profile
from benchmarks.published.speeds import ANCHORS, speed_of
from morph.contract.profile import estimates, load_profile
from simulator import simulate

KINDS = ("Varuna", "Bamboo", "derived: ", "assumed: ", "not published", "docs/", "this table")


def leaves(value: object, name: str = "") -> Iterator[str]:
    """Return dotted fields without list numbers and dictionary keys that are numbers."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from leaves(part, name if re.fullmatch(r"\d+", str(key)) else f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple) and value:
        for part in value:
            yield from leaves(part, name)
    else:
        yield name


@pytest.mark.parametrize("model", [*SHIPPED, WITH_T4])
def test_the_shipped_file_is_what_the_published_figures_give_bit_for_bit(model: str) -> None:
    path = PROFILES / f"{model}.json"
    assert path.read_text(encoding="utf-8") == profile_text(model), "run python -m benchmarks published.profiles"
    assert load_profile(path) == shipped_profile(model)


def test_no_other_file_is_shipped() -> None:
    assert {path.stem for path in PROFILES.iterdir()} == {*SHIPPED, WITH_T4, *ESTIMATED}


@pytest.mark.parametrize("name", ESTIMATED)
@pytest.mark.long
def test_an_estimated_file_is_what_the_configuration_gives_bit_for_bit(name: str) -> None:
    found = (PROFILES / f"{name}.json").read_text(encoding="utf-8")
    assert found == estimated_text(name), "run python -m benchmarks published.estimated"


@pytest.mark.parametrize("name", ESTIMATED)
def test_estimated_files_say_so_for_each_of_their_types(name: str) -> None:
    profile, types = load_profile(PROFILES / f"{name}.json"), ESTIMATED[name][1]
    assert tuple(node_type.name for node_type in profile.node_types) == types[1:]
    assert len(estimates(profile, types)) == len(types)


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
    """The last digits differ, because the anchor's arithmetic has no exposed latency, optimizer step or commit."""
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

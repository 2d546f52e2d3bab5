from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from morph.contract.errors import ProfileError
from morph.contract.profile import Contention, NodeTypeProfile, Profile, Timing, load_profile
from simulator import synthetic_profile

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def profile() -> Profile:
    made = synthetic_profile(num_sections=3, micro_batch_sizes=(1, 2))
    times = {m: Timing(median_s=float(m), mad_s=0.0, num_samples=1) for m in (1, 2)}
    small = NodeTypeProfile(
        name="small",
        environment=made.environment.model_copy(update={"device": "a small core"}),
        forward=(times,) * 3,
        backward=(times,) * 3,
        optimizer_step=(times[1],) * 3,
        contention=(Contention(num_busy=2, factor=1.5), Contention(num_busy=4, factor=2.0)),
    )
    return made.model_copy(update={"node_types": (small,)})


NAN, INFINITY = float("nan"), float("inf")

MISTAKES: dict[str, tuple[Change, list[str]]] = {
    "a newer schema": (
        lambda p: p.update(schema_version=2, something_new=[1], sections="another form"),
        ["schema_version: written by a newer Morph: schema_version 2; this one reads 1"],
    ),
    "an older schema": (lambda p: p.update(schema_version=0), ["schema_version: ", "must be 1", "(got 0)"]),
    "sections left out": (lambda p: p.pop("sections"), ["sections: ", "is missing"]),
    "no sections": (lambda p: p.update(sections=[]), ["sections: ", "at least 1 item"]),
    "a section left out": (lambda p: p["sections"].pop(1), ["sections[1].index is 2", "0..K-1"]),
    "a part of a section left out": (lambda p: p["sections"][1].pop("forward"), ["sections.1.forward: ", "is missing"]),
    "a negative time": (
        lambda p: p["sections"][2]["backward"]["1"].update(median_s=-0.5),
        ["sections.2.backward.1.median_s: ", "at least 0", "(got -0.5)"],
    ),
    "a time that is no number": (
        lambda p: p["sections"][0]["forward"]["2"].update(median_s=NAN),
        ["sections.0.forward.2.median_s: ", "finite number", "(got nan)"],
    ),
    "an endless time": (
        lambda p: p["intra_node"]["gradient"][0]["time"].update(mad_s=INFINITY),
        ["intra_node.gradient.0.time.mad_s: ", "finite number", "(got inf)"],
    ),
    "a negative quantile": (
        lambda p: p["commit"].update(quantiles_s=[-1.0, 1.0]),
        ["commit.quantiles_s.0: ", "at least 0", "(got -1.0)"],
    ),
    "quantiles out of order": (
        lambda p: p["commit"].update(quantiles_s=[2.0, 1.0]),
        ["commit: quantiles_s are none, or at least two, ascending"],
    ),
    "a bandwidth of nothing": (
        lambda p: p.update(checkpoint_write_bytes_per_s=0),
        ["checkpoint_write_bytes_per_s: ", "above 0", "(got 0)"],
    ),
    "neighbours that make it faster": (
        lambda p: p.update(contention=[{"num_busy": 2, "factor": 0.9}]),
        ["contention.0.factor: ", "at least 1", "(got 0.9)"],
    ),
    "busy neighbours out of order": (
        lambda p: p["node_types"][0]["contention"].reverse(),
        ["node_types[0].contention has num_busy [4, 2]", "allowed: each more than the one before"],
    ),
    "a node type with other sections": (
        lambda p: p["node_types"][0]["forward"].pop(),
        ["node_types[0].forward has 2 entries", "allowed: 3"],
    ),
    "a node type with a step too many": (
        lambda p: p["node_types"][0]["optimizer_step"].append(p["commit"]),
        ["node_types[0].optimizer_step has 4 entries", "allowed: 3"],
    ),
    "a node type with other micro-batch sizes": (
        lambda p: p["node_types"][0]["backward"][1].pop("2"),
        ["node_types[0] has other micro-batch sizes for section 1", "allowed: 1, 2"],
    ),
    "two node types of one name": (
        lambda p: p["node_types"].append(p["node_types"][0]),
        ["node_types[1].name is 'small'"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_error(tmp_path: Path, profile: Profile, mistake: str) -> None:
    change, parts = MISTAKES[mistake]
    content = json.loads(profile.model_dump_json())
    change(content)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    message = str(caught.value)
    for part in [f"{path}: ", *parts]:
        assert part in message
    assert "Value error" not in message
    assert len(message) < len(str(path)) + 250


def test_a_node_type_takes_the_place_of_what_it_measured(profile: Profile) -> None:
    there, small = profile.for_node_type("small"), profile.node_types[0]
    assert there.environment.device == "a small core"
    assert [section.forward[2].median_s for section in there.sections] == [2.0] * 3
    assert [section.backward[1].median_s for section in there.sections] == [1.0] * 3
    assert [section.optimizer_step.median_s for section in there.sections] == [1.0] * 3
    assert there.contention == small.contention
    assert [section.parameter_bytes for section in there.sections] == [
        section.parameter_bytes for section in profile.sections
    ]
    assert (there.intra_node, there.inter_node) == (profile.intra_node, profile.inter_node)
    assert (there.all_reduce, there.job) == (profile.all_reduce, profile.job)


def test_links_of_a_node_type_take_their_place(profile: Profile) -> None:
    own = profile.node_types[0].model_copy(update={"intra_node": profile.inter_node})
    there = profile.model_copy(update={"node_types": (own,)}).for_node_type("small")
    assert (there.intra_node, there.inter_node) == (profile.inter_node, profile.inter_node)


def test_a_node_type_that_was_not_measured_is_refused(profile: Profile) -> None:
    with pytest.raises(ProfileError, match=r"node_types: is not among .* \(got 'large'\); allowed: small"):
        profile.for_node_type("large")
    with pytest.raises(ProfileError, match="none yet; morph calibrate --add-node-type adds one"):
        profile.model_copy(update={"node_types": ()}).for_node_type("large")

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from calibrate import add_node_type
from calibrate.computing import compute
from calibrate.computing.subject import load_subject
from calibrate.links.network import NetworkMeasurement
from calibrate.timing.environment import describe_environment
from calibrate.timing.samples import timing
from calibrate.writing import node_type
from calibrate.writing.node_type import links_differ, with_node_type
from morph.cli.main import app
from morph.contract.errors import ProfileError
from morph.contract.profile import (
    Contention,
    LinkProfile,
    NodeTypeProfile,
    Profile,
    SendTime,
    Timing,
    load_profile,
    write_profile,
)
from morph.machine import machine_memory_bytes, num_cores
from simulator import synthetic_profile
from tests.cli.given import without_phases

JOB = f"{Path(__file__).parents[2]}/configs/jobs/tiny_gpt.py:job"
SIZES = (1_000, 100_000)


def link(base_s: float, spread: float = 0.0, sizes: tuple[int, ...] = SIZES) -> LinkProfile:
    times = tuple(
        SendTime(size_bytes=size, time=Timing(median_s=base_s, mad_s=spread * base_s, num_samples=9)) for size in sizes
    )
    return LinkProfile(activation=times, gradient=times)


def profile_with(intra: LinkProfile, inter: LinkProfile) -> Profile:
    made = synthetic_profile(num_sections=3, micro_batch_sizes=(1, 2))
    return made.model_copy(update={"intra_node": intra, "inter_node": inter})


def added(profile: Profile, name: str = "small") -> NodeTypeProfile:
    times = {m: timing([0.5 * m, 0.6 * m]) for m in profile.micro_batch_sizes}
    return NodeTypeProfile(
        name=name,
        environment=profile.environment.model_copy(update={"device": "a small core"}),
        forward=(times,) * 3,
        backward=(times,) * 3,
        optimizer_step=(timing([0.25]),) * 3,
        contention=(Contention(num_busy=2, factor=1.5),),
    )


@pytest.mark.parametrize(
    ("measured", "differ"),
    [
        (link(1e-3), False),
        (link(1.15e-3), False),  # within a fifth of each other
        (link(1.5e-3), True),
        (link(0.5e-3), True),
        (link(1.5e-3, spread=0.5), False),  # within their spreads
        (link(9.0, sizes=(77,)), False),  # there is nothing to compare with
    ],
)
def test_links_differ_beyond_a_fifth_and_beyond_their_spread(measured: LinkProfile, differ: bool) -> None:
    assert links_differ(link(1e-3), measured) is differ


def test_links_are_kept_only_where_they_differ() -> None:
    known = link(1e-3)
    repeating, distinct = profile_with(known, known), profile_with(known, link(2e-3))
    (same,) = with_node_type(repeating, added(repeating), link(1.01e-3)).node_types
    assert (same.intra_node, same.inter_node) == (None, None)
    (other,) = with_node_type(repeating, added(repeating), link(3e-3)).node_types
    assert (other.intra_node, other.inter_node) == (link(3e-3), link(3e-3))
    (between,) = with_node_type(distinct, added(distinct), link(3e-3)).node_types
    assert (between.intra_node, between.inter_node) == (link(3e-3), None)


def test_a_type_of_the_same_name_is_replaced_and_others_stay() -> None:
    base = profile_with(link(1e-3), link(1e-3))
    two = with_node_type(with_node_type(base, added(base, "a"), link(1e-3)), added(base, "b"), link(1e-3))
    again = with_node_type(two, added(base, "a"), link(5e-3))
    assert [entry.name for entry in again.node_types] == ["b", "a"]
    assert again.node_types[0] == two.node_types[1]
    assert again.for_node_type("a").intra_node == link(5e-3)


exported_once = cache(load_subject)


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    """Return a profile of the tiny job as it is in a file, with made-up times and without optional fields."""
    import torch

    subject = exported_once(JOB, torch.device("cpu"), 6)
    model = subject.cut(2)
    made = synthetic_profile(num_sections=len(model.sections), batch_size=12, micro_batch_sizes=(2,))
    content: dict[str, Any] = json.loads(made.model_dump_json(exclude_defaults=True))
    content["job"]["fingerprint"] = model.fingerprint
    content["commit"]["median_s"] = 0.1 + 0.2  # not a round number
    return content


@pytest.mark.slow
def test_adding_a_type_leaves_all_else_bit_for_bit(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_link = NetworkMeasurement(link(1e-9), (), timing([1e-3]))
    monkeypatch.setattr(node_type, "measure_network", lambda *_: measured_link)
    monkeypatch.setattr(compute, "measure_contention", lambda *_, **__: (Contention(num_busy=2, factor=1.25),))
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(tiny), encoding="utf-8")
    command = ["calibrate", JOB, "--add-node-type", "small", "--profile", str(path), "--samples", "5"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "small" in result.output
    content = json.loads(path.read_text(encoding="utf-8"))
    (entry,) = content.pop("node_types")
    assert content == tiny
    assert entry["name"] == "small"
    there = load_profile(path).for_node_type("small")
    assert there.sections[1].forward[2].num_samples == 5
    assert there.contention == (Contention(num_busy=2, factor=1.25),)
    assert there.sections[1].parameter_bytes == load_profile(path).sections[1].parameter_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("fingerprint", "of another model", r"fingerprint: .*allowed: of another"),
        ("batch_size", 24, "batch_size: .*24"),
    ],
)
def test_a_profile_of_another_job_is_refused_before_anything_is_measured(
    tiny: dict[str, Any], field: str, value: object, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_type, "load_subject", exported_once)
    monkeypatch.setattr(node_type, "measure_compute", lambda *_, **__: pytest.fail("it was measured"))
    profile = Profile.model_validate({**tiny, "job": {**tiny["job"], field: value}})
    with pytest.raises(ProfileError, match=problem):
        add_node_type(profile, JOB, "small")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--add-node-type", "small"], "--add-node-type: needs a profile to add to (got 'small')"),
        (["--profile", "{profile}"], "--profile: is used only to add to it"),
        (["--between-zones", "--profile", "{profile}"], "--between-zones: needs a node in another zone"),
        (["--between-zones"], "--between-zones: needs a profile to add to"),
        (["--add-node-type", " ", "--profile", "{profile}"], "--add-node-type: is empty"),
        (["--add-node-type", "small", "--profile", "{profile}", "-m", "2"], "--micro-batch: contradicts"),
        (
            ["--add-node-type", "small", "--profile", "{profile}", "--checkpoint-url", "/x"],
            "--checkpoint-url: contradicts",
        ),
        (["--device", "tpu"], "--device: this machine has no such device (got 'tpu'); allowed: cpu"),
        (["--device", "cuda:7"], "--device: this machine has no such device"),
        (["--checkpoint-url", "nosuch://bucket"], "--checkpoint-url: cannot be written"),
    ],
)
def test_options_that_contradict_are_one_line(tmp_path: Path, options: list[str], problem: str) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile_with(link(1e-3), link(1e-3)), path)
    given = [option.format(profile=path) for option in options]
    result = CliRunner().invoke(app, ["calibrate", JOB, "-o", str(tmp_path / "new.json"), *given])
    assert result.exit_code == 2
    assert len(without_phases(result.stderr)) == 1
    assert problem in result.stderr
    assert not (tmp_path / "new.json").exists()


MIB = 1 << 20


def test_a_cpu_worker_has_its_cores_share_of_the_memory() -> None:
    found = describe_environment(torch.device("cpu")).device_memory_bytes
    assert found == machine_memory_bytes() // num_cores()
    assert found is not None
    assert found <= psutil.virtual_memory().total


def test_a_container_that_may_have_less_than_the_machine_is_believed(tmp_path: Path) -> None:
    limit, none, absent = tmp_path / "limit", tmp_path / "none", tmp_path / "absent"
    limit.write_text(f"{64 * MIB}\n", encoding="ascii")
    none.write_text("max\n", encoding="ascii")
    total = psutil.virtual_memory().total
    assert machine_memory_bytes((absent, limit)) == 64 * MIB
    assert machine_memory_bytes((absent, none)) == total
    limit.write_text(f"{2**63}\n", encoding="ascii")
    assert machine_memory_bytes((limit,)) == total
    all_cores = num_cores(absent)
    for text, cores in (("max 100000\n", all_cores), ("50000 100000\n", 1), (f"{10**9} 100000\n", all_cores)):
        limit.write_text(text, encoding="ascii")
        assert num_cores(limit) == cores

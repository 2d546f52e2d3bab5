"""Random profiles and options, most of them impossible: an answer, or a refusal in one line that names the place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from morph.cli.main import app
from morph.contract.profile import Contention, NodeTypeProfile, Profile
from simulator import synthetic_profile
from simulator.commands.settings import PlanSettings, SimulateSettings
from tests.grids import IS_LONG

ODD: tuple[Any, ...] = (
    *(True, False, None, "", "x", "1", [], {}, [1], 0, -1, 0.5, 1e-300, 1e10, 1e300),
    *(2**31, 2**53, 2**62, 10**12, 10**20),
)
NUMBERS = ("0", "-1", "1", "3", "0.5", "1e308", "nan", "inf", "x", "", str(10**6), str(10**9), str(10**20))
FAIR = {
    "plan": (
        *(["--gpus", "5"], ["--gpus", "2..4"], ["--nodes", "2x1,1x4"], ["--objective", "dollars", "--price", "1"]),
        *(
            ["--objective", "progress", "--set", "revocations_per_hour=1"],
            ["--jitter-seed", "3", "--set", "num_draws=2"],
            ["--price", "2", "--budget", "6"],
            ["--schedule", "1f1b"],
        ),
    ),
    "simulate": (
        *(["-P", "2"], ["-D", "2"], ["--jitter-seed", "3"], ["--slow", "0:2"], ["--set", "window_slope=2"]),
        ["--set", "redundant_computation=efeb"],
    ),
    "profile show": (),
}
OPTIONS = {
    "plan": (
        *("--gpus", "--nodes", "--gpus-per-node", "--memory-gib", "--m", "--price", "--jitter-seed", "--node-type"),
        *("--budget", "--tolerance"),
        *(f"--set {name}" for name in PlanSettings.model_fields),
    ),
    "simulate": (
        *("-P", "-D", "--m", "--gpus-per-node", "--node-type", "--slow", "--jitter-seed"),
        *(f"--set {name}" for name in SimulateSettings.model_fields),
    ),
    "profile show": ("--node-type",),
}


def _whole() -> Profile:
    profile = synthetic_profile(num_sections=4, batch_size=16, micro_batch_sizes=(1, 2), tied=True, jitter=0.2)
    other = NodeTypeProfile(
        name="old",
        environment=profile.environment,
        forward=tuple(section.forward for section in profile.sections),
        backward=tuple(section.backward for section in profile.sections),
        optimizer_step=tuple(section.optimizer_step for section in profile.sections),
        contention=(Contention(num_busy=2, factor=1.5),),
    )
    return profile.model_copy(update={"node_types": (other,), "contention": other.contention})


WHOLE = _whole().model_dump_json()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _places(child, (*path, key))


PLACES = list(_places(json.loads(WHOLE)))


Changes = list[tuple[tuple[Any, ...], Any]]


def _changed(changes: Changes) -> str:
    """Return the profile with other values at some places."""
    content = json.loads(WHOLE)
    for path, value in changes:
        parent = content
        try:
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = value
        except (KeyError, IndexError, TypeError):  # an earlier change removed the place
            continue
    return json.dumps(content)


@st.composite
def _commands(draw: st.DrawFn) -> list[str]:
    """Return a command with valid and odd options, without its profile."""
    command = draw(st.sampled_from(sorted(FAIR)))
    fair = draw(st.lists(st.sampled_from(FAIR[command]), max_size=3)) if FAIR[command] else []
    odd = draw(st.lists(st.tuples(st.sampled_from(OPTIONS[command]), st.sampled_from(NUMBERS)), max_size=2))
    words = [word for pair in fair for word in pair]
    for name, value in odd:
        given = f"{value}:{value}" if name == "--slow" else value
        words += ["--set", f"{name.split()[1]}={given}"] if name.startswith("--set ") else [name, given]
    return [*command.split(), *words]


def _refused(path: Path, *arguments: str) -> str:
    """Run a command; return the one line with which it refuses, or "" if it answers."""
    result = CliRunner().invoke(app, [*arguments, str(path)], prog_name="morph")
    if result.exit_code == 0:
        return ""
    assert result.exit_code == 2, (arguments, result.exit_code, result.exception)
    assert not result.stdout, "an answer precedes the refusal"
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stderr


@pytest.mark.slow
@settings(max_examples=300 if IS_LONG else 75, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(arguments=_commands(), changes=st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(ODD)), max_size=2))
def test_whatever_is_given_is_answered_or_refused_in_one_line(
    arguments: list[str], changes: Changes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "odd.json"
    path.write_text(_changed(changes))
    said = _refused(path, *arguments)
    if said.startswith("error: "):
        assert said.count("\n") == 1
        assert "odd.json: " in said or said.startswith("error: -"), said
    else:
        assert not said or "Usage: " in said


def _of(number: str, *path: Any) -> Changes:
    return [(path, json.loads(number))]


FORWARD = ("sections", 1, "forward", "1", "median_s")
PLAN, SIMULATE = ("plan", "--gpus", "5"), ("simulate", "-P", "2")
PROGRESS = (*PLAN, "--objective", "progress")
REVOKED = (*PROGRESS, "--set", "revocations_per_hour=1")
MALFORMED: list[tuple[Changes, tuple[str, ...], str]] = [
    (_of("1e10", *FORWARD), PLAN, "sections.1.forward.1.median_s: must be at most 86400 (got"),
    (_of("true", *FORWARD), PLAN, "sections.1.forward.1.median_s: must be a number (got True)"),
    (_of("true", "job", "batch_size"), PLAN, "job.batch_size: must be an integer (got True)"),
    (_of(str(2**62), "sections", 0, "parameter_bytes"), PLAN, "sections.0.parameter_bytes: must be at most"),
    (_of(str(10**12), "job", "batch_size"), SIMULATE, "job.batch_size: must be at most 1000000000"),
    (
        _of(str(10**9), "job", "batch_size"),
        SIMULATE,
        "job.batch_size: a mini-batch of 500000000 micro-batches of 2 has",
    ),
    (
        _of(str(10**6), "job", "batch_size"),
        (*SIMULATE, "--set", "num_draws=99", "--jitter-seed", "1"),
        "--set num_draws: are too many",
    ),
    ([], (*PLAN, "--memory-gib", "1e300"), "--memory-gib: is out of range (got 1e+300); allowed: a number above 0, at"),
    ([], (*PLAN, "--set", f"compute_slots={10**20}"), "--set compute_slots: is out of range"),
    (
        [],
        (*PLAN, "--jitter-seed", "1", "--set", f"num_draws={10**9}"),
        "--set num_draws: is out of range (got 1000000000); allowed: a",
    ),
    (
        [],
        (*PLAN, "--jitter-seed", str(2**63)),
        f"--jitter-seed: is out of range (got {2**63}); allowed: a whole number from 0 to {2**63 - 1}",
    ),
    (
        [],
        (*PLAN, "--set", "zone_gbit_per_s=1e-9"),
        "--set zone_gbit_per_s: is out of range (got 1e-09); allowed: a number from 0.0001 to 100000",
    ),
    ([], (*PLAN, "--price", "1", "--budget", "nan"), "--budget: is out of range (got nan); allowed: a number above 0"),
    ([], (*PLAN, "--set", "zone_usd_per_gb=-1"), "--set zone_usd_per_gb: is out of range (got -1.0)"),
    ([], (*PROGRESS, "--set", "revocations_per_hour=1e6"), "--set revocations_per_hour: is out of range"),
    ([], (*REVOKED, "--set", "pause_s=1e308"), "--set pause_s: is out of range"),
    ([], (*REVOKED, "--set", "replacement_s=inf"), "--set replacement_s: must be"),
    (
        [],
        (*PROGRESS, "--set", "revocations_per_hour=3600", "--set", "replacement_s=1e7", "--set", "pause_s=86400"),
        "--set revocations_per_hour: is so high that no shape makes progress (got 3600.0); allowed: fewer",
    ),
    ([], (*REVOKED, "--set", "revoked_together=0"), "--set revoked_together: is out of range"),
    ([], ("plan", "--gpus", "999999999"), "--gpus: is out of range"),
    ([], ("plan", "--gpus", "1..100000"), "--gpus: is not a range of GPUs"),
    ([], ("plan", "--nodes", "99999x9999"), "--nodes: is not a list of nodes"),
    (
        [],
        (*PLAN, "--objective", "dollars", "--price", "1:2,1:3"),
        "--price: gives a size twice, or a size that is out of range",
    ),
    ([], (*PLAN, "--objective", "dollars", "--price", "1e9"), "--price: is not a price"),
    ([], (*SIMULATE, "--slow", "0:2", "--slow", "0:3"), "--slow: is given twice (got '0:3')"),
    ([], (*SIMULATE, "--slow", "0:1e9"), "--slow: is not a slow worker"),
    (
        [],
        ("simulate", "-P", "1", "--set", "redundant_computation=efeb"),
        "--set redundant_computation: nobody takes over for a lost worker (got 'efeb')",
    ),
    ([], (*SIMULATE, "--gpus-per-node", str(10**20)), "--gpus-per-node: is out of range"),
]


@pytest.mark.parametrize(("changes", "arguments", "says"), MALFORMED)
def test_values_out_of_range_are_named_with_their_range(
    changes: Changes, arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "odd.json"
    path.write_text(_changed(changes))
    assert says in _refused(path, *arguments)


@pytest.mark.parametrize("arguments", [PLAN, (*PLAN, "--schedule", "gpipe"), SIMULATE])
@pytest.mark.parametrize("places", [FORWARD[:3], ("inter_node",), ("all_reduce",)])
def test_the_longest_times_are_answered_or_refused(
    arguments: tuple[str, ...], places: tuple[Any, ...], tmp_path: Path
) -> None:
    path, here = tmp_path / "odd.json", len(places)
    path.write_text(
        _changed([(place, 86_400) for place in PLACES if place[:here] == places and place[-1] == "median_s"])
    )
    assert _refused(path, *arguments).count("\n") <= 1

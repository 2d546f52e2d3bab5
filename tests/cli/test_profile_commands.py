"""``morph profile``: showing a profile, and updating it with a run's measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from calibrate.render.tables import kinds_of, places_text, spread_text
from manager.controller.decide import decide
from manager.controller.state.actions import NoteCorrection
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import Tick
from manager.controller.state.profile_correction import Correction
from manager.controller.state.state import initial_state
from manager.journal.journal import Journal
from manager.run_dir import JOURNAL, RunDir, RunFacts
from morph.cli.main import app
from morph.contract.profile import AllReduceTime, Contention, NodeTypeProfile, Profile, Timing, load_profile
from simulator import plan_table, synthetic_profile
from simulator.inputs.node_types import of_pool_type
from simulator.inputs.synthetic import with_type

SECOND = Timing(median_s=1.0, mad_s=0.1, num_samples=5, mean_s=1.1, quantiles_s=(0.5, 0.9, 1.0, 1.2, 4.0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = synthetic_profile(num_sections=5, forward_s=[0.001, 0.002, 0.002, 0.002, 0.004], micro_batch_sizes=(1, 2, 4))
    times = dict.fromkeys(made.micro_batch_sizes, SECOND)
    small = NodeTypeProfile(
        name="small",
        environment=made.environment.model_copy(update={"device": "a small core"}),
        forward=(times,) * 5,
        backward=(times,) * 5,
        optimizer_step=(SECOND,) * 5,
    )
    profile = made.model_copy(
        update={
            "contention": (Contention(num_busy=2, factor=1.61),),
            "sources": {"inter_node": "from a data sheet"},
            "all_reduce": (*made.all_reduce, AllReduceTime(ring_size=2, size_bytes=1000, in_flight=4, time=SECOND)),
            "node_types": (small,),
        }
    )
    file = tmp_path / "profile.json"
    file.write_text(profile.model_dump_json(), encoding="utf-8")
    return file


def shown(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["profile", "show", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_type_that_was_not_measured_is_scaled_and_every_plan_says_so(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(synthetic_profile(num_sections=4).model_dump_json(), encoding="utf-8")
    known = load_profile(file)
    for factor in ("3", "2"):  # the later one counts
        added = CliRunner().invoke(
            app, ["profile", "add-type", str(file), "t4", "--slower", factor, "--memory-gib", "15"]
        )
        assert added.exit_code == 0, added.output
        assert f"t4: the profile's times, {factor} times as long (not measured)" in added.stdout
    profile = load_profile(file)
    (node_type,) = profile.node_types
    assert node_type.environment.device_memory_bytes == 15 * 2**30
    of_type = of_pool_type(profile, "t4")
    for scaled, own in zip(of_type.sections, known.sections, strict=True):
        assert scaled.backward[1].median_s == 2 * own.backward[1].median_s
    assert "(estimated)" in shown(file)
    assert "the profile's times, 2 times as long" in shown(file, "--node-type", "t4")
    planned = CliRunner().invoke(app, ["plan", str(file), "--pool", "synthetic=1,t4=2"])
    assert (
        "warning: the times of t4 were not measured, but estimated: the profile's times, 2 times as long"
        in planned.stderr
    )
    alone = CliRunner().invoke(app, ["plan", str(file), "--gpus", "2"])
    assert "not measured" not in alone.stderr


def test_a_measured_type_is_not_scaled_and_bad_values_are_named(path: Path) -> None:
    before = path.read_text()
    for arguments, problem in (
        (("small", "--slower", "2"), "NAME: was measured (got 'small')"),
        (("t4@a", "--slower", "2"), "NAME: is not a name of a type (got 't4@a')"),
        (("t4", "--slower", "0"), "--slower: is out of range (got 0.0)"),
        (("t4", "--slower", "2", "--memory-gib", "-1"), "--memory-gib: is out of range (got -1.0)"),
    ):
        refused = CliRunner().invoke(app, ["profile", "add-type", str(path), *arguments])
        assert refused.exit_code == 2
        assert problem in refused.stderr
    assert path.read_text() == before


def test_everything_that_was_measured_is_shown(path: Path) -> None:
    text = shown(path)
    assert "synthetic: 5 sections" in text
    assert "1-3" in text  # sections of one kind in one row
    assert "x1.61 with 2 at once" in text
    assert "activation, same node" in text
    assert "gradient, between nodes" in text
    assert "4 in flight" in text
    assert "a small core" in text
    assert "from a data sheet" in text
    assert "checkpoint write, upload" in text


def test_another_type_of_node_is_shown_as_it_is_there(path: Path) -> None:
    text = shown(path, "--node-type", "small")
    assert "a small core" in text
    assert "1.00 ±0.1 s" in text or "1 ±0.1 s" in text
    result = CliRunner().invoke(app, ["profile", "show", str(path), "--node-type", "large"])
    assert result.exit_code == 2
    assert f"{path}: --node-type: is not among the profile's node types (got 'large'); allowed: small" in result.stderr


@pytest.mark.slow
def test_its_curves_are_drawn(path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    assert "drawn: " in shown(path, "--png", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_a_picture_that_cannot_be_written_is_refused_at_once(path: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["profile", "show", str(path), "--png", str(tmp_path / "no/p.png")])
    assert result.exit_code == 2
    assert "its folder does not exist" in result.stderr
    assert result.stdout == ""


def test_sections_of_one_kind_are_one_group_wherever_they_are() -> None:
    profile: Profile = synthetic_profile(num_sections=6, forward_s=[0.1, 0.2, 0.1, 0.2, 0.2, 0.1])
    assert [places_text(kind) for kind in kinds_of(profile)] == ["0, 2", "1, 3-4", "5"]


@pytest.mark.parametrize(
    ("median_s", "mad_s", "text"),
    [(1.5e-3, 2e-5, "1.5 ±0.02 ms"), (2.0, 0.5, "2 ±0.5 s"), (0.0, 0.0, "0 ±0 ns"), (3.21e-5, 1.2e-5, "32.1 ±10 us")],
)
def test_a_time_and_its_spread_have_one_unit(median_s: float, mad_s: float, text: str) -> None:
    assert spread_text(Timing(median_s=median_s, mad_s=mad_s, num_samples=3)) == text


FACTORS = (1.3, 1.0, 0.9)
CORRECTION = Correction(factors=FACTORS, errors=(0.02,) * 3)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    file = tmp_path / "measured.json"
    file.write_text(synthetic_profile(num_sections=3).model_dump_json(), encoding="utf-8")
    return file


def make_run(run_dir: Path, profile: Profile, correction: Correction | None = CORRECTION, node_type: str = "") -> Path:
    """Return a run directory whose journal holds one correction or none."""
    chosen = plan_table(profile, 1)[1]
    units = {unit.id: unit.sections for unit in profile.units} or {"all": (0, 1, 2)}
    config = ControllerConfig(
        fingerprint=profile.job.fingerprint,
        plans={1: chosen},
        units=units,
        unit_bytes=dict.fromkeys(units, 1),
        num_steps=1,
        expected_nodes=1,
        node_type=node_type,
    )
    facts = RunFacts(
        job="job.py:job",
        fingerprint=profile.job.fingerprint,
        micro_batch_size=chosen.micro_batch_size,
        batch_size=profile.job.batch_size,
        num_sections=3,
    )
    with RunDir(run_dir, facts), Journal.open(run_dir / JOURNAL) as journal:
        journal.append_config(0.0, config)
        if correction is not None:
            note = NoteCorrection(correction=correction)
            decision = decide(initial_state(config), Tick(), 0.0)
            journal.append_decision(0.0, Tick(), decision.model_copy(update={"actions": (note,)}))
    return run_dir


def refine(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["profile", "refine", *map(str, arguments)])
    return result.exit_code, result.output


def test_section_times_are_longer_by_their_factors_and_nothing_else_changes(tmp_path: Path, profile: Path) -> None:
    measured = load_profile(profile)
    run_dir, output = make_run(tmp_path / "run", measured), tmp_path / "refined.json"
    code, told = refine(run_dir, "--profile", profile, "-o", output)
    assert code == 0, told
    assert (
        "section 0 takes 1.30 times as long, give or take 2%, section 1 takes 1.00 times as long, give or take 2%"
        in told
    )
    refined = load_profile(output)
    for section, before, factor in zip(refined.sections, measured.sections, FACTORS, strict=True):
        for m, timing in section.forward.items():
            assert timing.median_s == pytest.approx(before.forward[m].median_s * factor)
        for m, timing in section.backward.items():
            assert timing.median_s == pytest.approx(before.backward[m].median_s * factor)
        assert section.optimizer_step == before.optimizer_step
    assert refined.model_copy(update={"sections": measured.sections}) == measured


def test_a_run_on_one_type_refines_the_times_of_this_type_alone(tmp_path: Path, profile: Path) -> None:
    known = with_type(load_profile(profile), "t4", 2.0)
    profile.write_text(known.model_dump_json(), encoding="utf-8")
    run_dir, output = make_run(tmp_path / "run", known, node_type="t4"), tmp_path / "refined.json"
    code, told = refine(run_dir, "--profile", profile, "-o", output)
    assert code == 0, told
    assert "on t4 section 0 takes 1.30 times as long, give or take 2%" in told
    refined = load_profile(output)
    assert refined.sections == known.sections
    for section, factor in enumerate(FACTORS):
        now, before = (of_pool_type(each, "t4").sections[section].forward[1].median_s for each in (refined, known))
        assert now == pytest.approx(before * factor), section


def test_times_of_each_type_are_longer_by_its_factors(tmp_path: Path, profile: Path) -> None:
    known = with_type(with_type(load_profile(profile), "t4", 2.0), "k80", 3.0)
    profile.write_text(known.model_dump_json(), encoding="utf-8")
    own, other = (Correction(factors=(factor,) * 3, errors=(0.02,) * 3) for factor in (1.1, 1.4))
    correction = Correction(factors=(9.0,) * 3, errors=(0.4,) * 3, types={"synthetic": own, "t4": other})
    output = tmp_path / "refined.json"
    code, told = refine(make_run(tmp_path / "run", known, correction), "--profile", profile, "-o", output)
    assert code == 0, told
    assert "on synthetic sections 0-2 take 1.10 times as long, give or take 2%; on t4 sections 0-2 take 1.40" in told
    refined = load_profile(output)
    for name, factor in (("t4", 1.4), ("k80", 1.0), ("synthetic", 1.1)):
        now, before = (of_pool_type(each, name).sections[1].forward[1].median_s for each in (refined, known))
        assert now == pytest.approx(before * factor), name


def refused(*arguments: object) -> str:
    """Return the output without line breaks."""
    code, said = refine(*arguments)
    assert code == 2
    return " ".join(said.split())


def test_what_cannot_be_refined_is_one_sentence(tmp_path: Path, profile: Path) -> None:
    measured = load_profile(profile)
    new = make_run(tmp_path / "new", measured, None)
    assert refused(new, "--profile", profile).endswith(
        "new: has measured no section times that differ from its profile's"
    )
    run = make_run(tmp_path / "run", measured)
    assert "run: has no command.json" in refused(run)
    other = tmp_path / "other.json"
    job = measured.job.model_copy(update={"fingerprint": "another"})
    other.write_text(measured.model_copy(update={"job": job}).model_dump_json(), encoding="utf-8")
    assert "other.json: belongs to another model than this run" in refused(run, "--profile", other)

"""``morph profile refine``: what a run measured goes into its profile, or one line says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from manager.controller.decide import decide
from manager.controller.state.actions import NoteCorrection
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import Tick
from manager.controller.state.learned import Correction
from manager.controller.state.state import initial_state
from manager.journal.journal import Journal
from manager.run_dir import JOURNAL, RunDir, RunFacts
from morph.cli.main import app
from morph.contract.profile import Profile, load_profile
from simulator import plan_table, synthetic_profile

FACTORS = (1.3, 1.0, 0.9)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    file = tmp_path / "measured.json"
    file.write_text(synthetic_profile(num_sections=3).model_dump_json(), encoding="utf-8")
    return file


def make_run(run_dir: Path, profile: Profile, factors: tuple[float, ...] = FACTORS) -> Path:
    """A run directory whose journal holds one correction, or none."""
    chosen = plan_table(profile, 1)[1]
    units = {unit.id: unit.sections for unit in profile.units} or {"all": (0, 1, 2)}
    config = ControllerConfig(
        fingerprint=profile.job.fingerprint,
        plans={1: chosen},
        units=units,
        unit_bytes=dict.fromkeys(units, 1),
        num_steps=1,
        expected_nodes=1,
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
        if factors:
            note = NoteCorrection(correction=Correction(factors=factors, errors=(0.02,) * 3))
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
    assert "0 x1.30 (each +-2%), 1 x1.00 (each +-2%), 2 x0.90 (each +-2%)" in told
    refined = load_profile(output)
    for section, before, factor in zip(refined.sections, measured.sections, FACTORS, strict=True):
        for m, timing in section.forward.items():
            assert timing.median_s == pytest.approx(before.forward[m].median_s * factor)
        for m, timing in section.backward.items():
            assert timing.median_s == pytest.approx(before.backward[m].median_s * factor)
        assert section.optimizer_step == before.optimizer_step
    assert refined.model_copy(update={"sections": measured.sections}) == measured


def refused(*arguments: object) -> str:
    """What is said, without where lines were broken."""
    code, said = refine(*arguments)
    assert code == 2
    return " ".join(said.split())


def test_what_cannot_be_refined_is_one_sentence(tmp_path: Path, profile: Path) -> None:
    measured = load_profile(profile)
    assert refused(tmp_path / "nowhere", "--profile", profile).endswith("nowhere: there is no such run directory")
    new = make_run(tmp_path / "new", measured, ())
    assert refused(new, "--profile", profile).endswith("new: has learned nothing that its profile does not say")
    run = make_run(tmp_path / "run", measured)
    assert "run: has no command.json" in refused(run)
    other = tmp_path / "other.json"
    job = measured.job.model_copy(update={"fingerprint": "another"})
    other.write_text(measured.model_copy(update={"job": job}).model_dump_json(), encoding="utf-8")
    assert "other.json: is not of this run's model" in refused(run, "--profile", other)

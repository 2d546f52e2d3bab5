"""Runs that act on their evaluations: the best version is kept, and training ends early, even after losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.checkpoint.retention import best_version, delete_superfluous
from morph.cli.main import app
from morph.contract.errors import JobError
from morph.contract.evaluation import Array, EvaluationTotals
from morph.contract.rules import CheckpointRules, Rules
from morph.cutting import cut, export_job
from morph.runtime.state.model_state import export_state
from morph.runtime.workloads.evaluation import Evaluator
from tests.crew import ManagedCrew
from tests.system.harness import load_tiny_job
from tests.training.shapes import spec_of
from tests.training.training_jobs import (
    BATCH_SIZE,
    MICRO_BATCH_SIZE,
    NUM_SECTIONS,
    Net,
    Points,
    f1_score,
    judged,
    loss_with_answers,
    plain,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
JOB = spec_of("judged")
NUM_STEPS = 60
NOTHING_KEPT = CheckpointRules(keep_newest=1)
RULES = Rules(checkpoints=NOTHING_KEPT)


@pytest.fixture(scope="module")
def crew() -> Iterator[ManagedCrew]:
    torch.set_num_threads(1)
    crew = ManagedCrew(load_tiny_job(NUM_SECTIONS, MICRO_BATCH_SIZE, JOB), JOB)
    yield crew
    crew.close()


def evaluated(net: Net) -> dict[str, float]:
    """Return the metrics of a model in evaluation mode for all samples at once."""
    data = [Points(1000, 11)[index] for index in range(11)]
    batch = {key: torch.stack([sample[key] for sample in data]) for key in ("x", "y")}
    with torch.no_grad():
        loss, told = loss_with_answers(net.eval(), batch)
    samples = {name: told[name].values.numpy() for name in ("said", "wanted")}  # type: ignore[union-attr]
    return f1_score({"loss": float(loss), "hits": float(told["hits"].total), **samples})  # type: ignore[union-attr]


def test_the_best_version_is_kept_and_training_ends_early_whatever_is_lost(crew: ManagedCrew, tmp_path: Path) -> None:
    finish, report, url = crew.train(tmp_path / "one", {1: "1x1"}, NUM_STEPS, rules=RULES)
    assert finish.outcome == "finished"
    assert "root did not improve in" in finish.sentence
    assert report.version < NUM_STEPS
    roots = {one.version: one.metrics["root"] for one in report.evaluations}
    assert all(one.metrics.keys() == {"agree", "hits", "f1", "root", "drawn"} for one in report.evaluations)
    best = min(roots, key=roots.__getitem__)
    assert report.version - best in (8, 10), "three evaluations were worse, and the metrics come a step later"

    net, version = Net(), best_version(url)
    assert version == best
    net.load_state_dict(export_state(judged, url, read_manifest(url, version)))
    found = evaluated(net)
    assert roots[version] == pytest.approx(found["root"], rel=1e-6)
    told = next(one for one in report.evaluations if one.version == version)
    assert told.metrics["f1"] == pytest.approx(found["f1"])

    exported = tmp_path / "best.safetensors"
    assert CliRunner().invoke(app, ["export", url, str(exported), "--job", JOB, "--best"]).exit_code == 0
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in load_file(exported).items())

    shapes = {1: "1x1", 3: "2x1+1x1", 4: "3x1+1x1"}
    disturbed, again, lost_url = crew.train(tmp_path / "lost", shapes, NUM_STEPS, crew.kill_at(3, 6), RULES)
    assert len({worker for morph in again.morphs for worker in morph.lost_workers}) == 2
    assert [morph.to_shape for morph in again.morphs] == ["2x1 + 1x1", "1x1"]
    assert disturbed.sentence == finish.sentence
    assert again.evaluations == report.evaluations
    last = [read_manifest(where, report.version) for where in (url, lost_url)]
    assert last[0].judged == last[1].judged
    assert {one.unit: one.sha256 for one in last[0].units} == {one.unit: one.sha256 for one in last[1].units}

    delete_superfluous(url, NOTHING_KEPT)
    assert complete_versions(url) == (version, report.version)


def test_metrics_that_are_not_numbers_are_refused_by_name() -> None:
    totals = EvaluationTotals(
        version=2, values={"loss": None}, samples={"a": Array(dtype="float32", shape=(1,), data=b"\0\0\x80?")}
    )
    model = cut(export_job(plain), num_sections=2, micro_batch_size=MICRO_BATCH_SIZE)
    for returned, message in (
        (lambda values: 3.0, "eval_metrics: does not return a dict (got 'float'); allowed: a dict of numbers"),
        (lambda values: {"a": "b"}, "eval_metrics: returns a value for 'a' that is not a number (got 'str'); allowed"),
        (lambda values: values["b"], "eval_metrics: fails: KeyError: 'b'"),
    ):
        job = replace(plain, eval_data=Points, eval_every_epochs=1, eval_metrics=returned)
        with pytest.raises(JobError) as caught:
            Evaluator(job, model, torch.device("cpu")).finish(totals)
        assert message in str(caught.value)
    job = replace(plain, eval_data=Points, eval_every_epochs=1, eval_metrics=lambda values: {"a": values["a"][0]})
    evaluator = Evaluator(job, model, torch.device("cpu"))
    assert evaluator.finish(totals).values == {"a": 1.0}
    steps_in_epoch = len(Points()) // BATCH_SIZE
    due = [version for version in range(3 * steps_in_epoch) if evaluator.size.is_due(version)]
    assert due == [steps_in_epoch, 2 * steps_in_epoch]

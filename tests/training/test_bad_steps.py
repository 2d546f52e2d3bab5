"""Steps with bad numbers are skipped, or given up with earlier ones; the result does not depend on lost workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manager.controller.state.actions import NoteBadStep
from manager.controller.state.events import WorkerAnswered
from manager.engine.loop.driver import Observed
from manager.journal.journal import Journal
from manager.report.events import Told
from manager.report.fold import Fold
from manager.report.values import RunReport
from manager.run_dir import JOURNAL
from manager.trackers.reading import HappeningsReader
from morph.checkpoint.manifest import read_manifest
from morph.contract.checkpoint import Manifest
from morph.contract.happenings import Trouble
from morph.contract.messages import Prepared
from morph.contract.rules import CheckpointRules, LossRules, Rules
from morph.data.order import sample_indices
from tests.crew import ManagedCrew
from tests.system.harness import load_tiny_job
from tests.training.shapes import spec_of
from tests.training.training_jobs import BATCH_SIZE, MICRO_BATCH_SIZE, NUM_SAMPLES, NUM_SECTIONS, broken

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
JOB = spec_of("broken")
NUM_STEPS = 23
SHAPES = {1: "1x1", 2: "2x1", 3: "1x3", 4: "2x2"}


@pytest.fixture(scope="module")
def crew() -> Iterator[ManagedCrew]:
    torch.set_num_threads(1)
    crew = ManagedCrew(load_tiny_job(NUM_SECTIONS, MICRO_BATCH_SIZE, JOB), JOB)
    yield crew
    crew.close()


def samples_of(step: int) -> tuple[int, ...]:
    return tuple(sample_indices(broken.seed, step, BATCH_SIZE, NUM_SAMPLES).tolist())


class Seen:
    """Return the reports of bad steps, and their samples."""

    def __init__(self) -> None:
        self.sentences: dict[int, str] = {}
        self.samples: dict[int, tuple[int, ...]] = {}

    def take(self, observed: Observed) -> None:
        for action in observed.decision.actions:
            if isinstance(action, NoteBadStep):
                self.sentences[action.step] = action.sentence
        event = observed.event
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, Prepared) and event.answer.named is not None:
            self.samples[event.answer.named.step] = event.answer.named.samples


def bytes_of(report: RunReport, url: str) -> Manifest:
    """Return the result of a run, except when and how it was saved."""
    manifest = read_manifest(url, report.version)
    return manifest.model_copy(update={"saved_s": None, "shape": "", "marked": None})


@pytest.mark.parametrize(("when_bad", "window"), [("skip", 3), ("go_back", 2)])
def test_bad_steps_give_the_same_bytes_whatever_is_lost(
    crew: ManagedCrew, tmp_path: Path, when_bad: str, window: int
) -> None:
    losses = LossRules.model_validate({"when_bad": when_bad, "deviations": 5.0, "window": window, "back_steps": 5})
    rules = Rules(losses=losses, checkpoints=CheckpointRules(keep_newest=1))
    alone, lost = Seen(), Seen()
    finish, report, url = crew.train(tmp_path / "alone", {1: "1x1"}, NUM_STEPS, lambda _, one: alone.take(one), rules)
    assert (finish.outcome, report.version) == ("finished", NUM_STEPS), finish.sentence
    not_finite = {step for step, sentence in alone.sentences.items() if "is not finite" in sentence}
    assert not_finite == {step for step in range(NUM_STEPS) if 5 in samples_of(step)}
    leapt, far_off = alone.sentences.keys() - not_finite, {step for step in range(NUM_STEPS) if 28 in samples_of(step)}
    assert leapt == far_off if when_bad == "skip" else leapt & far_off  # going back leaves few losses to compare with
    assert alone.samples.items() <= {step: samples_of(step) for step in alone.sentences}.items()
    assert alone.samples.keys() == {step for step in alone.sentences if step < NUM_STEPS - 1}
    trained = {record.step: record for record in report.steps if not record.redone_later}
    assert all(
        record.loss is not None and math.isfinite(record.loss)
        for step, record in trained.items()
        if step not in not_finite
    )

    reader = HappeningsReader(url)
    with Journal.open(tmp_path / "alone" / JOURNAL, read_only=True) as journal:
        entries = journal.read()
    told = [one for entry in entries for one in reader.take(entry) if isinstance(one, Trouble)]
    assert [one.sentence for one in told] == list(alone.sentences.values())
    events = [one.record for one in Fold().steps(entries) if isinstance(one.record, Told)]
    codes = [one.code for one in events if not one.inner]
    assert [codes.count(code) for code in ("bad_step", "samples")] == [len(alone.sentences), len(alone.samples)]

    kill = crew.kill_at(2, 8, 13)

    def watch(crew: ManagedCrew, observed: Observed) -> None:
        lost.take(observed)
        kill(crew, observed)

    end, again, lost_url = crew.train(tmp_path / "lost", SHAPES, NUM_STEPS, watch, rules)
    assert sum(len(morph.lost_workers) for morph in again.morphs) >= 2
    assert end.sentence == finish.sentence
    assert lost.sentences == alone.sentences
    assert bytes_of(again, lost_url) == bytes_of(report, url)

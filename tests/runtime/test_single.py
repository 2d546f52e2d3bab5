from __future__ import annotations

from pathlib import Path

import pytest

from morph.checkpoint.manifest import read_manifest
from morph.checkpoint.unit_files import read_unit
from morph.contract.errors import InputError, TrainingStopped
from morph.jobs.job import load_job
from morph.runtime.process import single
from morph.runtime.process.single import run_single
from morph.runtime.process.worker import Worker
from morph.runtime.state import accumulators, unit_state
from tests.system.harness import JOB, MICRO_BATCH_SIZE, NUM_SECTIONS, SHARED_STEPS, uninterrupted

pytestmark = pytest.mark.slow


def run(directory: Path, steps: int, num_sections: int | None = NUM_SECTIONS) -> tuple[dict[str, str], list[float]]:
    losses: list[float] = []
    manifest = run_single(
        JOB,
        steps=steps,
        num_sections=num_sections,
        micro_batch_size=MICRO_BATCH_SIZE,
        checkpoint_url=str(directory),
        on_step=lambda step, loss: losses.append(loss),
    )
    return {entry.unit: entry.sha256 for entry in manifest.units}, losses


def test_the_loss_falls_and_the_final_checkpoint_is_complete(tmp_path: Path) -> None:
    _, losses = run(tmp_path, 25)
    assert len(losses) == 25
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    manifest = read_manifest(str(tmp_path), 25)
    for entry in manifest.units:
        assert read_unit(str(tmp_path), manifest, entry.unit)


def test_two_runs_are_the_same_bits(tmp_path: Path) -> None:
    assert run(tmp_path / "one", 3) == run(tmp_path / "other", 3)


def test_each_saved_version_is_the_end_of_a_shorter_run(tmp_path: Path) -> None:
    assert uninterrupted(2, tmp_path / "each") == run(tmp_path / "two", 2)[0]
    assert uninterrupted(SHARED_STEPS, tmp_path / "known") == run(tmp_path / "all", SHARED_STEPS)[0]
    assert not (tmp_path / "known").exists()


def test_without_a_number_of_sections_the_jobs_own_is_used(tmp_path: Path) -> None:
    own = load_job(JOB).num_sections
    assert own is not None
    assert run(tmp_path / "unset", 1, None) == run(tmp_path / "own", 1, own)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Collect (step, attempt) of every step order."""
    seen: list[tuple[int, int]] = []
    step = Worker.step

    def noted(worker: Worker, order: object) -> object:
        seen.append((order.step, order.attempt))  # type: ignore[attr-defined]
        return step(worker, order)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "step", noted)
    return seen


def test_a_step_that_overflows_is_run_again_with_scales_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: list[tuple[int, int]]
) -> None:
    _, plain_losses = run(tmp_path / "plain", 3)
    assert attempts == [(0, 0), (1, 0), (2, 0)]
    attempts.clear()
    monkeypatch.setattr(unit_state, "first_exponent", lambda _count: 62)
    _, losses = run(tmp_path / "overflowing", 3)
    assert attempts == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert losses[0] == plain_losses[0]  # before any gradient was rounded
    assert losses == pytest.approx(plain_losses, rel=1e-5)  # the scales differ, so that the last bits may differ


def test_a_step_that_overflows_again_and_again_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(accumulators, "fits", lambda *_: False)
    with pytest.raises(TrainingStopped, match=f"step 0: .*{single.MAX_ATTEMPTS} times"):
        run(tmp_path, 1)
    assert len(attempts) == single.MAX_ATTEMPTS


def test_a_wrong_job_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        run_single("none.py:job", steps=1, num_sections=2, micro_batch_size=2, checkpoint_url=str(tmp_path))

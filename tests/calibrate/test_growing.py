from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from calibrate import calibrate
from calibrate.computing import compute
from calibrate.computing.subject import load_subject
from calibrate.links.network import NetworkMeasurement
from calibrate.timing.samples import timing
from calibrate.writing import measure
from morph.contract.errors import JobError
from morph.contract.profile import LinkProfile, SendTime

FOLDER = Path(__file__).parents[2] / "configs/jobs"


exported_once = cache(load_subject)


@pytest.fixture
def job(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tiny job with m left open; network, contention and disk are not measured."""
    second = timing([1e-3])
    link = SendTime(size_bytes=1, time=second)
    network = NetworkMeasurement(LinkProfile(activation=(link,), gradient=(link,)), (), second)
    monkeypatch.setattr(measure, "measure_network", lambda *_, **__: network)
    monkeypatch.setattr(compute, "measure_contention", lambda *_, **__: ())
    monkeypatch.setattr(measure, "measure_checkpoint_speed", lambda _: 1e9)
    monkeypatch.setattr(measure, "load_subject", exported_once)
    path = tmp_path_factory.getbasetemp() / "open_job.py"
    path.write_text(
        "from dataclasses import replace\nfrom morph.jobs.job import load_job\n"
        f"job = replace(load_job({str(FOLDER / 'tiny_gpt.py:job')!r}), micro_batch_size=None)\n",
        encoding="utf-8",
    )
    return f"{path}:job"


@pytest.mark.slow
def test_sizes_grow_until_nothing_is_gained(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "still_improves", lambda costs: len(costs) < 3)
    profile = calibrate(job, num_samples=5)
    assert profile.micro_batch_sizes == (1, 2, 4)
    assert profile.job.micro_batch_size is None
    peaks = profile.sections[1].peak_bytes
    assert peaks.keys() == {1, 2, 4}
    assert peaks[1] < peaks[2] < peaks[4]
    assert peaks[4] > 4 * profile.sections[1].activation_bytes_per_sample


@pytest.mark.slow
def test_sizes_stop_growing_where_memory_would_end(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "still_improves", lambda costs: True)
    monkeypatch.setattr(compute, "fills_memory", lambda measured, next_size, device: next_size > 2)
    assert calibrate(job, num_samples=5).micro_batch_sizes == (1, 2)


@pytest.mark.slow
def test_sizes_stop_growing_where_memory_does_end(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "still_improves", lambda costs: True)
    fill_memory_from(monkeypatch, 4)
    assert calibrate(job, num_samples=5).micro_batch_sizes == (1, 2)


@pytest.mark.slow
def test_a_size_that_was_asked_for_and_does_not_fit_is_refused(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_memory_from(monkeypatch, 4)
    with pytest.raises(JobError, match=r"micro_batch_size: .* do not fit into the device's memory \(got 4\)"):
        calibrate(job, micro_batch_sizes=(2, 4), num_samples=5)


@pytest.mark.slow
def test_an_error_in_the_model_is_not_taken_for_a_lack_of_memory(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("calibrate.computing.meter.InThisProcess.measure", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        calibrate(job, num_samples=5)


def fill_memory_from(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    from calibrate.computing.meter import InThisProcess

    measured = InThisProcess.measure

    def measure_or_fail(self: InThisProcess, model: object, sampling: object) -> object:
        if model.micro_batch_size >= size:  # type: ignore[attr-defined]
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return measured(self, model, sampling)  # type: ignore[arg-type]

    monkeypatch.setattr(InThisProcess, "measure", measure_or_fail)

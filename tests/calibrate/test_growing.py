from __future__ import annotations

from pathlib import Path

import pytest

from calibrate import calibrate, measure
from calibrate.network import NetworkMeasurement
from calibrate.samples import timing
from morph.contract.profile import LinkProfile, SendTime

FOLDER = Path(__file__).parents[2] / "configs/jobs"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tiny job with m left open; the network is not measured."""
    second = timing([1e-3])
    link = SendTime(size_bytes=1, time=second)
    network = NetworkMeasurement(LinkProfile(activation=(link,), gradient=(link,)), (), second)
    monkeypatch.setattr(measure, "measure_network", lambda *_, **__: network)
    path = tmp_path / "open_job.py"
    path.write_text(
        "from dataclasses import replace\nfrom morph.job import load_job\n"
        f"job = replace(load_job({str(FOLDER / 'tiny_gpt.py:job')!r}), micro_batch_size=None)\n",
        encoding="utf-8",
    )
    return f"{path}:job"


def test_sizes_grow_until_nothing_is_gained(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "still_improves", lambda costs: len(costs) < 3)
    profile = calibrate(job, num_samples=5)
    assert profile.micro_batch_sizes == (1, 2, 4)
    assert profile.job.micro_batch_size is None


def test_sizes_stop_growing_where_memory_ends(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "still_improves", lambda costs: True)
    monkeypatch.setattr(measure, "_fills_memory", lambda measured, next_size: next_size > 2)
    assert calibrate(job, num_samples=5).micro_batch_sizes == (1, 2)

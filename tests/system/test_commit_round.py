from __future__ import annotations

import psutil
import pytest

from manager.engine.on_processes.commit_round import measure_commit_round


@pytest.mark.system
def test_a_commit_round_is_measured_over_the_workers_link() -> None:
    before = set(psutil.Process().children())
    samples_s = measure_commit_round(5)
    assert len(samples_s) == 5
    assert all(0 < sample < 5 for sample in samples_s)
    assert set(psutil.Process().children()) == before

"""Two workers share one CUDA device: pipelines, replicas and morphs between them end with the bits of one worker.

Tensors between stages go through host memory, or from device to device.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from morph.contract.cluster import LinkSetting
from tests.crew import Crew
from tests.system.harness import JOB, load_tiny_job

NAMES = ("w0", "w1")
NUM_STEPS = 3


@pytest.mark.parametrize("links", ["staged", "ipc"])
def test_two_workers_on_one_device_give_equal_bits_in_every_shape(tmp_path: Path, links: LinkSetting) -> None:
    job = load_tiny_job()
    crew = Crew(job, NAMES)
    found = {}
    try:
        crew.set_up(JOB, job.fingerprint, tmp_path, device="cuda", links=links)
        for shapes in (("1x1",), ("2x1",), ("1x2",), ("2x1", "1x2")):
            crew.begin()
            for number, shape in enumerate(shapes):
                depth, replicas = map(int, shape.split("x"))
                crew.reshape(shape, NAMES[: depth * replicas])
                for name in crew.present:
                    assert len(crew.members[name].control("ends")) == (2 if depth == 2 and links == "ipc" else 0)
                crew.train(NUM_STEPS if shape == shapes[-1] else number + 1)
            found[shapes] = crew.digests()
    finally:
        crew.close()
    assert len({tuple(sorted(digests.items())) for digests in found.values()}) == 1

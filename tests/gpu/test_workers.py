"""Two workers share one CUDA device: a pipeline, replicas and a morph between them end with the bits of one worker."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.worker_crew import Crew
from tests.system.harness import JOB, load_tiny_job

NAMES = ("w0", "w1")
NUM_STEPS = 3


def test_every_shape_of_two_workers_on_one_device_ends_with_the_same_bits(tmp_path: Path) -> None:
    job = load_tiny_job()
    crew = Crew(job, NAMES)
    found = {}
    try:
        crew.set_up(JOB, job.fingerprint, tmp_path, device="cuda")
        for shapes in (("1x1",), ("2x1",), ("1x2",), ("2x1", "1x2")):
            crew.begin()
            for number, shape in enumerate(shapes):
                depth, replicas = map(int, shape.split("x"))
                crew.reshape(shape, NAMES[: depth * replicas])
                crew.train(NUM_STEPS if shape == shapes[-1] else number + 1)
            found[shapes] = crew.digests()
    finally:
        crew.close()
    assert len({tuple(sorted(digests.items())) for digests in found.values()}) == 1

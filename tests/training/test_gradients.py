"""Parameters that are complex, or get a gradient in some steps alone: as in a plain loop, in every shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from morph.checkpoint.unit_files import read_unit
from morph.job import load_job
from morph.runtime.process.single import run_single
from morph.runtime.state.model_state import export_state
from tests.training.shapes_crew import spec_of
from tests.training.test_written_buffers import Loop
from tests.training.training_jobs import MICRO_BATCH_SIZE, NUM_SECTIONS

pytestmark = pytest.mark.slow

NUM_STEPS = 8
JOBS = ("complex_numbers", "complex_fast", "choosing", "choosing_adam", "choosing_fast")


@pytest.mark.parametrize("name", JOBS)
def test_a_job_ends_where_a_plain_loop_brings_it(name: str, tmp_path: Path) -> None:
    job = load_job(spec_of(name))
    loop = Loop(job, MICRO_BATCH_SIZE)
    first = {key: value.clone() for key, value in loop.model.state_dict().items()}
    expected = [loop.step(step) for step in range(NUM_STEPS)]
    losses: list[float] = []
    manifest = run_single(
        spec_of(name),
        steps=NUM_STEPS,
        num_sections=NUM_SECTIONS,
        micro_batch_size=MICRO_BATCH_SIZE,
        checkpoint_url=str(tmp_path),
        on_step=lambda _step, loss: losses.append(loss),
    )
    assert losses == pytest.approx(expected, abs=1e-6)
    state = export_state(job, str(tmp_path), manifest)
    for key, value in loop.model.state_dict().items():
        torch.testing.assert_close(state[key], value, atol=1e-6, rtol=1e-6)
        assert torch.equal(value, first[key]) == key.startswith("unused")
    kept = {
        key: value for entry in manifest.units for key, value in read_unit(str(tmp_path), manifest, entry.unit).items()
    }
    for key, parameter in loop.model.named_parameters():
        steps = loop.optimizer.state[parameter].get("step")
        assert kept.get(f"optim/{key}/step") == steps

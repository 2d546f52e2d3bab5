"""Parameters that are complex, or get a gradient only in some steps, end as in a plain loop, in every shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from morph.checkpoint.unit_files import read_unit
from morph.contract.checkpoint import Manifest
from morph.contract.errors import MorphError
from morph.jobs.job import load_job
from morph.runtime.process.single import run_single
from morph.runtime.state.model_state import export_state
from tests.training.shapes import spec_of
from tests.training.test_written_buffers import Loop
from tests.training.training_jobs import MICRO_BATCH_SIZE, NUM_SECTIONS

pytestmark = pytest.mark.slow

NUM_STEPS = 8
JOBS = ("complex_numbers", "complex_fast", "choosing_adam", "choosing_fast", "cut_off")


def trained(name: str, directory: Path) -> tuple[Manifest, list[float]]:
    losses: list[float] = []
    manifest = run_single(
        spec_of(name),
        steps=NUM_STEPS,
        num_sections=NUM_SECTIONS,
        micro_batch_size=MICRO_BATCH_SIZE,
        checkpoint_url=str(directory),
        on_step=lambda _step, loss: losses.append(loss),
    )
    return manifest, losses


@pytest.mark.parametrize("name", JOBS)
def test_a_job_ends_where_a_plain_loop_brings_it(name: str, tmp_path: Path) -> None:
    job = load_job(spec_of(name))
    loop = Loop(job, MICRO_BATCH_SIZE)
    first = {key: value.clone() for key, value in loop.model.state_dict().items()}
    expected = [loop.step(step) for step in range(NUM_STEPS)]
    manifest, losses = trained(name, tmp_path)
    assert losses == pytest.approx(expected, abs=1e-6)
    state = export_state(job, str(tmp_path), manifest)
    for key, value in loop.model.state_dict().items():
        torch.testing.assert_close(state[key], value, atol=1e-6, rtol=1e-6)
        is_trained = not key.startswith("second" if name == "cut_off" else "unused") and key != "shift"
        assert torch.equal(value, first[key]) != is_trained
    kept = {
        key: value for entry in manifest.units for key, value in read_unit(str(tmp_path), manifest, entry.unit).items()
    }
    for key, parameter in loop.model.named_parameters():
        steps = loop.optimizer.state[parameter].get("step")
        assert kept.get(f"optim/{key}/step") == steps


@pytest.mark.parametrize(
    ("name", "is_frozen"),
    [
        ("frozen_later", lambda step: step >= 3),
        ("frozen_later_adam", lambda step: step >= 3),
        ("thawed_plain_sgd", lambda step: step < 3),
        ("thawed", lambda step: step < 3),
    ],
)
def test_a_schedule_freezes_as_requires_grad_does_in_a_plain_loop(
    name: str, is_frozen: Callable[[int], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See docs/guides/training.md."""
    monkeypatch.setattr(nn.Dropout, "forward", lambda _self, x: x)
    monkeypatch.setenv("MORPH_CACHE_DIR", str(tmp_path / "cache"))  # a cached cut has dropout
    job = load_job(spec_of(name))
    loop = Loop(job, MICRO_BATCH_SIZE)
    for group in loop.optimizer.param_groups:
        group["lr"] = loop.optimizer.defaults["lr"]
    for step in range(NUM_STEPS):
        for parameter in (*loop.model.first.parameters(), *loop.model.second.parameters()):
            parameter.requires_grad_(not is_frozen(step))
        loop.step(step)
    manifest, _ = trained(name, tmp_path)
    for key, value in export_state(job, str(tmp_path), manifest).items():
        torch.testing.assert_close(loop.model.state_dict()[key], value, atol=1e-6, rtol=1e-6)


def test_a_parameter_frozen_in_training_ends_the_run_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(MorphError, match=r"requires_grad of \S+ changes while training; allowed: .*learning rate"):
        trained("frozen_wrongly", tmp_path)

"""Buffers that the forward writes are part of the state: as in a plain loop, in every shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from morph.checkpoint.plain_file import PlainFile, write_plain_file
from morph.cutting import cut, export_job
from morph.cutting.deferred_init.construct import training_mode
from morph.data import MicroBatchLoader
from morph.jobs.job import Job, load_job
from morph.runtime.attendants.checkpoint_writer import write_initial_checkpoint
from morph.runtime.process.single import run_single
from morph.runtime.state.model_state import ImportedParameters, export_state, model_state
from morph.runtime.workloads.evaluation import evaluation_sections
from tests.training.shapes import ShapesCrew, make_plan, spec_of
from tests.training.training_jobs import MICRO_BATCH_SIZE, Averaged, Normed

pytestmark = pytest.mark.slow

NUM_STEPS = 5


def plain_model(job: Job) -> nn.Module:
    """Return the user's model with the initial weights of a run."""
    model, state = training_mode(job.model()), model_state(job)
    model.load_state_dict({name: state.values[kept] for name, kept in state.kept.items()})
    return model


class Loop:
    """A plain loop: gradients and changes of buffers are averaged over the micro-batches of a step."""

    def __init__(self, job: Job, micro_batch_size: int) -> None:
        self.job, self.size = job, micro_batch_size
        self.model = plain_model(job)
        self.optimizer = job.optimizer(list(self.model.named_parameters()))
        self.keys = sorted(job.dataset()[0])
        self.loader = MicroBatchLoader(job.dataset(), job.seed, job.batch_size, micro_batch_size)

    def step(self, number: int) -> float:
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        wide = {name: torch.complex128 if buffer.is_complex() else torch.float64 for name, buffer in before.items()}
        changes = {name: torch.zeros(buffer.shape, dtype=wide[name]) for name, buffer in before.items()}
        count = self.job.batch_size // self.size
        losses = []
        self.optimizer.zero_grad()
        for index in range(count):
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(before[name])
            loss = self.job.loss(self.model, self.loader.load(number, index, self.keys))
            (loss / count).backward()
            losses.append(float(loss.detach()))
            for name, buffer in self.model.named_buffers():
                changes[name] += (buffer.to(wide[name]) - before[name].to(wide[name])) / count
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_((before[name].to(wide[name]) + changes[name]).to(buffer.dtype))
        if self.job.clip_grad_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip_grad_norm)
        self.optimizer.step()
        return sum(losses) / count


@pytest.fixture
def without_dropout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nn.Dropout, "forward", lambda _self, x: x)
    monkeypatch.setenv("MORPH_CACHE_DIR", str(tmp_path / "cache"))  # a cached cut has dropout


@pytest.mark.parametrize("name", ["normed", "averaged", "normed_fast"])
@pytest.mark.usefixtures("without_dropout")
def test_buffers_end_where_a_plain_loop_brings_them(name: str, tmp_path: Path) -> None:
    job = load_job(spec_of(name))
    loop = Loop(job, MICRO_BATCH_SIZE)
    expected = [loop.step(step) for step in range(NUM_STEPS)]
    losses: list[float] = []
    manifest = run_single(
        spec_of(name),
        steps=len(expected),
        num_sections=4,
        micro_batch_size=MICRO_BATCH_SIZE,
        checkpoint_url=str(tmp_path),
        on_step=lambda _step, loss: losses.append(loss),
    )
    assert losses == pytest.approx(expected, abs=1e-6)
    state = export_state(job, str(tmp_path), manifest)
    buffers = {key for key, _ in loop.model.named_buffers()} & state.keys()
    changed = {key for key in buffers if not torch.equal(state[key], dict(job.model().named_buffers())[key])}
    assert changed == buffers - {"shift"} - {key for key in buffers if key.startswith("frozen")}
    for key in buffers:
        torch.testing.assert_close(state[key], loop.model.get_buffer(key), atol=1e-6, rtol=1e-6)


def test_with_one_micro_batch_running_statistics_are_the_plain_models(tmp_path: Path) -> None:
    """The counter grows by one per step, and the last bits of the averages agree."""
    job = load_job(spec_of("normed"))
    manifest = run_single(
        spec_of("normed"), steps=1, num_sections=4, micro_batch_size=job.batch_size, checkpoint_url=str(tmp_path)
    )
    state = export_state(job, str(tmp_path), manifest)
    model = plain_model(job)
    batch = MicroBatchLoader(job.dataset(), job.seed, job.batch_size, job.batch_size).load(0, 0, ["x"])
    model(batch["x"])
    assert torch.equal(state["norm.running_mean"], model.norm.running_mean)
    assert torch.equal(state["norm.running_var"], model.norm.running_var)
    assert [int(state[f"{norm}.num_batches_tracked"]) for norm in ("norm", "again", "frozen")] == [1, 2, 0]


@pytest.mark.parametrize("name", ["normed", "averaged"])
def test_sections_evaluate_as_the_model_in_evaluation_mode_does(name: str) -> None:
    job = load_job(spec_of(name))
    exported = export_job(job)
    model, generator = plain_model(job), torch.Generator().manual_seed(1)
    cut_model = cut(exported, num_sections=4, micro_batch_size=MICRO_BATCH_SIZE)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    state = {key: state[key] for key in cut_model.specs}
    with torch.no_grad():
        for value in state.values():
            value.copy_(value + torch.rand(value.shape, generator=generator))
    model.eval()
    assert job.eval_data is not None
    samples = [job.eval_data()[index] for index in range(MICRO_BATCH_SIZE)]
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in ("x", "y")}
    before = {key: value.detach().clone() for key, value in state.items()}
    values: tuple[Tensor, ...] = ()
    for section in evaluation_sections(cut_model):
        values = section(values, batch, state)
        assert len(values) == len(section.outputs)
    assert torch.equal(values[0], job.loss(model, batch))
    assert all(torch.equal(value, before[key]) for key, value in state.items())


@pytest.mark.system
@pytest.mark.timeout(600)
def test_what_is_exported_loads_into_the_plain_model_and_evaluates_alike(crew: ShapesCrew, tmp_path: Path) -> None:
    for name, make in (("normed", Normed), ("averaged", Averaged)):
        trained = crew.train(name, [("2x2", 3)], tmp_path / name)
        job = load_job(spec_of(name))
        write_plain_file(tmp_path / "w.safetensors", export_state(job, str(tmp_path / name), trained.manifest))
        model = make()
        model.load_state_dict(safetensors.torch.load_file(str(tmp_path / "w.safetensors")), strict=True)
        model.eval()
        assert job.eval_data is not None
        samples = [job.eval_data()[index] for index in range(8)]
        whole = {key: torch.stack([sample[key] for sample in samples]) for key in ("x", "y")}
        (evaluation,) = trained.evaluations
        assert evaluation.loss == pytest.approx(float(job.loss(model, whole).detach()), abs=1e-6)


@pytest.mark.system
@pytest.mark.timeout(600)
def test_recomputing_or_not_changes_buffers_once(crew: ShapesCrew, tmp_path: Path) -> None:
    digests = [
        crew.train("normed", [(make_plan("4x1", "", recompute=recompute), 3)], tmp_path / str(recompute)).digests
        for recompute in (True, False)
    ]
    assert digests[0] == digests[1]


def test_a_run_begins_with_the_statistics_of_its_file(tmp_path: Path) -> None:
    job = load_job(spec_of("normed"))
    exported = export_job(job)
    model = cut(exported, num_sections=4, micro_batch_size=MICRO_BATCH_SIZE)
    state = {name: value.clone() for name, value in Normed().state_dict().items()}
    state["norm.running_mean"] = torch.full((4,), 0.5)
    del state["norm.running_var"]
    safetensors.torch.save_file(state, str(tmp_path / "w.safetensors"))
    given = ImportedParameters(job, model, PlainFile(tmp_path / "w.safetensors"), exported.initial_buffers)
    manifest = write_initial_checkpoint(job, model, given, str(tmp_path))
    begun = export_state(job, str(tmp_path), manifest)
    assert torch.equal(begun["norm.running_mean"], state["norm.running_mean"])
    assert torch.equal(begun["norm.running_var"], torch.ones(4))
    state["frozen.running_mean"] = torch.ones(4)
    safetensors.torch.save_file(state, str(tmp_path / "other.safetensors"))
    other = ImportedParameters(job, model, PlainFile(tmp_path / "other.safetensors"), exported.initial_buffers)
    assert other.frozen == ("frozen.running_mean",), "it is not trained, and is kept once for the run"

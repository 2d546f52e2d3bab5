"""The example of a language model on packed text in shards has a plain loop's weights, whatever is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from manager.accounting.spent import Prices
from manager.journal.journal import Journal
from manager.run_dir import JOURNAL
from manager.trackers.reading import HappeningsReader
from manager.trackers.sinks import numbers_of
from morph.checkpoint.manifest import read_manifest
from morph.contract.happenings import StepDone
from morph.cutting import export_job
from morph.data import MicroBatchLoader
from morph.jobs.job import load_job
from tests.crew import ManagedCrew
from tests.system.harness import cut_for_workers, load_tiny_job
from tests.training.shapes import parameters_of

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLE = Path(__file__).resolve().parents[2] / "configs" / "jobs" / "gpt2_shards.py"
NUM_STEPS, BATCH_SIZE, MICRO_BATCH_SIZE, NUM_SECTIONS = 12, 8, 2, 3
NUM_FILES = 8


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the job at a small size, with shards of a few files."""
    monkeypatch.setenv("MORPH_CACHE_DIR", str(tmp_path / "cache"))
    load_job(f"{EXAMPLE}:job")
    sys.modules["morph_job_gpt2_shards"].write_shards(tmp_path / "shards", NUM_FILES)
    small = {"num_layers": 2, "width": 32, "dropout": 0.0, "data_workers": 0}
    small |= {"batch_size": BATCH_SIZE, "micro_batch_size": MICRO_BATCH_SIZE, "num_sections": NUM_SECTIONS}
    arguments = "".join(f", {name}={value}" for name, value in small.items())
    return f"{EXAMPLE}:job(shards='{tmp_path}/shards'{arguments})"


def test_samples_are_filled_with_whole_lines(path: str, tmp_path: Path) -> None:
    data = load_job(path).dataset()
    assert (tmp_path / "shards/index.json").is_file()
    for index in range(0, len(data), len(data) // 20):
        sample = data[index]
        begins, counted = sample["position_ids"] == 0, sample["labels"] != -100
        assert all(entry.shape == (64,) for entry in sample.values())
        assert torch.equal(sample["labels"][counted], sample["input_ids"][counted])
        assert not counted[begins].any()
        assert counted.sum() >= 64 - begins.sum() - sample["input_ids"].eq(0).sum()


def test_a_run_with_losses_has_a_plain_loops_curve_in_trackers(path: str, tmp_path: Path) -> None:
    cut = cut_for_workers(path, NUM_SECTIONS, MICRO_BATCH_SIZE)
    crew = ManagedCrew(load_tiny_job(NUM_SECTIONS, MICRO_BATCH_SIZE, path, cut), path, cut)
    try:
        _, alone, alone_url = crew.train(tmp_path / "alone", {1: "1x1"}, NUM_STEPS)
        shapes = {1: "1x1", 2: "2x1", 3: "1x3"}
        _, lost, lost_url = crew.train(tmp_path / "lost", shapes, NUM_STEPS, crew.kill_at(3, 8))
    finally:
        crew.close()
    manifests = [read_manifest(url, NUM_STEPS) for url in (alone_url, lost_url)]
    assert {one.unit: one.sha256 for one in manifests[0].units} == {one.unit: one.sha256 for one in manifests[1].units}
    assert len({worker for morph in lost.morphs for worker in morph.lost_workers}) == 2
    expected, weights = plain_loop(path)
    assert list(alone.losses.values()) == pytest.approx(expected, rel=1e-6)
    for name, value in parameters_of(manifests[0], Path(alone_url)).items():
        own, other = (without_keys_bias(name, tensor.detach()) for tensor in (value, weights[name]))
        assert (own - other).norm() <= 1e-5 * other.norm(), name

    reader = HappeningsReader(lost_url, Prices(paid_usd_per_h=0.0, for_all=True))
    with Journal.open(tmp_path / "lost" / JOURNAL, read_only=True) as journal:
        told = [happening for _, found in reader.new(journal) for happening in found]
    numbers = {one.step: numbers_of(one) for one in told if isinstance(one, StepDone)}
    assert {step: values["train/loss"] for step, values in numbers.items()} == {
        step + 1: loss for step, loss in alone.losses.items()
    }
    assert all(values["speed/tokens_per_s"] > 0 for values in numbers.values())


def without_keys_bias(name: str, value: torch.Tensor) -> torch.Tensor:
    """Leave out a bias without effect: its gradient is 0 except for rounding, which Adam divides by its own size."""
    return torch.cat(value.chunk(3)[::2]) if name.endswith("attn.c_attn.bias") else value


def plain_loop(path: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of plain PyTorch over whole mini-batches, whose documents are separated again."""
    job = load_job(path)
    model = job.model()
    model.load_state_dict(dict(export_job(job).initial_parameters), strict=False)
    optimizer = job.optimizer(model.named_parameters())
    loader = MicroBatchLoader(job.dataset(), job.seed, job.batch_size, job.batch_size)
    losses = []
    for step in range(NUM_STEPS):
        batch = loader.load(step, 0, ("input_ids", "labels", "position_ids"))
        totals = []
        for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
            begins = (positions == 0).nonzero().flatten().tolist()
            for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
                logits = model(input_ids=ids[None, begin:end]).logits[0]
                totals.append(functional.cross_entropy(logits[:-1], labels[begin + 1 : end], reduction="sum"))
        count = (batch["labels"][:, 1:] != -100).sum()
        loss = torch.stack(totals).sum() / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())

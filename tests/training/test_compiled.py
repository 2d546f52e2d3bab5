"""Sections with torch.compile: compiled once for each kind, with the same bits wherever stages begin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from morph.contract.errors import JobError
from morph.cutting import cut, export_job
from morph.cutting.sections.cut_point import CutPoint
from morph.data import MicroBatchLoader
from morph.jobs.job import Accumulation, Job
from morph.runtime.step.compilation import compile_all, compiled, refuse_marked
from morph.runtime.step.kernels import kernels_for, kernels_now, set_kernels
from tests.training.shapes import gradients_of_stages
from tests.training.training_jobs import MICRO_BATCH_SIZE, WIDTH, plain

CPU = torch.device("cpu")
NUM_BLOCKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(functional.gelu(self.inner(x))))


job: Job = replace(
    plain,
    model=lambda: nn.Sequential(*(Block() for _ in range(NUM_BLOCKS))),
    num_sections=NUM_BLOCKS,
    precision="bf16",
    compile=True,
)


@pytest.fixture
def inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set an empty cache folder, no compiled code, and draws as without compilation."""
    from torch._dynamo.utils import counters
    from torch._inductor import config
    from torch._inductor.utils import clear_caches

    monkeypatch.setenv("MORPH_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    counters.clear()
    clear_caches()
    before = config.compile_threads
    with config.patch({"fallback_random": True}):
        yield tmp_path
    config.compile_threads = before
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch itself triggers it on import
def test_each_kind_of_section_is_compiled_once_with_the_same_bits(inductor: Path) -> None:
    from torch._dynamo.utils import counters

    model = cut(export_job(job), num_sections=NUM_BLOCKS, micro_batch_size=MICRO_BATCH_SIZE)
    fast = compiled(model)
    loader = MicroBatchLoader(job.dataset(), job.seed, job.batch_size, MICRO_BATCH_SIZE)
    compile_all(fast, lambda keys: loader.load(0, 0, keys), job.precision, CPU)
    kinds = NUM_BLOCKS - 1  # one of the two in the middle
    assert counters["stats"]["unique_graphs"] == kinds
    loss, gradients = gradients_of_stages(job, fast, [0], recompute=False)
    again_loss, again = gradients_of_stages(job, fast, [0, 1, 3], recompute=True)
    assert counters["stats"]["unique_graphs"] == kinds, "a step compiled something"
    assert torch.equal(loss, again_loss)
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)
    plain_loss, expected = gradients_of_stages(job, model, [0], recompute=False)
    torch.testing.assert_close((loss, gradients), (plain_loss, expected), rtol=0.03, atol=0.003)
    assert any((inductor / "compiled").rglob("*.so"))


@pytest.mark.parametrize("accumulation", ["exact", "fast"])
def test_with_exact_sums_inductor_chooses_nothing_by_timing(
    inductor: Path, accumulation: Accumulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other workers may find other kernels the fastest, which have other bits."""
    from torch._inductor import config

    before = kernels_now()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    model = cut(export_job(job), num_sections=NUM_BLOCKS, micro_batch_size=MICRO_BATCH_SIZE)
    try:
        set_kernels(kernels_for(accumulation, replace(before, determinism=0)))
        with config.patch({"deterministic": False}):
            compiled(model)
            assert config.deterministic == (accumulation == "exact")
    finally:
        set_kernels(before)


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.cut = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(self.first(x))
        if float(x.sum()) > 1e9:  # a choice that torch.export refuses
            x = x + 1
        out: Tensor = self.last(x)
        return out


def test_a_model_that_is_cut_at_marks_is_refused() -> None:
    marked = replace(plain, model=Noted, num_sections=2, compile=True)
    model = cut(export_job(marked), num_sections=2, micro_batch_size=MICRO_BATCH_SIZE)
    with pytest.raises(JobError, match=r"compile: is not possible.*allowed: False for a model that is cut at marks"):
        refuse_marked(model)

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from morph.checkpoint.manifest import read_manifest
from morph.contract.errors import JobError, TrainingStopped
from morph.runtime.process.single import run_single
from morph.runtime.step.kernels import (
    CUBLAS_VARIABLE,
    Kernels,
    kernels_for,
    kernels_now,
    prepare_cublas,
    raise_if_refused,
    set_kernels,
)
from tests.waiting import BOUND_S

USUAL = Kernels(determinism=0, cudnn_benchmark=True, cudnn_attention=True)
STEADY = Kernels(determinism=2, cudnn_benchmark=False, cudnn_attention=False)

JOB = """
import json, os, sys
import torch
from torch import nn
from morph import Job
from morph.runtime.step.kernels import CUBLAS_VARIABLE, kernels_now


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        told = [vars(kernels_now()), os.environ.get(CUBLAS_VARIABLE), torch.cuda.is_initialized()]
        print("seen " + json.dumps(told), file=sys.stderr)
        return {"x": torch.full((4,), float(index))}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        PLACE
        return self.last(hidden)


job = Job(
    name="kernels",
    model=Net,
    loss=lambda model, batch: model(batch["x"]).square().mean(),
    dataset=Points,
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    batch_size=4,
    micro_batch_size=2,
    accumulation="KIND",
)
"""


def write_job(folder: Path, kind: str, place: str = "pass") -> str:
    path = folder / f"job_{kind}.py"
    path.write_text(JOB.replace("KIND", kind).replace("PLACE", place))
    return f"{path}:job"


@pytest.fixture
def as_before() -> Iterator[None]:
    before = kernels_now()
    yield
    set_kernels(before)


def test_exact_sums_take_deterministic_kernels_and_never_those_of_cudnn_attention() -> None:
    assert kernels_for("exact", USUAL) == STEADY
    assert kernels_for("fast", USUAL) == USUAL


@pytest.mark.usefixtures("as_before")
def test_torch_is_set_to_what_is_wanted_and_back() -> None:
    for wanted in (STEADY, USUAL):
        set_kernels(wanted)
        assert kernels_now() == wanted
    assert not torch.utils.deterministic.fill_uninitialized_memory


def seen_in(errors: str) -> Any:
    """Return the settings that the model saw last: torch's, cuBLAS's workspace, and whether CUDA had started."""
    return [json.loads(line.removeprefix("seen ")) for line in errors.splitlines() if line.startswith("seen ")][-1]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, subprocess.CompletedProcess[str]]:
    """Return a job that a separate process has trained for two steps, its folder, and its output."""
    folder = tmp_path_factory.mktemp("process")
    job, out = write_job(folder, "exact"), folder / "out"
    given = [job, "--steps", "2", "--sections", "2", "--micro-batch", "2", "--checkpoints", str(out)]
    command = [sys.executable, "-m", "morph.runtime.process.single", *given]
    variables = {name: value for name, value in os.environ.items() if name != CUBLAS_VARIABLE}
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * BOUND_S, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    return job, out, done


@pytest.mark.slow
def test_a_worker_uses_these_kernels_and_cublas_has_its_workspace_first(process: Any) -> None:
    kernels, *cublas = seen_in(process[2].stderr)
    assert Kernels(**kernels) == STEADY
    assert cublas == [":4096:8", False]


@pytest.mark.slow
@pytest.mark.usefixtures("as_before")
def test_another_process_reports_each_step_and_ends_with_equal_bits(process: Any, tmp_path: Path) -> None:
    job, out, done = process
    assert [line[:9] for line in done.stdout.splitlines()] == ['{"step": ', '{"step": ']
    here = run_single(job, steps=2, num_sections=2, micro_batch_size=2, checkpoint_url=str(tmp_path))
    assert [e.sha256 for e in read_manifest(str(out), 2).units] == [e.sha256 for e in here.units]


@pytest.mark.slow
@pytest.mark.usefixtures("as_before")
def test_a_worker_with_fast_sums_computes_with_the_usual_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(CUBLAS_VARIABLE, raising=False)
    set_kernels(USUAL)
    job, out = write_job(tmp_path, "fast"), str(tmp_path / "out")
    run_single(job, steps=1, num_sections=None, micro_batch_size=2, checkpoint_url=out)
    kernels, *cublas = seen_in(capsys.readouterr().err)
    assert Kernels(**kernels) == USUAL
    assert cublas == [":4096:8", False]


def test_a_workspace_with_which_products_may_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_VARIABLE, ":0:0")
    with pytest.raises(JobError, match=f"{CUBLAS_VARIABLE}: .*got ':0:0'.; allowed: :4096:8 or :16:8"):
        prepare_cublas()
    monkeypatch.setenv(CUBLAS_VARIABLE, ":16:8")
    prepare_cublas()
    assert os.environ[CUBLAS_VARIABLE] == ":16:8"


@pytest.mark.slow
@pytest.mark.usefixtures("as_before")
def test_an_operation_without_a_deterministic_kernel_is_refused_by_its_line(tmp_path: Path) -> None:
    place = "hidden = torch.put(hidden, torch.tensor([0, 1]), hidden[0, :2] * 2)"
    given = {"steps": 1, "num_sections": None, "micro_batch_size": 2, "checkpoint_url": str(tmp_path / "out")}
    with pytest.raises(TrainingStopped) as stopped:
        run_single(write_job(tmp_path, "exact", place), **given)  # type: ignore[arg-type]
    told = str(stopped.value)
    assert "accumulation: put_ has no deterministic kernel on this device, in the section that begins at " in told
    assert told.endswith("job_exact.py:25 (got 'exact'); allowed: 'fast', or another operation in the model")
    set_kernels(USUAL)
    run_single(write_job(tmp_path, "fast", place), **given)  # type: ignore[arg-type]


def test_other_errors_pass() -> None:
    raise_if_refused(RuntimeError("shapes differ"), "here:1")

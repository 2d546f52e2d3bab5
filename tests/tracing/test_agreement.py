from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

from morph.cli.main import app
from morph.contract.errors import ExportError, JobError
from morph.cutting import ExportedJob, cut, export_job
from morph.cutting.cuts.analysis import REFERENCE_SAMPLES, analyse
from morph.cutting.exporting.exported_job import GraphJob
from morph.jobs.job import Job, load_job
from morph.preflight import checks
from morph.preflight.checks import CHECKS, CutJob, Effort, Needs, check
from morph.preflight.comparison_cache import cache_comparison, cached_comparison, comparison_key
from morph.preflight.plain_comparison import QUICK_FLOPS, Comparison, Limits, compare_with_plain, comparison_note
from morph.runtime.state.accumulators import ExactAccumulator, Reduced
from morph.user_cache import cache_folder

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ROOMY = Limits(available_bytes=1 << 30, flops=QUICK_FLOPS, device=CPU)
WORDS = 9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.2)
        nn.init.zeros_(self.inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.inner(x)))


class Texts(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.register_buffer("places", torch.randn(5, 8))
        self.last = nn.Linear(8, WORDS, bias=False)
        self.last.weight = self.embed.weight
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class HookBehindTheGraph(Block):
    """A hook of a kind that no trace sees and that Morph does not look for."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out.grad_fn.register_hook(lambda gradients, _: tuple(None if g is None else -g for g in gradients))
        return out


class Words:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randint(WORDS, (5,), generator=torch.Generator().manual_seed(index))}


class WordsOutside(Words):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((5,), WORDS)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    value = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())
    return value, {"largest": logits.max()}


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


def job_of(model: Callable[[], nn.Module], dataset: Callable[[], Any] = Words) -> Job:
    return Job(name="texts", model=model, loss=loss, dataset=dataset, optimizer=optimizer, batch_size=4, num_sections=3)


@pytest.fixture(scope="module")
def good() -> tuple[Job, ExportedJob]:
    job = job_of(Texts)
    return job, export_job(job)


@pytest.fixture(scope="module")
def wrong() -> tuple[Job, ExportedJob]:
    job = job_of(lambda: Texts(HookBehindTheGraph))
    return job, export_job(job)


def test_sections_have_the_loss_and_gradients_of_the_plain_model(
    good: tuple[Job, ExportedJob],
) -> None:
    found = compare_with_plain(*good, 3, ROOMY)
    assert found == Comparison("whole", num_seeds=3, num_samples=2, num_steps=2, largest=0.0)
    assert comparison_note(found) == (
        "loss, every gradient and the weights after 2 steps are equal to the plain model's (3 x 2 samples)"
    )


def test_a_backward_that_the_trace_lost_is_refused_and_the_parameters_are_named(wrong: tuple[Job, ExportedJob]) -> None:
    with pytest.raises(ExportError) as caught:
        compare_with_plain(*wrong, 3, ROOMY)
    text = str(caught.value)
    assert text.startswith(f"{__file__}:{inspect.getsourcelines(Texts)[1]}: model: sections would not train the model")
    assert "(2 samples, seed 0): the loss differs by 0.00%" in text
    assert ", 4 of 9 gradients: blocks." in text  # of blocks 1 and 3: a gradient that is reversed twice is right again


def test_the_comparison_draws_nothing_from_the_callers_generator(good: tuple[Job, ExportedJob]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    compare_with_plain(*good, 2, ROOMY)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_costly_model_is_compared_fewer_times(good: tuple[Job, ExportedJob]) -> None:
    assert isinstance(good[1], GraphJob)
    one_sample = 6 * analyse(good[1]).total_cost / REFERENCE_SAMPLES
    limits = [replace(ROOMY, flops=number * one_sample, shorten=False) for number in (5, 3, 0.5)]
    found = [compare_with_plain(*good, 1, entry) for entry in limits]
    assert [(entry.how, entry.num_seeds, entry.num_samples) for entry in found] == [
        ("whole", 2, 2),
        ("whole", 1, 1),
        ("none", 0, 0),
    ]
    assert comparison_note(found[2]) == (
        "loss, gradients and weights were not compared with the plain model: one sample takes 0.0 TFLOP"
    )


def test_a_large_model_is_compared_with_fewer_of_its_blocks() -> None:
    job = job_of(lambda: Texts(num_blocks=12))
    exported = export_job(job)
    small = replace(ROOMY, available_bytes=30_000)
    found = compare_with_plain(job, exported, 3, small)
    assert (found.how, found.largest) == ("shortened", 0.0)
    assert "GiB are free" in str(found.reason)
    assert "both with fewer equal blocks" in comparison_note(found)
    assert compare_with_plain(job, exported, 3, replace(small, shorten=False)).how == "none"
    nothing = compare_with_plain(job, exported, 3, replace(small, available_bytes=1_000))
    assert nothing.how == "none"
    assert str(nothing.reason).startswith("with fewer blocks, it may take")


def test_with_fewer_blocks_too_a_lost_backward_is_refused() -> None:
    job = job_of(lambda: Texts(HookBehindTheGraph, num_blocks=12))
    with pytest.raises(ExportError, match=r"2 samples, seed 0.*blocks\.1\.inner\.weight by"):
        compare_with_plain(job, export_job(job), 3, replace(ROOMY, available_bytes=30_000))


def test_a_large_model_without_equal_blocks_is_reported_as_not_compared(
    good: tuple[Job, ExportedJob],
) -> None:
    job = job_of(lambda: Texts(num_blocks=2))
    found = compare_with_plain(job, export_job(job), 1, replace(ROOMY, available_bytes=1_000))
    assert found.how == "none"
    assert str(found.reason).endswith("it cannot be shortened: it has no list of three equal blocks")


def test_the_error_of_a_loss_on_real_samples_names_its_line() -> None:
    job = job_of(Texts, WordsOutside)
    with pytest.raises(JobError) as caught:
        compare_with_plain(job, export_job(job), 1, ROOMY)
    line = inspect.getsourcelines(Texts.forward)[1] + 1
    assert str(caught.value).startswith(f"{__file__}:{line}: loss failed on real samples: IndexError")


def test_cut_at_marks_the_comparison_is_made_too() -> None:
    class Marked(Texts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x) + self.places
            for block in self.blocks:
                x = block(x)
            return self.last(x) if float(x.detach().abs().max()) < 1e9 else x

    job = replace(job_of(Marked), cut_points=("blocks.1", "blocks.2"), num_sections=None)
    assert compare_with_plain(job, export_job(job), None, ROOMY) == Comparison("whole", 3, 2, 2, 0.0)


class Normed(nn.Module):
    """A batch norm that trains or is frozen, and a moving average that is written and read."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.last = nn.Embedding(WORDS, 8), nn.BatchNorm1d(5), nn.Linear(8, WORDS)
        self.register_buffer("average", torch.zeros(8))
        if frozen:
            self.norm.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return self.last(torch.tanh(x - self.average))


@pytest.mark.parametrize("frozen", [False, True])
def test_buffers_written_by_the_forward_are_equal_on_both_sides(frozen: bool) -> None:
    job = job_of(lambda: Normed(frozen))
    assert compare_with_plain(job, export_job(job), 2, ROOMY) == Comparison("whole", 3, 2, 2, 0.0)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.embed(x).to(torch.complex64) @ self.turn).abs())


class Sometimes(Texts):
    """A model whose second block never has a gradient, because its output is not used."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.places
        for number, block in enumerate(self.blocks):
            x = x + 0 * block(x).detach() if number == 1 else block(x)
        return self.last(x)


def adamw(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=0.01, weight_decay=0.3)


def warm_up(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, step / 2))


def loud(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, batch)[0] * 1e6


@pytest.mark.parametrize(
    "fields",
    [
        {"accumulation": "fast", "clip_grad_norm": 0.01, "lr_scheduler": warm_up},
        {"optimizer": adamw, "loss": loud, "clip_grad_norm": 1.0},
        {"optimizer": adamw, "model": lambda: Texts().bfloat16(), "master_weights": True},
        {"optimizer": adamw, "model": lambda: Texts().bfloat16(), "precision": "fp16"},
        {"optimizer": adamw, "model": Complex},
        {"optimizer": adamw, "model": Sometimes, "cut_points": ("blocks.1", "blocks.2"), "num_sections": None},
    ],
    ids=["clipped", "overflowing", "master weights", "narrow", "complex", "without a gradient"],
)
def test_the_weights_after_two_steps_are_those_of_a_plain_loop(fields: dict[str, Any]) -> None:
    job = replace(job_of(Texts), **fields)
    found = compare_with_plain(job, export_job(job), job.num_sections, ROOMY)
    assert (found.how, found.num_steps) == ("whole", 2)
    assert found.largest < 1e-5


class LosesImaginaryParts(ExactAccumulator):
    def add(self, name: str, gradient: Tensor) -> None:
        super().add(name, gradient.real.to(gradient.dtype) if gradient.is_complex() else gradient)


class ForgetsAMicroBatch(ExactAccumulator):
    def mean(self, part: Any, sums: Tensor, first: int, num_micro_batches: int, into: Tensor) -> None:
        super().mean(part, sums, first, num_micro_batches + 1, into)


class GivesZerosForNothing(ExactAccumulator):
    def finished(self, numbers: Sequence[list[float]], step: int) -> Reduced:
        found = super().finished(numbers, step)
        zeros = {name: torch.zeros(like.shape) for name, like in self._like.items()}
        return replace(found, gradients={**zeros, **found.gradients})


@pytest.mark.parametrize(
    ("wrong", "model", "what"),
    [
        (LosesImaginaryParts, Complex, r"the mean of 3 micro-batches, accumulation 'exact'.*1 of 4 gradients: turn by"),
        (ForgetsAMicroBatch, Complex, r"the mean of 3 micro-batches, accumulation 'exact'.*4 of 4 gradients"),
        (GivesZerosForNothing, Sometimes, r"the weights after 2 steps differ, 2 of 9: blocks\.1\.inner\.weight, "),
    ],
)
def test_gradients_that_a_run_would_apply_wrongly_are_refused(
    wrong: type[ExactAccumulator], model: Callable[[], nn.Module], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = {"cut_points": ("blocks.1", "blocks.2"), "num_sections": None} if model is Sometimes else {}
    job = replace(job_of(model), optimizer=adamw, **marks)
    exported = export_job(job)
    monkeypatch.setattr("morph.runtime.state.unit_state.ExactAccumulator", wrong)
    with pytest.raises(ExportError, match=what):
        compare_with_plain(job, exported, job.num_sections, ROOMY)


class OneStepSize(torch.optim.SGD):
    """An optimizer with one step size for all parameters that it has."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


def of_one_length(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return OneStepSize([parameter for _, parameter in parameters], lr=0.1)


def test_an_optimizer_that_differs_by_unit_is_refused_unless_allowed(
    good: tuple[Job, ExportedJob],
) -> None:
    job = replace(good[0], optimizer=of_one_length)
    with pytest.raises(JobError, match=r"each parameter unit has its own optimizer, .*`morph trace-deps` looks for"):
        compare_with_plain(job, good[1], 3, ROOMY)
    allowed = replace(job, allowed_dependencies=("mixing:stack@test_agreement.py:step",))
    assert compare_with_plain(allowed, good[1], 3, ROOMY).num_steps == 2


def test_parts_that_were_not_compared_are_named(good: tuple[Job, ExportedJob]) -> None:
    weights = sum(torch.Size(shape).numel() for shape, _ in good[1].initial_parameters.specs.values())
    little = compare_with_plain(*good, 3, replace(ROOMY, available_bytes=weights * 4 * 15))
    assert (little.how, little.num_steps) == ("whole", 0)
    said = " samples); weights after steps were not compared: they may take 0.0 GiB, and 0.0 GiB are free"
    assert comparison_note(little).startswith("loss and every gradient are equal to the plain model's (")
    assert comparison_note(little).endswith(said)
    mixing = compare_with_plain(*good, 3, replace(ROOMY, steps=False))
    assert mixing.num_steps == 0
    assert "one optimizer for all" in comparison_note(mixing)


def test_findings_are_cached_for_this_user_and_damaged_files_ignored(tmp_path: Path) -> None:
    found = Comparison("whole", 3, 2, 2, 1e-7)
    assert cached_comparison(tmp_path, "key") is None
    cache_comparison(tmp_path, "key", found)
    assert cached_comparison(tmp_path, "key") == found
    (file,) = (tmp_path / "agreements").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text('{"how": "whole", "other": 1}')
    assert cached_comparison(tmp_path, "key") is None
    (tmp_path / "file").touch()
    cache_comparison(tmp_path / "file", "key", found)  # it cannot be written, so nothing is kept


JOB = """
import torch
from torch import nn
from morph import Job
from helper import SIGN

class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        x = self.first(x)
        if SIGN:
            x.grad_fn.register_hook(lambda gradients, _: tuple(None if g is None else -g for g in gradients))
        return self.second(torch.relu(x))

job = Job(
    name="turned", model=Turned, loss=lambda model, batch: model(batch["x"]).square().mean(), batch_size=4,
    dataset=lambda: [{"x": torch.arange(3.0) + i} for i in range(4)], micro_batch_size=2,
    optimizer=lambda parameters: torch.optim.SGD([p for _, p in parameters], lr=0.1), num_sections=2,
)
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MORPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helper.py").write_text("SIGN = False\n")
    path = tmp_path / "turned.py"
    path.write_text(JOB)
    return path


@pytest.fixture(autouse=True)
def forget_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "helper", raising=False)


@pytest.mark.parametrize("command", ["cut", "trace-deps"])
def test_a_command_compares_once_and_says_so(command: str, job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        return CliRunner().invoke(app, [command, f"{job_file}:job"], env={"COLUMNS": "200"})

    first = run()
    assert first.exit_code == 0, first.output
    assert (
        "loss, every gradient and the weights after 2 steps are equal to the plain model's (3 x 2 samples)"
        in first.stdout
    )
    monkeypatch.setattr("morph.preflight.plain_comparison.compare_with_plain", None)
    assert "are equal to the plain model's (3 x 2 samples)" in run().stdout


@pytest.mark.parametrize("command", ["cut", "trace-deps", "calibrate"])
def test_a_command_refuses_a_job_that_would_train_as_something_else(command: str, job_file: Path) -> None:
    (job_file.parent / "helper.py").write_text("SIGN = True\n")
    result = CliRunner().invoke(app, [command, f"{job_file}:job"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "2 of 4 gradients: first." in result.stderr
    assert not (job_file.parent / "profile.json").exists()


def test_another_line_of_code_of_the_jobs_folder_is_compared_anew(job_file: Path) -> None:
    import sys

    def key(**settings: str) -> str:
        sys.modules.pop("helper", None)
        job = load_job(f"{job_file}:job")
        exported = export_job(job)
        return comparison_key(
            job, exported, cut(exported, num_sections=2, micro_batch_size=1).fingerprint, CPU, settings
        )

    before = key()
    assert key() == before != key(accumulation="fast")
    (job_file.parent / "helper.py").write_text("SIGN = False  # now\n")
    assert key() != before


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"MORPH_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/general"}, "/own"),
        ({"XDG_CACHE_HOME": "/general"}, "/general/morph"),
        ({"XDG_CACHE_HOME": "not absolute", "HOME": "/home/me"}, "/home/me/.cache/morph"),
    ],
)
def test_the_cache_is_where_the_user_has_caches(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MORPH_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == Path(folder)


def test_checks_run_cheapest_first_without_skipped_ones(
    good: tuple[Job, ExportedJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = [list(Needs).index(entry.needs) for entry in CHECKS]
    assert costs == sorted(costs)
    carried_out: list[str] = []

    def noted(name: str) -> Callable[[CutJob, Effort, checks.Report], checks.Report]:
        return lambda _checked, _effort, report: carried_out.append(name) or report

    monkeypatch.setattr(checks, "CHECKS", [replace(entry, carry_out=noted(entry.name)) for entry in CHECKS])
    said: list[str] = []
    model = cut(good[1], num_sections=2, micro_batch_size=1)
    effort = Effort(memory_bytes=1, leave_out=frozenset({"dependencies", "loss"}), say=said.append)
    check(CutJob("jobs.py:good", *good, model), effort)
    assert carried_out == ["settings", "masks", "data", "comparison"]
    assert said[-1] == "checking that the cut model trains as the plain one does"


def test_the_documentation_has_every_check_with_what_it_needs() -> None:
    text = (Path(__file__).parents[2] / "docs/guides/your-model.md").read_text(encoding="utf-8")
    section = text.split("## What is checked before a run starts\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    told = [(name, needs, re.sub(r"\[(.+)\]\(.+?\)", r"\1", finds)) for name, needs, finds, *_ in rows]
    assert told == [(entry.name, entry.needs.value, entry.finds) for entry in CHECKS]

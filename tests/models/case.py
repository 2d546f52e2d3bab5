"""One model or job that a user may bring, and its expected outcome: equal to the plain model, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from morph.contract.errors import InputError
from morph.cutting import ExportedJob, cut, export_job
from morph.cutting.exporting.exported_job import GraphJob
from morph.data import MicroBatchLoader
from morph.jobs.job import Job
from morph.preflight.data_check import check_data
from morph.preflight.mean_loss import loss_warnings
from tests.cutting.conftest import Samples, build_whole, run_sections, sgd

Outcome = Literal["exact", "close", "refused"]
SAMPLES = 4
CLOSE = 2e-6
SEED = 7
FLOOR = 1e-1
"""A gradient's error is judged relative to its own maximum or, if larger, to this share of the model's maximum."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table.

    Attributes:
        name: What it is, for a reader of the docs.
        model: As in ``Job``.
        loss: As in ``Job``.
        items: Samples, or a function that makes the data set.
        outcome: ``exact``: loss and every gradient have the plain model's bits. ``close``: they are within 2e-6 of the
            largest gradient, because a traced model uses other kernels in places. ``refused``: with ``says``.
        says: Part of the refusal, which is one sentence.
        warns: Part of the warning of a job that runs.
        instead: The advice of a refusal, for the docs.
        fields: Further fields of the job.
        another: Whether another row, or ``tests/cutting/zoo.py``, has the same design, so that only ``make test-long``
            tests it.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Any
    items: Any
    outcome: Outcome = "exact"
    says: str = ""
    warns: str = ""
    instead: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    another: bool = False

    def job(self) -> Job:
        """Return the job, of at least two sections."""
        dataset = self.items if callable(self.items) else lambda: Samples(self.items)
        values = {"name": "case", "batch_size": 8, "optimizer": sgd, **self.fields}
        return Job(model=self.model, loss=self.loss, dataset=dataset, **values)


def check(case: Case) -> None:
    """Do what ``morph cut`` and a training step do, and compare with the plain model."""
    job = case.job()
    if case.outcome == "refused":
        with pytest.raises(InputError) as refused:
            _as_cut_does(job)
        assert case.says in str(refused.value), refused.value
        assert "\n" not in str(refused.value)
        return
    exported = _as_cut_does(job)
    said = loss_warnings(job)
    assert [case.warns in sentence for sentence in said] == [True] * bool(case.warns), said
    model = cut(exported, num_sections=job.num_sections, micro_batch_size=SAMPLES)
    assert len(model.sections) > 1 or job.num_sections == 1
    # each stage loads what it needs by itself
    batch = {key: _load(job, (key,))[key] for section in model.sections for key in section.batch_keys}
    loss, gradients = run_sections(model, exported.initial_state, batch, _same_draws())
    torch.manual_seed(SEED)
    expected_loss, expected = _plain(job, exported, _load(job, tuple(job.dataset()[0])))
    assert gradients.keys() == expected.keys()
    bound = 0.0 if case.outcome == "exact" else CLOSE
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        own = max(float(gradient.abs().max()), FLOOR * largest)
        off = float((gradients[name] - gradient).abs().max()) / own
        assert off <= bound, f"the gradient of {name} is {off:.1e} of its largest number off"
    off = float((loss - expected_loss).abs() / expected_loss.abs())
    assert off <= bound, f"the loss is {off:.1e} off"


def _as_cut_does(job: Job) -> ExportedJob:
    exported = export_job(job)
    check_data(job)
    return exported


def _same_draws() -> Callable[[int], None]:
    """Let sections draw in turn as the whole model does, and let a recomputed section repeat its draws."""
    states: dict[int, Tensor] = {}
    torch.manual_seed(SEED)

    def before(index: int) -> None:
        torch.set_rng_state(states.setdefault(index, torch.get_rng_state()))

    return before


def _plain(job: Job, exported: ExportedJob, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of the user's own model with the initial weights of training."""
    with torch.random.fork_rng():
        model = build_whole(job, exported.initial_state)
    if isinstance(exported, GraphJob):
        values = dict(model.state_dict(keep_vars=True))
        for placeholder, source in exported.sources.items():
            if source.kind == "constant" and source.name in values:
                values[source.name].data.copy_(exported.initial_constants[placeholder])
    result = job.loss(model, batch)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _load(job: Job, keys: tuple[str, ...]) -> dict[str, Tensor]:
    return MicroBatchLoader(job.dataset(), job.seed, job.batch_size, SAMPLES).load(0, 0, keys)


def parameters(cases: Iterable[Case]) -> Any:
    marks = {False: (), True: pytest.mark.long}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name, marks=marks[case.another]) for case in cases]
    )

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from morph.contract.errors import JobError
from morph.optimizers import Optimizers
from morph.tracing import DependencyReport, Finding, require_no_violation

pytestmark = pytest.mark.slow

UNITS = ("s0", "s1", "s2")
HERE = Path(__file__).name


class Custom(Optimizer):
    """Base class of the optimizers below."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.setup()

    def setup(self) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.update()

    @property
    def all(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


class Lion(Custom):
    def update(self) -> None:
        for parameter in self.all:
            state = self.state[parameter]
            if not state:
                state["average"] = torch.zeros_like(parameter)
            update = state["average"].mul(0.9).add(parameter.grad, alpha=0.1).sign_()
            parameter.mul_(1 - 0.01).sub_(update, alpha=0.1)
            state["average"].lerp_(parameter.grad, 0.01)


class Lamb(Custom):
    """A norm for each tensor, and a ratio that is a tensor."""

    def update(self) -> None:
        for parameter in self.all:
            ratio = parameter.norm() / (parameter.grad.norm() + 1e-6)
            parameter.sub_(parameter.grad * ratio * 0.1)


class LambWithNumbers(Custom):
    """The same, but the ratio is a Python number."""

    def update(self) -> None:
        for parameter in self.all:
            ratio = parameter.norm().item() / (parameter.grad.norm().item() + 1e-6)
            parameter.sub_(parameter.grad, alpha=0.1 * ratio)


class NvLamb(Custom):
    """Divides by the norm of all gradients."""

    def update(self) -> None:
        total = torch.zeros(())
        for parameter in self.all:
            total += parameter.grad.square().sum()  # mixes
        for parameter in self.all:
            parameter.sub_(parameter.grad / total.sqrt())


class NvLambWithNumbers(Custom):
    def update(self) -> None:
        total = sum(parameter.grad.square().sum().item() for parameter in self.all) ** 0.5
        for parameter in self.all:
            parameter.sub_(parameter.grad, alpha=1 / total)


class Clipped(Custom):
    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.all, 1.0)  # mixes
        torch._foreach_add_(self.all, [parameter.grad for parameter in self.all], alpha=-0.1)


class SkipsOverflowWithPython(Custom):
    def update(self) -> None:
        if all(bool(torch.isfinite(parameter.grad).all()) for parameter in self.all):
            for parameter in self.all:
                parameter.sub_(parameter.grad / 1024.0)


class Unscales(Custom):
    """Unscales gradients as ``torch.amp.GradScaler`` does."""

    def update(self) -> None:
        found = torch.zeros(1)
        gradients = [parameter.grad for parameter in self.all]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(1 / 1024.0))
        for parameter in self.all:
            parameter.sub_(parameter.grad * (1 - found))


class LeavesThroughNumpy(Custom):
    def update(self) -> None:
        total = sum(float((parameter.grad.numpy() ** 2).sum()) for parameter in self.all)
        for parameter in self.all:
            parameter.sub_(parameter.grad, alpha=0.1 / total)


class KeepsAverageInAList(Custom):
    def setup(self) -> None:
        self.averages = [parameter.detach().clone() for parameter in self.all]

    def update(self) -> None:
        for parameter, average in zip(self.all, self.averages, strict=True):
            parameter.sub_(parameter.grad, alpha=0.1)
            average.lerp_(parameter, 0.1)  # unsaved


class CountsInOneTensor(Custom):
    def setup(self) -> None:
        self.num_steps = torch.zeros(())

    def update(self) -> None:
        self.num_steps += 1  # common
        for parameter in self.all:
            parameter.sub_(parameter.grad / self.num_steps.sqrt())


class EstimatesStepSize(Custom):
    """Like Prodigy: one step size for all parameters, from gradients and distances, which is kept in the groups."""

    def setup(self) -> None:
        for group in self.param_groups:
            group |= {"d": 1e-6, "numerator": 0.0}

    def update(self) -> None:
        first = self.param_groups[0]
        d, numerator, denominator = first["d"], first["numerator"], 0.0
        for parameter in self.all:
            state = self.state[parameter]
            if not state:
                state |= {"start": parameter.clone(), "sum": torch.zeros_like(parameter)}
            numerator += d * torch.sum(parameter.grad * (state["start"] - parameter)).item()  # estimated
            state["sum"].add_(parameter.grad, alpha=d)
            denominator += state["sum"].abs().sum().item()  # estimated too
        for group in self.param_groups:
            group |= {"numerator": numerator, "d": max(d, min(numerator / denominator, 1.1 * d))}
        for parameter in self.all:
            parameter.sub_(parameter.grad.sign() * d)


class ClipsAfterWarmUp(Custom):
    def update(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            norm = 1.0
            if group["k"] > 1000:
                norm = sum(float(parameter.grad.square().sum()) for parameter in self.all) ** 0.5
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=0.1 / norm)


class AveragesByCounters(Custom):
    """Like schedule-free optimizers: counters and sums of weights in the groups, but no data of parameters."""

    def update(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["weight_sum"] = group.get("weight_sum", 0.0) + group["lr"] ** 2 * min(1.0, group["k"] / 100)
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(z, group["lr"] ** 2 / group["weight_sum"] * min(1.0, group["k"] / 100))


class ReportsTheNorm(Custom):
    def update(self) -> None:
        norm = sum(parameter.grad.square().sum().item() for parameter in self.all) ** 0.5
        logging.getLogger(__name__).debug("gradient norm %g", norm)
        for parameter in self.all:
            parameter.sub_(parameter.grad, alpha=0.1)


class AddsNoise(Custom):
    def update(self) -> None:
        for parameter in self.all:
            parameter.sub_(parameter.grad + 0.01 * torch.randn_like(parameter))  # noise


class ReadsAConstant(Custom):
    def setup(self) -> None:
        self.factor = torch.tensor([0.1])

    def update(self) -> None:
        for parameter in self.all:
            parameter.sub_(parameter.grad * self.factor)


CLEAN: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.NAdam, {"foreach": True}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {"foreach": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adafactor, {}),
    (Lion, {}),
    (Lamb, {}),
    (AveragesByCounters, {}),
]


def report_of(tools: Any, kind: type[Optimizer], **settings: Any) -> DependencyReport:
    report: DependencyReport = tools.trace(tools.make_job(optimizer=tools.optimizer_of(kind, **settings)))
    return report


def line_of(text: str) -> str:
    """Return ``file:line`` of the one line in this file whose comment is this text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [index for index, line in enumerate(lines, start=1) if line.rstrip().endswith(text)]
    return f"{__file__}:{number}"


def the_violation(report: DependencyReport) -> Finding:
    (found,) = report.violations
    return found


@pytest.mark.parametrize(("kind", "settings"), CLEAN, ids=lambda value: getattr(value, "__name__", str(value)))
def test_an_optimizer_that_keeps_parameters_apart_is_clean(tools: Any, kind: Any, settings: Any) -> None:
    report = report_of(tools, kind, **settings)
    assert report.violations == ()
    assert report.units == UNITS
    assert {f.kind for f in report.findings if f.phase == "optimizer"} <= {"leaves", "constant"}


def by_shape(named: Any, matrices: Any, others: Any) -> Optimizer:
    found = [parameter for _, parameter in named]
    return Optimizers(([p for p in found if p.ndim == 2], matrices), ([p for p in found if p.ndim != 2], others))


def test_muon_for_matrices_and_another_optimizer_for_the_rest_are_clean(tools: Any) -> None:
    job = tools.make_job(optimizer=lambda named: by_shape(named, torch.optim.Muon, torch.optim.AdamW))
    assert tools.trace(job).violations == ()


def test_numbers_taken_from_one_parameter_are_cleared_by_the_trials(tools: Any) -> None:
    report = report_of(tools, LambWithNumbers)
    leaving = [finding for finding in report.findings if finding.kind == "leaves"]
    assert [finding.status for finding in leaving] == ["handled"]
    assert leaving[0].units == UNITS
    assert "same bits" in leaving[0].message


@pytest.mark.parametrize(
    ("kind", "seen"),
    [(NvLambWithNumbers, ("mixing", "add")), (SkipsOverflowWithPython, ("leaves", "item"))],
)
def test_numbers_that_mix_in_python_are_violations_with_their_line(
    tools: Any, kind: type[Optimizer], seen: tuple[str, str]
) -> None:
    found = the_violation(report_of(tools, kind))
    assert (found.kind, found.operator, found.units) == (*seen, UNITS)
    assert found.place.user.startswith(__file__)


def test_a_step_size_over_all_parameters_is_a_violation_at_its_lines(tools: Any) -> None:
    found = report_of(tools, EstimatesStepSize).violations
    assert [finding.kind for finding in found] == ["mixing"] * 2
    assert [finding.place.user for finding in found] == [line_of("# estimated"), line_of("# estimated too")]
    assert all("one optimizer for each unit ended elsewhere" in finding.message for finding in found)
    job = tools.make_job(optimizer=tools.optimizer_of(EstimatesStepSize), num_sections=1)
    assert tools.trace(job, num_sections=1).violations == ()  # as its author meant it


def test_coupling_of_parameters_after_a_warm_up_is_found(tools: Any) -> None:
    found = the_violation(report_of(tools, ClipsAfterWarmUp))
    assert (found.kind, found.units) == ("differs", UNITS)
    assert "step counters set to 10,000" in found.message


def test_a_number_over_all_parameters_that_is_only_reported_is_handled(tools: Any) -> None:
    report = report_of(tools, ReportsTheNorm)
    assert report.violations == ()
    assert [(f.kind, f.status) for f in report.findings if f.kind == "mixing"] == [("mixing", "handled")]


def test_an_optimizer_that_wants_a_closure_is_refused_in_a_sentence(tools: Any) -> None:
    with pytest.raises(JobError, match="returns an optimizer whose step needs a closure"):
        report_of(tools, torch.optim.LBFGS)


def test_a_global_norm_is_a_violation_at_its_line(tools: Any) -> None:
    found = the_violation(report_of(tools, NvLamb))
    assert (found.kind, found.units, found.place.user) == ("mixing", UNITS, line_of(".sum()  # mixes"))
    assert found.id == f"mixing:add_@{HERE}:update"
    assert "flows into 3 units" in found.message


def test_clipping_in_the_users_step_names_both_lines_and_the_jobs_setting(tools: Any) -> None:
    found = the_violation(report_of(tools, Clipped))
    assert (found.kind, found.operator, found.units) == ("mixing", "stack", UNITS)
    assert found.place.user == line_of(", 1.0)  # mixes")
    assert found.place.library is not None
    assert "torch/nn/utils/clip_grad.py:" in found.place.library
    assert "Job.clip_grad_norm" in found.advice


def test_the_jobs_own_clipping_and_loss_scaling_are_handled(tools: Any) -> None:
    report = tools.trace(tools.make_job(clip_grad_norm=1.0, precision="fp16"))
    assert report.violations == ()
    ours = {finding.operator: finding for finding in report.findings if finding.kind == "morph"}
    assert set(ours) == {"clip_grad_norm", "loss_scaling"}
    assert all(finding.status == "handled" and finding.units == UNITS for finding in ours.values())


def test_an_overflow_check_over_all_parameters_is_a_violation(tools: Any) -> None:
    found = the_violation(report_of(tools, Unscales))
    assert (found.kind, found.units) == ("mixing", UNITS)
    assert "Job.loss_scaling" in found.advice


def test_numpy_does_not_hide_a_global_norm(tools: Any) -> None:
    found = the_violation(report_of(tools, LeavesThroughNumpy))
    assert (found.kind, found.operator, found.units) == ("leaves", "numpy", UNITS)


def test_loss_scaling_around_the_optimizers_step_is_seen(tools: Any) -> None:
    def step(optimizer: Optimizer, parameters: dict[str, torch.nn.Parameter]) -> None:
        gradients = torch.cat([parameter.grad.flatten() for parameter in parameters.values()])
        if torch.isfinite(gradients).all():
            optimizer.step()

    found = the_violation(tools.trace(tools.make_job(), step_function=step))
    assert (found.operator, found.units, found.place.function) == ("cat", UNITS, "step")


def test_an_average_of_weights_outside_the_optimizers_state_would_be_lost(tools: Any) -> None:
    found = the_violation(report_of(tools, KeepsAverageInAList))
    assert (found.kind, found.units, found.place.user) == ("unsaved", UNITS, line_of("# unsaved"))
    assert "optimizer.state[parameter]" in found.advice


def test_one_counter_for_all_parameters_is_common(tools: Any) -> None:
    found = the_violation(report_of(tools, CountsInOneTensor))
    assert (found.kind, found.units, found.place.user) == ("common", UNITS, line_of("# common"))


def test_noise_in_the_optimizer_is_a_violation(tools: Any) -> None:
    found = the_violation(report_of(tools, AddsNoise))
    assert (found.kind, found.operator, found.place.user) == ("random", "randn_like", line_of("# noise"))


def test_a_constant_that_is_only_read_is_handled(tools: Any) -> None:
    def build(named: Any) -> Optimizer:
        return ReadsAConstant([parameter for _, parameter in named])

    shared = torch.tensor([0.5])

    def step(optimizer: Optimizer, parameters: dict[str, torch.nn.Parameter]) -> None:
        for parameter in parameters.values():
            parameter.grad.mul_(shared)
        optimizer.step()

    report = tools.trace(tools.make_job(optimizer=build), step_function=step)
    constants = [finding for finding in report.findings if finding.kind == "constant"]
    assert [(finding.status, finding.units) for finding in constants] == [("handled", UNITS)]


def test_settings_by_position_are_found_by_the_trials(tools: Any) -> None:
    def build(named: Any) -> Optimizer:
        groups = [{"params": [parameter], "lr": 0.1 / (1 + place)} for place, (_, parameter) in enumerate(named)]
        return torch.optim.SGD(groups)

    found = the_violation(tools.trace(tools.make_job(optimizer=build)))
    assert (found.kind, found.units) == ("differs", ("s1", "s2"))


def test_an_optimizer_that_needs_every_parameter_is_refused(tools: Any) -> None:
    def build(named: Any) -> Optimizer:
        parameters = dict(named)
        return torch.optim.SGD([parameters["blocks.0.weight"], *parameters.values()][1:], lr=0.1)

    found = the_violation(tools.trace(tools.make_job(optimizer=build)))
    assert (found.kind, found.units) == ("refused", ("s1", "s2"))
    assert "blocks.0.weight" in found.message


SCHEDULES: list[Any] = [
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)])
def test_schedules_of_the_learning_rate_are_clean(tools: Any, schedule: Any, lr: Any) -> None:
    rate = lr.clone() if isinstance(lr, torch.Tensor) else lr
    optimizer = tools.optimizer_of(torch.optim.AdamW, lr=rate)
    assert tools.trace(tools.make_job(optimizer=optimizer, lr_scheduler=schedule)).violations == ()


def test_an_allowed_id_that_is_not_found_is_noted(tools: Any) -> None:
    report = tools.trace(tools.make_job(allowed_dependencies=("mixing:gone@x.py:f",)))
    assert report.notes == ("allowed but not found: mixing:gone@x.py:f",)


def test_an_allowed_finding_is_not_a_violation(tools: Any) -> None:
    first = the_violation(report_of(tools, NvLamb))
    job = tools.make_job(optimizer=tools.optimizer_of(NvLamb), allowed_dependencies=(first.id,))
    report = tools.trace(job)
    assert report.violations == ()
    assert [finding.id for finding in report.findings if finding.status == "allowed"] == [first.id]
    require_no_violation(report, "job.py:job")


def test_a_violation_refuses_the_job_in_one_sentence(tools: Any) -> None:
    report = report_of(tools, Clipped)
    with pytest.raises(JobError, match="several units") as refused:
        require_no_violation(report, "job.py:job")
    assert refused.value.source.startswith(line_of(", 1.0)  # mixes"))
    assert "morph trace-deps job.py:job" in str(refused.value)


def test_a_large_model_is_run_without_numbers(tools: Any) -> None:
    report = tools.trace(tools.make_job(optimizer=tools.optimizer_of(Clipped)), max_real_elements=40)
    assert the_violation(report).operator == "stack"
    assert "more than 40 parameters" in report.notes[0]
    assert tools.trace(tools.make_job(), max_real_elements=40).violations == ()


def test_an_optimizer_that_fails_is_an_error_at_its_line(tools: Any) -> None:
    def build(named: Any) -> Optimizer:
        raise ValueError("no such setting")

    with pytest.raises(JobError, match="no such setting") as refused:
        tools.trace(tools.make_job(optimizer=build))
    assert refused.value.source is not None
    assert HERE in refused.value.source

"""Autocast in sections, loss scaling, and bf16 across cuts."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from calibrate.timing.bench import make_bench
from morph.contract.decided import MIN_LOSS_SCALE_EXPONENT, LossScale, decided_step
from morph.contract.errors import JobError, NonFiniteGradient, TrainingStopped
from morph.contract.messages import MicroBatchLoss, Prepared
from morph.contract.timeline import ComputeTimes
from morph.cutting import CutModel, cut, export_job
from morph.cutting.cache.artefact import read_entry, write_entry
from morph.cutting.cuts.cut_model import ParameterUnit
from morph.data import MicroBatchLoader
from morph.jobs.job import Job, LossScaling, Precision
from morph.runtime.state.unit_state import UnitState, UpdateRules, update_rules
from morph.runtime.step.stage import Stage, run_section
from morph.runtime.step.sums import MicroBatchSums
from tests.training.shapes import gradients_of_stages
from tests.training.training_jobs import BATCH_SIZE, MICRO_BATCH_SIZE, NUM_SECTIONS, WIDTH, narrow, plain, sgd

TIMES = ComputeTimes(forward_s=0, recompute_s=0, backward_s=0, reduce_s=0, wait_s=0, step_s=0)
UNIT = ParameterUnit("s0", (0,), ("p",))


class Products(TorchDispatchMode):
    """Records the types of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, Tensor) and "mm" in str(function):
            self.dtypes.add(result.dtype)
        return result


class Cut:
    """The plain job, cut, with its own leaves."""

    def __init__(self) -> None:
        exported = export_job(plain)
        self.model: CutModel = cut(exported, num_sections=NUM_SECTIONS, micro_batch_size=MICRO_BATCH_SIZE)
        self.parameters = {name: value.clone().requires_grad_() for name, value in exported.initial_parameters.items()}
        self.loader = MicroBatchLoader(plain.dataset(), plain.seed, plain.batch_size, MICRO_BATCH_SIZE)

    def gradients(self, precision: Precision, *, recompute: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and gradients of one micro-batch."""
        stage = Stage(
            self.model,
            range(NUM_SECTIONS),
            recompute=recompute,
            parameters=self.parameters,
            load_batch=lambda micro_batch, keys: self.loader.load(0, micro_batch, keys),
            seed=1,
            step=2,
            precision=precision,
        )
        (loss,) = stage.forward(1, ())
        if recompute:
            stage.recompute(1)
        found: dict[str, Tensor] = {}
        sink = MicroBatchSums(
            lambda _, name, gradient: found.update({name: gradient + found.get(name, 0)}), lambda _: None
        )
        stage.backward(1, (torch.ones(()),), sink)
        return loss, found


@pytest.fixture(scope="module")
def tiny() -> Cut:
    return Cut()


TYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", TYPES)
def test_products_run_in_the_type_of_the_job_forward_and_backward(tiny: Cut, precision: Precision) -> None:
    with Products() as products:
        tiny.gradients(precision, recompute=True)
    assert products.dtypes == {TYPES[precision]}


@pytest.mark.parametrize("precision", TYPES)
def test_what_crosses_a_border_and_gradients_of_parameters_keep_their_types(tiny: Cut, precision: Precision) -> None:
    values: tuple[Tensor, ...] = ()
    for section in tiny.model.sections:
        batch = tiny.loader.load(0, 0, section.batch_keys)
        values = run_section(section, values, batch, tiny.parameters, precision).outputs
        assert [value.dtype for value in values] == [spec.dtype for spec in section.outputs]
    loss, gradients = tiny.gradients(precision, recompute=False)
    assert {tensor.dtype for tensor in (loss, *gradients.values())} == {torch.float32}


@pytest.mark.parametrize("precision", TYPES)
def test_a_recompute_gives_the_same_bits_in_every_precision(tiny: Cut, precision: Precision) -> None:
    stored, again = (tiny.gradients(precision, recompute=recompute) for recompute in (False, True))
    assert torch.equal(stored[0], again[0])
    assert all(torch.equal(stored[1][name], again[1][name]) for name in stored[1])


def test_lower_precision_is_near_full_precision_but_not_equal(tiny: Cut) -> None:
    exact, _ = tiny.gradients("fp32", recompute=False)
    for precision in ("bf16", "fp16"):
        loss, _ = tiny.gradients(precision, recompute=False)
        assert loss != exact
        assert torch.allclose(loss, exact, rtol=0.02)


def make(scale: LossScale | None, *, exact: bool) -> UnitState:
    rules = UpdateRules(loss_scale=scale)
    return UnitState(UNIT, {"p": torch.ones(4)}, sgd, num_micro_batches=3, exact=exact, rules=rules)


GRADIENTS = torch.tensor([[0.3, -1e-3, 7.0, 0.0], [0.1, 3e-8, -2.0, 1e-5], [-0.7, 5.0, 1.5, 1e-6]])


@pytest.mark.parametrize("exponent", [-20, 0, 16, 40])
@pytest.mark.parametrize("exact", [True, False])
def test_the_loss_scale_is_taken_off_without_a_trace(exact: bool, exponent: int) -> None:
    states = [make(None, exact=exact), make(LossScale(exponent=exponent, growth_steps=9), exact=exact)]
    means = []
    for state in states:
        factor = 1.0 if state.loss_scale is None else state.loss_scale.factor
        accumulator = state.new_accumulator()
        for gradient in GRADIENTS:
            accumulator.add("p", gradient * factor)
        reduced = accumulator.finish(3, 0)
        means.append((reduced.gradients["p"], dict(reduced.exponents)))
    assert torch.equal(means[0][0], means[1][0])
    assert means[0][1] == means[1][1]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("exact", [True, False])
def test_a_non_finite_gradient_skips_the_step_or_ends_the_run(exact: bool, bad: float) -> None:
    state = make(LossScale(exponent=3, good_steps=1, growth_steps=9), exact=exact)
    before = state.tensors()
    accumulator = state.new_accumulator()
    accumulator.add("p", torch.tensor([1.0, bad, 0.0, 1e30]))
    state.reduced = accumulator.finish(3, 0)
    assert state.reduced.non_finite
    state.apply(decided_step(1, [{}], [True], ["s0"]))
    after = state.tensors()
    assert torch.equal(before["param/p"], after["param/p"])
    assert state.version == 1
    assert state.loss_scale == LossScale(exponent=2, good_steps=0, growth_steps=9)

    plain_state = make(None, exact=exact)
    accumulator = plain_state.new_accumulator()
    accumulator.add("p", torch.tensor([1.0, bad, 0.0, 0.0]))
    with pytest.raises(NonFiniteGradient, match="step 7: the gradient of p"):
        accumulator.finish(3, 7)


@pytest.mark.parametrize("exact", [True, False])
def test_a_unit_whose_own_gradients_are_fine_is_skipped_with_the_others(exact: bool) -> None:
    state = make(LossScale(exponent=3, growth_steps=9), exact=exact)
    accumulator = state.new_accumulator()
    accumulator.add("p", torch.ones(4))
    state.reduced = accumulator.finish(3, 0)
    exponents = dict(state.exponents)
    state.apply(decided_step(1, [{}, {}], [False, True], ["s0"]))
    assert torch.equal(state.parameters["p"], torch.ones(4))
    assert state.exponents == exponents


def test_the_scale_goes_as_in_torch() -> None:
    broken = {1, 2, 6, 13, 14, 15}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_factor=2.0, backoff_factor=0.5, growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(4))
    reference = sgd([("p", parameter)])
    state = make(LossScale(exponent=10, growth_steps=3), exact=True)
    for step in range(20):
        gradient = GRADIENTS[step % 3] * (math.inf if step in broken else 1.0)
        assert state.loss_scale.factor == float(scaler.scale(torch.ones(())))
        parameter.grad = gradient * state.loss_scale.factor
        accumulator = state.new_accumulator()
        accumulator.add("p", parameter.grad)
        scaler.step(reference)
        scaler.update()
        state.reduced = accumulator.finish(1, step)
        state.apply(decided_step(step + 1, [{}], [state.reduced.non_finite], ["s0"]))
        assert torch.allclose(state.parameters["p"], parameter, rtol=1e-6)
    assert {float(value) for value in state.optimizer.state_dict()["state"][0]["momentum_buffer"]} != {0.0}


def test_a_scale_that_cannot_get_smaller_ends_the_run() -> None:
    scale = LossScale(exponent=MIN_LOSS_SCALE_EXPONENT, growth_steps=1)
    with pytest.raises(TrainingStopped, match=r"not finite even at a loss scale of 2\*\*-20"):
        scale.after(skipped=True)
    assert scale.after(skipped=False).exponent == MIN_LOSS_SCALE_EXPONENT + 1


def test_the_scale_survives_unless_the_job_changed_its_beginning() -> None:
    saved = make(LossScale(exponent=1, growth_steps=9), exact=True)
    saved.loss_scale = LossScale(exponent=7, good_steps=5, growth_steps=9)
    state = make(LossScale(exponent=1, growth_steps=4), exact=True)
    state.load(saved.tensors())
    assert state.loss_scale == LossScale(exponent=7, good_steps=5, growth_steps=4)
    assert state.loss_scale.after(skipped=False).exponent == 8
    other = make(LossScale(exponent=3, growth_steps=4), exact=True)
    other.load(saved.tensors())
    assert other.loss_scale == LossScale(exponent=3, growth_steps=4)
    bare = make(None, exact=True)
    bare.load(saved.tensors())
    assert bare.loss_scale is None
    state.load(bare.tensors())
    assert state.loss_scale == LossScale(exponent=1, growth_steps=4)


def test_half_precision_has_a_loss_scale_by_default_and_others_do_not() -> None:
    def rules(**fields: Any) -> UpdateRules:
        return update_rules(replace(plain, **fields), torch.device("cpu"))

    assert rules(precision="fp16").loss_scale == LossScale(exponent=16, growth_steps=2000)
    assert rules(precision="bf16").loss_scale is None
    assert rules(loss_scaling=LossScaling(initial=2.0)).loss_scale == LossScale(exponent=1, growth_steps=2000)


@pytest.mark.parametrize("initial", [0, -2.0, 3.0, 0.5, math.inf, math.nan, "big", True])
def test_a_loss_scale_that_is_not_a_power_of_two_is_refused(initial: Any) -> None:
    with pytest.raises(JobError, match=r"loss_scaling\.initial: is not right.*a power of two"):
        LossScaling(initial=initial)


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan, 0.1])
def test_a_loss_that_is_not_finite_can_be_reported(loss: float) -> None:
    prepared = Prepared(
        worker="w",
        generation=1,
        step=1,
        non_finite=True,
        losses=(MicroBatchLoss(micro_batch=0, loss=loss, metrics={"a": loss}),),
        times=TIMES,
    )
    (back,) = Prepared.model_validate_json(prepared.model_dump_json()).losses
    assert str((back.loss, back.metrics["a"])) == str((loss, loss))


CPU = torch.device("cpu")


def cut_of(job: Job) -> CutModel:
    return cut(export_job(job), num_sections=NUM_SECTIONS, micro_batch_size=MICRO_BATCH_SIZE)


@pytest.fixture(scope="module")
def model() -> CutModel:
    return cut_of(narrow)


def test_half_the_bytes_cross_each_cut_and_the_loss_stays_wide(model: CutModel) -> None:
    usual = cut_of(plain)
    for section, whole in zip(model.sections[:-1], usual.sections[:-1], strict=True):
        assert {spec.dtype for spec in section.outputs if spec.requires_grad} == {torch.bfloat16}
        assert sum(spec.num_bytes for spec in section.outputs) * 2 == sum(spec.num_bytes for spec in whole.outputs)
    for before, behind in zip(model.sections, model.sections[1:], strict=False):
        assert before.outputs == behind.inputs
    assert model.sections[-1].outputs == usual.sections[-1].outputs
    assert model.fingerprint != usual.fingerprint
    assert [section.signature for section in model.sections] == [section.signature for section in usual.sections]


def test_calibration_runs_a_section_on_narrow_tensors(model: CutModel) -> None:
    initial = export_job(narrow).initial_state
    loader = MicroBatchLoader(narrow.dataset(), narrow.seed, BATCH_SIZE, MICRO_BATCH_SIZE)
    bench = make_bench(narrow, model.sections[1], initial, partial(loader.example, None), CPU)
    assert bench.given_bytes() == MICRO_BATCH_SIZE * WIDTH * 2
    assert [output.dtype for output in bench.forward(0).outputs] == [torch.bfloat16]
    bench.both()


@pytest.mark.slow
@pytest.mark.parametrize("begins", [[0, 1, 2, 3], [0, 2]])
def test_gradients_have_the_same_bits_wherever_stages_begin(model: CutModel, begins: list[int]) -> None:
    loss, expected = gradients_of_stages(narrow, model, [0], recompute=False, precision="fp32")
    found_loss, found = gradients_of_stages(narrow, model, begins, recompute=True, precision="fp32")
    assert torch.equal(loss, found_loss)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    same = replace(narrow, boundary="same")
    assert not torch.equal(loss, gradients_of_stages(same, cut_of(same), [0], recompute=False, precision="fp32")[0])


def test_a_kept_cut_has_the_narrow_borders(model: CutModel) -> None:
    exported = export_job(narrow)
    again = read_entry(write_entry(exported, model, "/jobs"), "/jobs").model
    assert [section.outputs for section in again.sections] == [section.outputs for section in model.sections]
    assert again.fingerprint == model.fingerprint


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"boundary": "fp16"}, "boundary: is not right (got 'fp16'); allowed: 'same' or 'bf16'"),
        ({"master_weights": "fp32"}, "master_weights: is not right (got 'fp32'); allowed: True or False"),
    ],
)
def test_other_types_are_refused(fields: dict[str, str], told: str) -> None:
    with pytest.raises(JobError) as refused:
        replace(plain, **fields)  # type: ignore[arg-type]
    assert told in str(refused.value)

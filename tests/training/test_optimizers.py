"""Any optimizer and any schedule: a saved and loaded state continues bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler

from morph.checkpoint.unit_files import from_payload, to_payload
from morph.contract.decided import Decided, decided_step
from morph.contract.errors import JobError, TrainingStopped
from morph.cutting import cut, export_job
from morph.cutting.cuts.cut_model import ParameterUnit
from morph.jobs.changes import Change
from morph.optimizers import Optimizers, kind_of
from morph.runtime.state.accumulators import Reduced
from morph.runtime.state.optimizer_state import MakeOptimizer, from_plain, to_plain
from morph.runtime.state.unit_state import UnitState, UpdateRules, norms_sq, squared_norm, update_rules
from morph.runtime.workloads.job_workload import check_training, settings
from tests.training.training_jobs import MICRO_BATCH_SIZE, NUM_SECTIONS, plain, sgd

UNIT = ParameterUnit("s1", (1,), ("weight", "bias"))


def one_group(make: Callable[..., Optimizer], **settings: Any) -> MakeOptimizer:
    return lambda named: make([parameter for _, parameter in named], **settings)


def two_groups(named: Iterable[tuple[str, Parameter]]) -> Optimizer:
    found = list(named)
    decayed = [parameter for _, parameter in found if parameter.dim() > 1]
    others = [parameter for _, parameter in found if parameter.dim() <= 1]
    return optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01)


def named_groups(named: Iterable[tuple[str, Parameter]]) -> Optimizer:
    return optim.SGD(list(named), lr=0.1, momentum=0.9)


def muon_and_adamw(named: Iterable[tuple[str, Parameter]]) -> Optimizer:
    found = [parameter for _, parameter in named]
    return Optimizers(
        ([p for p in found if p.ndim == 2], lambda matrices: optim.Muon(matrices, lr=0.02)),
        ([p for p in found if p.ndim != 2], lambda others: optim.AdamW(others, lr=0.01, amsgrad=True)),
    )


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": one_group(optim.AdamW, lr=0.01),
    "AdamW, one by one": one_group(optim.AdamW, lr=0.01, foreach=False),
    "AdamW, all at once": one_group(optim.AdamW, lr=0.01, foreach=True),
    "AdamW, fused": one_group(optim.AdamW, lr=0.01, fused=True),
    "Adam, fused": one_group(optim.Adam, lr=0.01, fused=True),
    "SGD, fused": one_group(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adagrad, fused": one_group(optim.Adagrad, lr=0.1, fused=True),
    "AdamW, amsgrad": one_group(optim.AdamW, lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "AdamW, rate in a tensor": one_group(optim.AdamW, lr=torch.tensor(0.01)),
    "Adam": one_group(optim.Adam, lr=0.01),
    "SGD": one_group(optim.SGD, lr=0.1),
    "SGD, momentum": one_group(optim.SGD, lr=0.1, momentum=0.9),
    "SGD, nesterov": one_group(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adagrad": one_group(optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "RMSprop": one_group(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "NAdam": one_group(optim.NAdam, lr=0.01),
    "RAdam": one_group(optim.RAdam, lr=0.01),
    "Adamax": one_group(optim.Adamax, lr=0.01),
    "Adadelta": one_group(optim.Adadelta, lr=1.0),
    "ASGD": one_group(optim.ASGD, lr=0.01, t0=2),
    "Rprop": one_group(optim.Rprop, lr=0.01),
    "Adafactor": one_group(optim.Adafactor, lr=0.01),
    "two groups": two_groups,
    "named parameters": named_groups,
    "Muon and AdamW": muon_and_adamw,
}
SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 2, 0.3),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [1, 3, 3, 6], 0.3),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.001, 0.1, 3),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.CosineAnnealingLR(o, 7)], [3]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, 0.1, total_iters=3), schedules.ExponentialLR(o, 0.9)], o
    ),
}


def make(
    optimizer: MakeOptimizer, schedule: Any = None, seed: int = 0, *, in_host_memory: bool = False, code: str = ""
) -> UnitState:
    generator = torch.Generator().manual_seed(seed)
    parameters = {"weight": torch.randn(4, 3, generator=generator), "bias": torch.randn(5, generator=generator)}
    rules = UpdateRules(make_scheduler=schedule, optimizer_in_host_memory=in_host_memory, code=code)
    return UnitState(UNIT, parameters, optimizer, num_micro_batches=2, exact=True, rules=rules)


def step(state: UnitState, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = {name: torch.randn(p.shape, generator=generator) for name, p in state.parameters.items()}
    state.reduced = Reduced(gradients=gradients, exponents=dict(state.exponents), overflowed=False)
    state.apply()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_round_trip(optimizer: MakeOptimizer, schedule: Any = None) -> None:
    for num_steps in (0, 1, 5):
        state = make(optimizer, schedule)
        for index in range(num_steps):
            step(state, index)
        twin = make(optimizer, schedule, seed=99)
        twin.load(from_payload(to_payload(state.tensors())))
        assert same(twin.tensors(), state.tensors())
        for index in range(4):
            step(state, 100 + index)
            step(twin, 100 + index)
            assert same(twin.tensors(), state.tensors())


def resumed(state: UnitState, optimizer: MakeOptimizer, schedule: Any = None, code: str = "") -> UnitState:
    """Return the state of a changed job that continues from another job's save."""
    other = make(optimizer, schedule, seed=99, code=code)
    other.load(from_payload(to_payload(state.tensors())))
    return other


def begun(optimizer: MakeOptimizer, schedule: Any = None, num_steps: int = 5) -> UnitState:
    state = make(optimizer, schedule)
    for index in range(num_steps):
        step(state, index)
    return state


def rates(state: UnitState) -> list[float]:
    """Return the learning rate now and at each of the next steps."""
    found = []
    for index in range(4):
        found.append(float(state.optimizer.param_groups[0]["lr"]))
        step(state, 100 + index)
    return found


def test_changed_settings_apply_and_the_optimizers_state_continues() -> None:
    changed = one_group(optim.AdamW, lr=0.03, betas=(0.5, 0.9), weight_decay=0.2)
    went_on = resumed(begun(one_group(optim.AdamW, lr=0.01)), changed)
    by_hand = begun(one_group(optim.AdamW, lr=0.01))
    by_hand.optimizer.param_groups[0].update(lr=0.03, betas=(0.5, 0.9), weight_decay=0.2)
    for index in range(3):
        step(went_on, 50 + index)
        step(by_hand, 50 + index)
    one, other = went_on.tensors(), by_hand.tensors()
    assert same({**one, "numbers": other["numbers"]}, other)


def test_parts_train_as_if_alone_and_resume_only_under_their_names() -> None:
    state = begun(muon_and_adamw, SCHEDULES["StepLR"])
    matrix = begun(lambda named: optim.Muon([p for n, p in named if n == "weight"], lr=0.02), SCHEDULES["StepLR"])
    vector = begun(
        lambda named: optim.AdamW([p for n, p in named if n == "bias"], lr=0.01, amsgrad=True), SCHEDULES["StepLR"]
    )
    assert torch.equal(state.parameters["weight"], matrix.parameters["weight"])
    assert torch.equal(state.parameters["bias"], vector.parameters["bias"])
    assert kind_of(state.optimizer) == "Muon, AdamW"
    with pytest.raises(JobError, match=r"needs a closure \(got 'LBFGS'\)"):
        make(lambda named: Optimizers(([p for _, p in named], optim.LBFGS)))


def test_with_a_rate_of_zero_no_weight_moves() -> None:
    state = begun(one_group(optim.AdamW, lr=0.01))
    went_on = resumed(state, one_group(optim.AdamW, lr=0.0))
    step(went_on, 7)
    assert same(dict(went_on.parameters), dict(state.parameters))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_changed_rate_under_a_schedule_continues_as_if_always_so(name: str) -> None:
    changed = one_group(optim.SGD, lr=0.3, momentum=0.9)
    wanted = rates(begun(changed, SCHEDULES[name]))
    assert rates(resumed(begun(OPTIMIZERS["SGD, momentum"], SCHEDULES[name]), changed, SCHEDULES[name])) == wanted


def test_another_function_of_the_same_form_applies_from_the_next_step() -> None:
    sgd = OPTIMIZERS["SGD"]

    def halved(optimizer: Optimizer) -> LRScheduler:
        return schedules.LambdaLR(optimizer, lambda index: 0.5**index)

    def inverse(optimizer: Optimizer) -> LRScheduler:
        return schedules.LambdaLR(optimizer, lambda index: 1 / (1 + index))

    assert rates(resumed(begun(sgd, halved), sgd, inverse, code="other")) == rates(begun(sgd, inverse))


def test_a_schedule_may_be_added_or_taken_away() -> None:
    sgd, cosine = OPTIMIZERS["SGD"], SCHEDULES["OneCycleLR"]
    assert rates(resumed(begun(sgd), sgd, cosine)) == rates(begun(sgd, cosine))
    assert rates(resumed(begun(sgd, cosine), sgd)) == [0.1] * 4


def test_accepted_changes_hold_for_joining_workers_and_resumed_runs() -> None:
    changed, schedule = one_group(optim.AdamW, lr=0.02), SCHEDULES["OneCycleLR"]
    state = resumed(begun(OPTIMIZERS["AdamW"], schedule), changed, schedule)
    for index in range(3):
        joined = resumed(state, changed, schedule)
        assert same(joined.tensors(), state.tensors())
        step(joined, index)
        step(state, index)
        assert same(joined.tensors(), state.tensors())
    state.load(begun(OPTIMIZERS["AdamW"], schedule).tensors())  # back to a checkpoint from before
    assert rates(state) == rates(begun(changed, schedule))


class Counting(optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_counters_in_an_optimizers_groups_continue_under_changed_settings() -> None:
    went_on = resumed(begun(one_group(Counting, lr=0.1)), one_group(Counting, lr=0.2))
    (group,) = went_on.optimizer.param_groups
    assert (group["k"], group["lr"]) == (5, 0.2)


def test_a_schedule_that_does_not_reach_the_runs_step_is_refused() -> None:
    def short(optimizer: Optimizer) -> LRScheduler:
        return schedules.OneCycleLR(optimizer, 0.1, total_steps=3)

    with pytest.raises(JobError, match=r"lr_scheduler: failed: ValueError: Tried to step .* reaches step 5"):
        resumed(begun(OPTIMIZERS["SGD"]), OPTIMIZERS["SGD"], short)


@pytest.mark.parametrize(
    ("optimizer", "needed"),
    [
        (one_group(optim.AdamW), "exp_avg, exp_avg_sq, step"),
        (one_group(optim.AdamW, amsgrad=True), "exp_avg, exp_avg_sq, max_exp_avg_sq, step"),
        (one_group(optim.SGD, lr=0.1, momentum=0.9), ""),
    ],
)
def test_the_state_an_optimizer_needs_is_known_and_required(optimizer: MakeOptimizer, needed: str) -> None:
    job = replace(plain, optimizer=optimizer)
    model = cut(export_job(job), num_sections=NUM_SECTIONS, micro_batch_size=MICRO_BATCH_SIZE)
    (found,) = {value for name, value in check_training(job, model).items() if name.endswith(" needs")}
    assert found == needed
    change = Change(what="setting", name="optimizer(s0) needs", now=found, was="exp_avg, exp_avg_sq, step")
    assert ("'max_exp_avg_sq'" in (change.cannot_apply or "")) == ("max_exp_avg_sq" in needed)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_and_loaded_optimizer_continues_bit_for_bit(name: str) -> None:
    check_round_trip(OPTIMIZERS[name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_saved_and_loaded_schedule_continues_bit_for_bit(name: str) -> None:
    check_round_trip(OPTIMIZERS["SGD, momentum"], SCHEDULES[name])


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_a_schedule_may_move_other_hyperparameters_too(name: str) -> None:
    cycled = {"OneCycleLR": SCHEDULES[name], "CyclicLR": lambda o: schedules.CyclicLR(o, 0.001, 0.1, 3)}
    check_round_trip(
        OPTIMIZERS["AdamW, amsgrad"] if name == "OneCycleLR" else OPTIMIZERS["SGD, momentum"], cycled[name]
    )


@pytest.mark.parametrize("name", ["SGD, momentum", "AdamW", "Adafactor"])
def test_units_step_as_one_optimizer_over_the_whole_model_would(name: str) -> None:
    schedule = SCHEDULES["LinearLR"]
    state = make(OPTIMIZERS[name], schedule)
    whole = {key: Parameter(value.detach().clone()) for key, value in state.parameters.items()}
    reference = OPTIMIZERS[name](list(whole.items()))
    rates = schedule(reference)
    for index in range(5):
        generator = torch.Generator().manual_seed(index)
        for parameter in whole.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        reference.step()
        rates.step()
        step(state, index)
    assert all(torch.equal(whole[key], state.parameters[key]) for key in whole)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.endswith("fused")])
def test_a_fused_optimizer_is_checked_before_a_run_without_memory(name: str) -> None:
    model = cut(export_job(plain), num_sections=NUM_SECTIONS, micro_batch_size=MICRO_BATCH_SIZE)
    found = settings(replace(plain, optimizer=OPTIMIZERS[name]), model)
    assert found["optimizer(s1)[0]['fused']"] == "True"


def test_units_whose_rate_is_one_tensor_do_not_share_it() -> None:
    one, other = (make(OPTIMIZERS["AdamW, rate in a tensor"], SCHEDULES["ExponentialLR"]) for _ in range(2))
    step(one, 0)
    assert float(other.optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)
    assert float(one.optimizer.param_groups[0]["lr"]) == pytest.approx(0.009)


def test_a_states_learning_rate_is_the_saved_one() -> None:
    state = make(OPTIMIZERS["SGD"], SCHEDULES["StepLR"])
    for index in range(5):
        step(state, index)
    twin = make(OPTIMIZERS["SGD"], SCHEDULES["StepLR"])
    twin.load(state.tensors())
    assert twin.optimizer.param_groups[0]["lr"] == state.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.3**2)


@pytest.mark.parametrize("name", ["AdamW", "SGD, nesterov", "Adagrad"])
def test_an_optimizer_in_host_memory_updates_the_parameters_that_the_sections_read(name: str) -> None:
    """On a CPU both memories are the same, but the optimizer's copies are still separate."""
    state, split = make(OPTIMIZERS[name]), make(OPTIMIZERS[name], in_host_memory=True)
    owned = {id(p) for group in split.optimizer.param_groups for p in group["params"]}
    assert not owned & {id(parameter) for parameter in split.parameters.values()}
    for index in range(4):
        step(state, index)
        step(split, index)
        assert all(torch.equal(state.parameters[key], split.parameters[key]) for key in state.parameters)
    assert same(state.tensors(), split.tensors())
    twin = make(OPTIMIZERS[name], seed=5, in_host_memory=True)
    twin.load(split.tensors())
    assert all(torch.equal(twin.parameters[key], split.parameters[key]) for key in split.parameters)
    step(split, 9)
    step(twin, 9)
    assert same(twin.tensors(), split.tensors())


@pytest.mark.parametrize(
    ("wanted", "device", "in_host_memory"),
    [("cpu", "cuda", True), ("cpu", "cpu", False), ("same", "cuda", False), ("same", "cpu", False)],
)
def test_only_a_device_with_memory_of_its_own_has_the_optimizer_elsewhere(
    wanted: Any, device: str, in_host_memory: bool
) -> None:
    job = replace(plain, optimizer_device=wanted)
    assert update_rules(job, torch.device(device)).optimizer_in_host_memory == in_host_memory


class Hoarder(optim.SGD):
    """An optimizer whose state cannot be saved."""

    def __init__(self, parameters: Iterable[Parameter], what: Any, owner: Any = None) -> None:
        super().__init__(parameters, lr=0.1)
        first = self.param_groups[0]["params"][0]
        self.state[first if owner is None else owner]["kept"] = what


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (one_group(optim.LBFGS), "optimizer: returns an optimizer whose step needs a closure (got 'LBFGS')"),
        (lambda named: list(named), "optimizer: does not return an optimizer (got 'list')"),
        (
            lambda named: [torch.optim.SGD(named), torch.optim.Adam(named)],
            "for several, morph.Optimizers, which leaves",
        ),
        (lambda named: [torch.optim.SGD([])], "optimizer: makes an optimizer of no parameters, when it is called for"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(JobError) as caught:
        make(optimizer)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (one_group(Hoarder, what=print), "keeps state 'kept' of type builtin_function_or_method"),
        (one_group(Hoarder, what=[torch.ones(2)]), "keeps state 'kept' of type Tensor, which cannot be saved"),
        (one_group(Hoarder, what=1, owner="all"), "keeps state that belongs to no parameter (got 'Hoarder')"),
    ],
)
def test_state_that_cannot_be_saved_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(JobError) as caught:
        make(optimizer).tensors()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (schedules.ReduceLROnPlateau, "lr_scheduler: returns a scheduler whose step needs a value"),
        (lambda o: 0.1, "lr_scheduler: does not return a scheduler (got 'float')"),
        (lambda o: None, "lr_scheduler: does not return a scheduler (got 'NoneType')"),
    ],
)
def test_a_schedule_that_cannot_be_used_is_refused(schedule: Any, message: str) -> None:
    with pytest.raises(JobError) as caught:
        make(OPTIMIZERS["SGD"], schedule)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        float("inf"),
        "text",
        [1, [2.5]],
        (0.9, (0.99, [1])),
        {"a": (1,)},
        {3: 2, None: "x"},
        torch.tensor(0.1),
    ],
)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = from_plain(json.loads(json.dumps(to_plain(value))))
    assert type(back) is type(value)
    assert back == value


def test_a_tensor_of_one_number_keeps_its_type_and_shape() -> None:
    back = from_plain(to_plain(torch.tensor([[7]], dtype=torch.int16)))
    assert (back.dtype, back.shape, back.item()) == (torch.int16, (1, 1), 7)


def gradients(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10.0**-seed for shape in shapes]


@pytest.mark.parametrize("shapes", [((1,),), ((3, 5), (7,)), ((1 << 20,), (1025,)), ((0,), (2,)), ((3, 700_001),)])
def test_the_norm_is_that_of_all_elements(shapes: tuple[tuple[int, ...], ...]) -> None:
    tensors = gradients(1, *shapes)
    exact = math.fsum(value**2 for tensor in tensors for value in tensor.double().flatten().tolist())
    assert squared_norm(tensors) == pytest.approx(exact, rel=1e-14)


def test_the_norm_has_the_same_bits_for_any_threads_and_layout() -> None:
    (tensor,) = gradients(2, (1000, 2003))
    threads = torch.get_num_threads()
    found = set()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.add(squared_norm([tensor]))
            found.add(squared_norm([tensor.t().contiguous().t()]))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_the_norm_leaves_the_gradient_as_it_is() -> None:
    (tensor,) = gradients(0, (9,))
    before = tensor.clone()
    squared_norm([tensor])
    squared_norm([tensor.double()])
    wide = tensor.double()
    squared_norm([wide])
    assert torch.equal(tensor, before)
    assert torch.equal(wide, before.double())


@pytest.mark.parametrize("most", [0.05, 1.0, 100.0])
def test_clipping_does_what_torch_does_to_a_model_in_one_piece(most: float) -> None:
    shapes = ((4, 3), (3,), (6,))
    whole = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter, gradient in zip(whole, gradients(0, *shapes), strict=True):
        parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(whole, most)
    torch.optim.SGD(whole, lr=0.2, momentum=0.9, nesterov=True).step()

    units = [ParameterUnit(f"s{index}", (index,), ("p",)) for index in range(3)]
    states = [
        UnitState(
            unit, {"p": torch.ones(shape)}, sgd, num_micro_batches=2, exact=True, rules=UpdateRules(clip_grad_norm=most)
        )
        for unit, shape in zip(units, shapes, strict=True)
    ]
    for state, gradient in zip(states, gradients(0, *shapes), strict=True):
        state.reduced = Reduced(gradients={"p": gradient}, exponents={}, overflowed=False)
    found = [norms_sq({state.unit.id: state}) for state in states]
    decided = decided_step(1, found, [False] * 3, [unit.id for unit in units])
    assert decided.gradient_norm == pytest.approx(float(norm), rel=1e-6)
    for state, parameter in zip(states, whole, strict=True):
        state.apply(decided)
        assert torch.allclose(state.parameters["p"], parameter, rtol=1e-6, atol=0)


def test_the_norm_does_not_depend_on_which_worker_reports_what() -> None:
    norms = {f"s{index}": 10.0 ** (index - 4) / 3 for index in range(9)}
    together = decided_step(4, [norms], [False], norms)
    backwards = [{unit: norms[unit]} for unit in reversed(norms)]
    assert decided_step(4, [*backwards, {"s3": norms["s3"]}], [False] * 10, norms) == together
    assert Decided.model_validate_json(together.model_dump_json()) == together


def test_two_holders_of_one_unit_with_different_gradients_stop_the_run() -> None:
    with pytest.raises(TrainingStopped, match=r"step 6: two workers hold different gradients of unit s1"):
        decided_step(7, [{"s1": 1.0, "s0": 2.0}, {"s1": 1.0000000000000002}], [False, False], ["s0", "s1"])


def test_a_unit_without_a_reported_norm_stops_the_run() -> None:
    with pytest.raises(TrainingStopped, match=r"no worker reported the gradient norm of s0, s2"):
        decided_step(7, [{"s1": 1.0}], [False], ["s0", "s1", "s2"])


def test_a_job_without_clipping_reports_and_decides_no_norm() -> None:
    unit = ParameterUnit("s0", (0,), ("p",))
    state = UnitState(unit, {"p": torch.ones(2)}, sgd, num_micro_batches=1, exact=True)
    state.reduced = Reduced(gradients={"p": torch.ones(2)}, exponents={}, overflowed=False)
    assert norms_sq({"s0": state}) == {}
    assert decided_step(1, [{}], [False], ["s0"]) == Decided(version=1)

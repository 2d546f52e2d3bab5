from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import morph
from morph.contract.errors import ExportError, JobError
from morph.cutting import CutModel, cut, export_job
from morph.cutting.cuts.report import report_cuts
from morph.cutting.exporting.exported_job import GraphJob, MarkedJob
from morph.runtime.step.stage import run_section
from tests.cutting.zoo import ZOO

pytestmark = pytest.mark.slow

ITEMS = [{"x": torch.randn(6, generator=torch.Generator().manual_seed(i)), "keep": torch.ones(6)} for i in range(8)]


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


class Branching(nn.Module):
    """A layer that decides by a value, which torch.export refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum().item() > 1e9:
            y = y * 2
        return x + self.dropout(functional.gelu(y))


class Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Branching() for _ in range(6)))


class Marked(nn.Module):
    """A model with code between its modules, a tied weight, a mask made of the batch, and marks in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6, bias=False)
        self.layers = nn.ModuleList(Branching() for _ in range(3))
        self.leave = nn.Linear(6, 6, bias=False)
        self.leave.weight = self.enter.weight
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.arange(6.0) / 6)
        self.cut = morph.CutPoint()

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        mask = torch.where(keep > 0, 1.0, 0.5)
        x = self.enter(x) * self.scale
        for layer in self.layers:
            x = self.cut(layer(x) * mask) + self.shift
        return self.leave(x)


def marked_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch["x"], batch["keep"])
    return out.square().mean(), {"largest": out.abs().mean()}


class GoesPast(nn.Module):
    """A model that reads the first layer's value again at its end, so that more than one tensor crosses the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.cut = Branching(), Branching(), morph.CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        early = self.first(x)
        return self.second(self.cut(early)) + early


class Experts(nn.Module):
    """A mixture of experts that picks its tokens, so that sizes depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(dim=-1)
        best = weights.argmax(dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(best == number).flatten()  # refused here
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return x + out


def check_against_whole(tools: Any, job: Any, exported: Any, model: CutModel, items: list[dict[str, Tensor]]) -> None:
    batch = tools.stack(items, model.micro_batch_size)
    whole = tools.build_whole(job, exported.initial_parameters)
    torch.manual_seed(11)
    result = job.loss(whole, batch)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    parameters = {n: t.clone().requires_grad_() for n, t in exported.initial_parameters.items()}
    values: tuple[Tensor, ...] = ()
    runs = []
    torch.manual_seed(11)
    for section in model.sections:
        leaves = tuple(v.detach().requires_grad_(s.requires_grad) for v, s in zip(values, section.inputs, strict=True))
        own = {name: parameters[name] for name in section.parameters}
        values = section(leaves, {key: batch[key] for key in section.batch_keys}, own)
        assert [tuple(v.shape) for v in values] == [s.shape for s in section.outputs]
        runs.append((leaves, values))
    assert torch.equal(values[0].detach(), loss.detach())
    gradients: list[Tensor | None] = [None]
    for leaves, outputs in reversed(runs):
        torch.autograd.backward(outputs[0], gradients[0])
        gradients = [leaf.grad for leaf in leaves] or [None]
    for name, gradient in expected.items():
        torch.testing.assert_close(parameters[name].grad, gradient)


def test_a_model_that_export_refuses_is_left_whole_for_one_section(tools: Any) -> None:
    def penalised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        out = model(x)
        return torch.autograd.grad(out.square().sum(), x, create_graph=True)[0].square().mean() + out.mean()

    job = tools.make_job(Chain, penalised, ITEMS, num_sections=1)
    exported = export_job(job)
    assert isinstance(exported, MarkedJob)
    model = cut(exported, num_sections=1, micro_batch_size=4)
    assert model.sections[0].cost > 1e3
    check_against_whole(tools, job, exported, model, ITEMS)


@pytest.mark.parametrize("m", [1, 4])
def test_a_chain_that_export_refuses_is_cut_in_front_of_named_modules(tools: Any, m: int) -> None:
    job = tools.make_job(Chain, mean_loss, ITEMS, cut_points=["2", "4"])
    exported = export_job(job)
    assert isinstance(exported, MarkedJob)
    model = cut(exported, num_sections=None, micro_batch_size=m)
    assert [section.label for section in model.sections] == ["model", "2", "4"]
    assert model.sections[1].parameters == tuple(f"{i}.linear.{kind}" for i in (2, 3) for kind in ("weight", "bias"))
    assert all(unit.id == f"s{index}" for index, unit in enumerate(model.units))
    check_against_whole(tools, job, exported, model, ITEMS)


def test_marks_in_a_loop_cut_a_forward_with_code_between_modules(tools: Any) -> None:
    job = tools.make_job(Marked, marked_loss, ITEMS)
    exported = export_job(job)
    assert isinstance(exported, MarkedJob)
    model = cut(exported, num_sections=None, micro_batch_size=3)
    assert len(model.sections) == 4
    assert model.metric_names == ("largest",)
    assert [unit.id for unit in model.units if "enter.weight" in unit.parameters] == ["s0+s3"]
    assert model.unused_parameters == ()
    check_against_whole(tools, job, exported, model, ITEMS)


def test_experts_that_pick_tokens_are_refused_but_run_with_marks(tools: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(Experts() for _ in range(3)))

    with pytest.raises(ExportError, match="depends on") as caught:
        export_job(tools.make_job(Experts, mean_loss, ITEMS))
    lines, start = inspect.getsourcelines(Experts)
    number = start + next(place for place, line in enumerate(lines) if "# refused here" in line)
    assert str(caught.value).startswith(f"{__file__}:{number}")
    job = tools.make_job(model, mean_loss, ITEMS, cut_points=["1", "2"])
    exported = export_job(job)
    cut_model = cut(exported, num_sections=None, micro_batch_size=2)
    check_against_whole(tools, job, exported, cut_model, ITEMS)
    assert cut_model.sections[1].parameters == tuple(n for n in exported.initial_parameters if n.startswith("1."))


def test_fewer_sections_take_the_marks_that_are_even(tools: Any) -> None:
    exported = export_job(tools.make_job(Chain, mean_loss, ITEMS, cut_points=["1", "2", "3", "4", "5"]))
    assert [s.label for s in cut(exported, num_sections=3, micro_batch_size=2).sections] == ["model", "2", "4"]
    with pytest.raises(JobError, match="only 6 sections are possible"):
        cut(exported, num_sections=7, micro_batch_size=2)


def test_equal_marked_sections_are_equal_and_named_with_their_line(tools: Any) -> None:
    exported = export_job(tools.make_job(Chain, mean_loss, ITEMS, cut_points=["2", "4"]))
    model = cut(exported, num_sections=None, micro_batch_size=2)
    found = report_cuts(exported, model)
    assert found.refusal is not None
    assert found.curve == ()
    assert [entry.module for entry in found.cuts] == ["2", "4"]
    assert [entry.bytes_per_sample for entry in found.cuts] == [24, 24]
    deep = export_job(tools.make_job(Marked, marked_loss, ITEMS))
    signatures = [section.signature for section in cut(deep, num_sections=None, micro_batch_size=2).sections]
    assert signatures[1] == signatures[2]
    assert len(set(signatures)) == 3
    sources = {entry.source for entry in report_cuts(deep, cut(deep, num_sections=None, micro_batch_size=2)).cuts}
    assert len(sources) == 1
    assert "test_marks.py:" in str(sources.pop())


def test_the_fingerprint_of_a_marked_model_is_that_of_its_cuts(tools: Any) -> None:
    def fingerprint(names: list[str], m: int) -> str:
        exported = export_job(tools.make_job(Chain, mean_loss, ITEMS, cut_points=names))
        return cut(exported, num_sections=None, micro_batch_size=m).fingerprint

    assert fingerprint(["2", "4"], 1) == fingerprint(["2", "4"], 4)
    assert fingerprint(["2", "4"], 1) != fingerprint(["2", "3"], 1)


def test_a_value_that_goes_past_a_mark_is_refused(tools: Any) -> None:
    exported = export_job(tools.make_job(GoesPast, mean_loss, ITEMS))
    with pytest.raises(ExportError, match="goes past the cut in front of cut"):
        cut(exported, num_sections=None, micro_batch_size=2)


def test_a_refusal_says_how_to_mark(tools: Any) -> None:
    with pytest.raises(ExportError, match=r"morph\.CutPoint\(\).*Job\(cut_points=") as caught:
        export_job(tools.make_job(Branching, mean_loss, ITEMS))
    assert "test_marks.py:" in str(caught.value)


@pytest.mark.parametrize("names", [["9"], ["0.nothing"]])
def test_an_unknown_name_is_refused(tools: Any, names: list[str]) -> None:
    exported = export_job(tools.make_job(Chain, mean_loss, ITEMS, cut_points=names))
    with pytest.raises(JobError, match="calls the module 0 times"):
        cut(exported, num_sections=None, micro_batch_size=2)


def test_names_of_an_exportable_model_pin_its_cuts(tools: Any) -> None:
    model, loss, items = ZOO["gpt2"]
    job = tools.make_job(model, loss, items, cut_points=["transformer.h.1", "transformer.h.1.mlp"])
    exported = export_job(job)
    assert isinstance(exported, GraphJob)
    cut_model = cut(exported, num_sections=None, micro_batch_size=4)
    assert [section.label for section in cut_model.sections][1:] == ["transformer.h.1.ln_1", "transformer.h.1.mlp.c_fc"]
    batch = tools.stack(items, 4)
    expected_loss, expected = tools.run_whole(job, exported.initial_parameters, batch)
    found_loss, found = tools.run_sections(cut_model, exported.initial_parameters, batch)
    assert torch.equal(found_loss, expected_loss)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(JobError, match=r"no operation in a module of this name \(got 'transformer\.h\.9'\)"):
        cut(replace(exported, cut_points=("transformer.h.9",)), num_sections=None, micro_batch_size=1)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.cut = morph.CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = functional.gelu(layer(self.cut(x) if number in {1, 3} else x))
        return x


def test_marks_in_an_exportable_model_pin_its_cuts(tools: Any) -> None:
    exported = export_job(tools.make_job(Plain, mean_loss, ITEMS))
    assert isinstance(exported, GraphJob)
    cut_model = cut(exported, num_sections=None, micro_batch_size=2)
    assert [section.parameters for section in cut_model.sections] == [
        ("layers.0.weight", "layers.0.bias"),
        ("layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias"),
        ("layers.3.weight", "layers.3.bias"),
    ]
    assert len(cut(exported, num_sections=2, micro_batch_size=2).sections) == 2


def test_cut_points_are_checked_at_once(tools: Any) -> None:
    with pytest.raises(JobError, match="cut_points"):
        tools.make_job(Plain, mean_loss, ITEMS, cut_points="layers.1")


def place_of(text: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{__file__}:{next(number for number, line in enumerate(lines, 1) if line.endswith(text))}"


class DropsLayers(nn.Module):
    """A model in which layers are dropped at random, by code between the layers or within each."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branching() for _ in range(4))
        self.cut, self.within = morph.CutPoint(), within

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 2:
                x = self.cut(x)
            if self.within or torch.rand(()) >= 0.3:  # drops
                x = layer(x)
        return x


class DropsItself(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.3 else super().forward(x)


def test_layers_that_are_dropped_between_modules_are_refused_and_may_drop_themselves(tools: Any) -> None:
    exported = export_job(tools.make_job(lambda: DropsLayers(within=False), mean_loss, ITEMS))
    with pytest.raises(JobError, match="a random number decides between the modules, in front of a cut") as caught:
        cut(exported, num_sections=None, micro_batch_size=2)
    assert caught.value.source == place_of("# drops")
    assert len(cut(exported, num_sections=1, micro_batch_size=2).sections) == 1

    def model() -> nn.Module:
        made = DropsLayers(within=True)
        made.layers = nn.ModuleList(DropsItself() for _ in range(4))
        return made

    job = tools.make_job(model, mean_loss, ITEMS)
    exported = export_job(job)
    check_against_whole(tools, job, exported, cut(exported, num_sections=None, micro_batch_size=2), ITEMS)


class Packed(nn.Module):
    """Packed texts; the last state crosses the cut, or states padded to the longest text of the micro-batch."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.LSTM(6, 6, batch_first=True) for _ in range(2))
        self.cut, self.leave, self.last = morph.CutPoint(), Branching(), last

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, length.cpu(), batch_first=True, enforce_sorted=False)
        packed, _ = self.first(packed)
        packed, (state, _) = self.second(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
        return self.leave(self.cut(state[-1] if self.last else padded))  # cut here


SEQUENCES = [{"x": torch.randn(5, 6), "length": torch.tensor(1 + index % 5)} for index in range(8)]


def packed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"], batch["length"]).square().mean()


def test_packed_sequences_run_between_marks(tools: Any) -> None:
    job = tools.make_job(lambda: Packed(last=True), packed_loss, SEQUENCES)
    exported = export_job(job)
    model = cut(exported, num_sections=None, micro_batch_size=2)
    check_against_whole(tools, job, exported, model, SEQUENCES)
    check_against_whole(tools, job, exported, model, SEQUENCES[3:])


def run_in_sections(exported: Any, model: CutModel, batch: dict[str, Tensor]) -> Tensor:
    values: tuple[Tensor, ...] = ()
    for section in model.sections:
        own = {name: exported.initial_parameters[name] for name in section.parameters}
        values = section(values, batch, own)
    return values[0]


def test_a_border_whose_shape_changes_with_the_data_is_refused(tools: Any) -> None:
    exported = export_job(tools.make_job(lambda: Packed(last=False), packed_loss, SEQUENCES))
    model = cut(exported, num_sections=None, micro_batch_size=2)
    run_in_sections(exported, model, tools.stack(SEQUENCES, 2))
    with pytest.raises(JobError, match=r"in front of cut with a tensor of shape \[2, 4, 6\].*\[2, 2, 6\]") as caught:
        run_in_sections(exported, model, tools.stack(SEQUENCES[2:], 2))
    assert caught.value.source == place_of("# cut here")


class Perhaps(nn.Module):
    """A layer that is left out unless some samples are late."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        return self.linear(x) if late.any() else x


class Begins(nn.Module):
    """A model whose tensor at the first mark depends on a parameter only for ``late`` samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.cut = Perhaps(), nn.Linear(6, 6), morph.CutPoint()

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        return self.last(self.cut(self.first(x, late)))  # begins


class Freezes(Begins):
    """A model in which ``late`` samples thaw one parameter and freeze another."""

    def __init__(self) -> None:
        super().__init__()
        self.first.linear.requires_grad_(False)

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        self.first.linear.weight.requires_grad_(bool(late[0]))
        self.last.weight.requires_grad_(not late[1])
        return super().forward(x, late)


def late_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"], batch["late"]).square().mean()


@pytest.mark.parametrize(
    ("make", "late", "problem"),
    [
        (Begins, [True, True], "in front of cut with a tensor that depends on a parameter"),
        (Freezes, [True, False], r"requires_grad of first\.linear\.weight changes while training"),
        (Freezes, [False, True], r"requires_grad of last\.weight changes while training"),
    ],
)
def test_gradients_that_first_samples_lack_are_refused_when_they_occur(
    tools: Any, make: type[nn.Module], late: list[bool], problem: str
) -> None:
    exported = export_job(tools.make_job(make, late_loss, LATE))
    model = cut(exported, num_sections=None, micro_batch_size=2)
    parameters = {name: exported.initial_parameters[name].requires_grad_() for name in model.parameter_specs}

    def run(batch: dict[str, Tensor]) -> None:
        values: tuple[Tensor, ...] = ()
        for section in model.sections:
            values = run_section(section, values, batch, parameters).outputs

    run(tools.stack(LATE, 2))
    with pytest.raises(JobError, match=problem):
        run({"x": torch.ones(2, 6), "late": torch.tensor(late)})


class Chooses(nn.Module):
    """A model whose forward takes another branch for ``late`` samples."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (Branching() for _ in range(3))
        self.cut, self.skips = morph.CutPoint(), skips

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        x = self.first(x)
        if late.any() and self.skips:
            return x
        x = self.cut(x)
        if late.any():
            x = self.second(x)  # comes late
        return self.third(x)


LATE = [{"x": torch.randn(6), "late": torch.tensor(index > 3)} for index in range(8)]


@pytest.mark.parametrize(
    ("skips", "problem", "place"),
    [
        (False, r"does not hold this module's parameters: with the first samples .* \(got 'second'\)", "# comes late"),
        (True, "reaches the cut in front of cut not at all, unlike with the first samples", "x = self.cut(x)"),
    ],
)
def test_a_branch_that_first_samples_lack_is_refused_when_taken(
    tools: Any, skips: bool, problem: str, place: str
) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"], batch["late"]).square().mean()

    exported = export_job(tools.make_job(lambda: Chooses(skips), loss, LATE))
    model = cut(exported, num_sections=None, micro_batch_size=2)
    run_in_sections(exported, model, tools.stack(LATE, 2))
    with pytest.raises(JobError, match=problem) as caught:
        run_in_sections(exported, model, tools.stack(LATE[4:], 2))
    found = str(caught.value.source)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert found.startswith(f"{__file__}:")
    assert lines[int(found.rpartition(":")[2]) - 1].endswith(place)


PLAIN_CALL = nn.Module.__call__
STRANGER = nn.Linear(6, 6)


class Watching(Marked):
    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        assert nn.Module.__call__ is PLAIN_CALL
        assert STRANGER._compiled_call_impl is None
        return super().forward(x, keep)


def test_a_marked_run_changes_no_module_but_its_own(tools: Any) -> None:
    """Another thread may be training another model in this process at the same time."""
    exported = export_job(tools.make_job(Watching, marked_loss, ITEMS))
    assert isinstance(exported, MarkedJob)
    model = cut(exported, num_sections=None, micro_batch_size=3)
    check_against_whole(tools, tools.make_job(Watching, marked_loss, ITEMS), exported, model, ITEMS)

"""Each refusal says what is wrong, where it is in the user's file, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.utils.data import DataLoader, IterableDataset

import morph
from morph.contract.errors import ExportError, InputError, JobError
from morph.cutting import cut, export_job
from morph.cutting.cuts.report import report_cuts
from morph.preflight.plain_comparison import QUICK_FLOPS, Limits, compare_with_plain

ITEMS = [{"x": torch.randn(6, generator=torch.Generator().manual_seed(index))} for index in range(8)]
HERE = Path(__file__)
LIMITS = Limits(1 << 30, QUICK_FLOPS, torch.device("cpu"))


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)


class NeedsEight(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).view(2, -1, 24).reshape(8, 6))  # needs eight


class FixesTheBatch(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.view(3, 2, 3)  # fixes three
        return self.second(x.flatten(1))


class AsksForTheBatch(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.shape[0] > 2:  # asks for the number
            x = x * 2
        return self.second(x)


class Weighs(Layers):
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.second(self.first(x) * weights)  # as many weights as samples


class Attends(nn.Module):
    """torch's own decoder, encoder or both, under a causal mask; ``hints`` are their further arguments."""

    def __init__(self, kind: str, **hints: bool) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": True}
        self.kind, self.hints = kind, hints
        if kind == "decoder":
            self.inner: nn.Module = nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2, **sizes), 2)
        elif kind == "encoder":
            layer = nn.TransformerEncoderLayer(6, 2, **sizes)
            self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        else:
            self.inner = nn.Transformer(6, 2, num_encoder_layers=2, num_decoder_layers=2, **sizes)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, None, :] * torch.arange(1, 5)[None, :, None]
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        if self.kind == "encoder":
            y = self.inner(h, mask=mask, **self.hints)  # compares the mask of encoder
        elif self.kind == "decoder":
            y = self.inner(h, h, tgt_mask=mask, **self.hints)  # compares the mask of decoder
        else:
            y = self.inner(h, h, src_mask=mask, tgt_mask=mask, **self.hints)  # compares the mask of transformer
        return y[:, -1]


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * 2 if y.sum().item() > 1e9 else y  # decides


class Freezes(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.first.requires_grad_(False)  # freezes
        return self.second(self.first(x))


class Thaws(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.second.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.second.weight.requires_grad = True  # thaws
        return self.second(self.first(x))


class FreezesForAWhile(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.second.weight.requires_grad_(False)  # for a while
        x = self.second(self.first(x))
        self.second.weight.requires_grad_()
        return self.second(x)


@pytest.mark.parametrize(
    ("model", "place", "name"),
    [
        (Freezes, "# freezes", "first.weight"),
        (Thaws, "# thaws", "second.weight"),
        (FreezesForAWhile, "# for a while", "second.weight"),
    ],
)
def test_a_forward_that_freezes_or_thaws_is_refused_at_its_line(
    tools: Any, model: type[nn.Module], place: str, name: str
) -> None:
    found = refusal(tools, model)
    assert found.message == f"requires_grad of {name} changes while training"
    assert found.source == place_of(place)


def test_a_complex_loss_is_refused(tools: Any) -> None:
    def complex_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return torch.view_as_complex(model(batch["x"]).view(-1, 3, 2)).mean()

    with pytest.raises(JobError, match=r": loss: is complex \(got 'torch.complex64'\); allowed: a real number"):
        export_job(tools.make_job(lambda: nn.Linear(6, 6), complex_loss, ITEMS))


def unflattened() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Unflatten(0, (3, 1)), nn.Flatten())


def place_of(text: str) -> str:
    lines = HERE.read_text(encoding="utf-8").splitlines()
    return f"{HERE}:{next(number for number, line in enumerate(lines, 1) if line.endswith(text))}"


def refusal(tools: Any, model: Callable[[], nn.Module], **fields: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        cut(export_job(tools.make_job(model, mean_loss, ITEMS, **fields)), num_sections=None, micro_batch_size=2)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("model", "place", "reason"),
    [
        (FixesTheBatch, "# fixes three", "it fixes the number of samples in a micro-batch"),
        (AsksForTheBatch, "# asks for the number", "it does one thing for some numbers of samples in a micro-batch"),
        (lambda: nn.Sequential(Deciding(), Deciding()), "# decides", "control flow or a shape depends on values"),
        (unflattened, ".square().mean()", "it fixes the number of samples in a micro-batch, in a Unflatten"),
    ],
)
def test_an_error_about_the_number_of_samples_names_its_line(
    tools: Any, model: Callable[[], nn.Module], place: str, reason: str
) -> None:
    found = refusal(tools, model)
    assert found.source == place_of(place)
    assert reason in found.message


def test_len_in_a_loss_is_reported_at_the_losss_own_line(tools: Any) -> None:
    """The model has its own condition, which holds for every number: two entries have as many samples."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        y = model(batch["x"], batch["weights"])
        return y.square().sum() / len(y)  # takes len

    items = [item | {"weights": torch.ones(1)} for item in ITEMS]
    with pytest.raises(ExportError, match=r"fixes the number of samples.*tensor\.shape\[0\].*not from len") as caught:
        export_job(tools.make_job(Weighs, loss, items))
    assert caught.value.source == place_of("# takes len")


@pytest.mark.parametrize(
    ("kind", "remedies"),
    [
        ("decoder", {"tgt_is_causal": True}),
        ("encoder", {"is_causal": True}),
        ("transformer", {"src_is_causal": True, "tgt_is_causal": True}),
    ],
)
def test_a_mask_that_torch_compares_is_refused_with_a_remedy_that_works(
    tools: Any, kind: str, remedies: dict[str, bool]
) -> None:
    given: dict[str, bool] = {}
    for remedy in remedies:  # each refusal names the next one
        found = refusal(tools, lambda: Attends(kind, **given))
        assert found.source == place_of(f"# compares the mask of {kind}")
        assert f"{remedy}" in str(found.allowed)
        given[remedy] = True
    job = tools.make_job(lambda: Attends(kind, **given), mean_loss, ITEMS)
    assert compare_with_plain(job, export_job(job), 2, LIMITS).largest < 1e-5


def test_a_shape_that_fits_only_another_number_of_samples_is_reported(tools: Any) -> None:
    found = refusal(tools, NeedsEight, batch_size=8)
    assert found.source == place_of("# needs eight")
    assert "fails with 3 samples, but not with 8: the number of samples is written into the model" in found.message
    assert "invalid for input of size 18" in found.message
    assert "tensor.shape[0]" in str(found.allowed)


def test_a_loss_that_fails_with_any_number_is_reported_as_it_is(tools: Any) -> None:
    with pytest.raises(JobError, match=r"loss failed: RuntimeError: shape '\[7, 5\]' is invalid"):
        export_job(tools.make_job(Deciding, lambda model, batch: model(batch["x"].view(7, 5)).mean(), ITEMS))


def test_an_error_in_a_sequential_model_names_the_line_that_builds_it(tools: Any) -> None:
    exported = export_job(tools.make_job(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), mean_loss, ITEMS))
    assert exported.model_line.startswith(f"{HERE}:")
    report = report_cuts(exported, cut(exported, num_sections=3, micro_batch_size=2))
    assert {section.source for section in report.sections} == {None}


def test_an_operation_in_torchs_module_is_reported_by_the_building_line(tools: Any) -> None:
    def picks(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"][batch["x"][:, 0] > 0]).sum()

    job = tools.make_job(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU()), picks, ITEMS)
    with pytest.raises(ExportError, match="size that depends on the data") as caught:
        export_job(job)
    assert str(caught.value.source).startswith(f"{HERE}:")


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (lambda a, b: (a, b), r"loss: returns several losses \(got 2\); allowed: .* such as their sum.* \(GAN\)"),
        (lambda a, b: [a, b, a], r"returns several losses \(got 3\)"),
        (lambda a, b: (a, [b]), r"returns something other than a dict of metrics \(got 'list'\)"),
        (lambda a, b: {"loss": a}, r"does not return a scalar \(got 'dict'\)"),
        (lambda a, b: None, r"does not return a scalar \(got 'NoneType'\)"),
    ],
)
def test_invalid_losses_with_metrics_are_refused(
    tools: Any, result: Callable[[Tensor, Tensor], Any], problem: str
) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return result(model.first(batch["x"]).mean(), model.second(batch["x"]).mean())

    with pytest.raises(JobError, match=problem):
        export_job(tools.make_job(Layers, loss, ITEMS))


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        return iter(ITEMS)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (Stream, r"returns an IterableDataset of unknown length \(got 'Stream'\); allowed: morph.data.streams"),
        (lambda: DataLoader(ITEMS, batch_size=2), r"returns a DataLoader; Morph forms the batches itself"),
        (lambda: iter(ITEMS), r"does not return a data set \(got 'list_iterator'\)"),
        (lambda: None, r"does not return a data set \(got 'NoneType'\)"),
    ],
)
def test_data_sets_that_are_not_map_style_are_refused(tools: Any, make: Callable[[], Any], problem: str) -> None:
    job = morph.Job(
        name="streamed", model=Deciding, loss=mean_loss, dataset=make, optimizer=lambda p: None, batch_size=4
    )
    with pytest.raises(JobError, match=f": dataset: {problem}"):
        export_job(job)


class Words(nn.Module):
    """An embedding; with ``decides``, torch.export refuses it."""

    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6, sparse=True)
        self.cut, self.linear, self.decides = morph.CutPoint(), nn.Linear(6, 4), decides

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(self.words(x))
        if self.decides and x.sum() > 1e9:
            x = x * 2
        return self.linear(x)


@pytest.mark.parametrize("decides", [False, True])
def test_gradients_of_a_sparse_embedding_come_out_dense(
    tools: Any, decides: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from morph.runtime.step.stage import run_section, section_backward

    items = [{"x": torch.tensor([index, (index + 1) % 8])} for index in range(8)]
    job = tools.make_job(lambda: Words(decides), mean_loss, items)
    exported = export_job(job)
    assert capsys.readouterr().err == "", "torch prints the graph of a model that it refuses"
    model = cut(exported, num_sections=2, micro_batch_size=4)
    batch = tools.stack(items, 4)
    _, expected = tools.run_whole(job, exported.initial_parameters, batch)
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in exported.initial_parameters.items()}
    first = run_section(model.sections[0], (), batch, parameters)
    second = run_section(model.sections[1], first.outputs, batch, parameters)
    found: dict[str, Tensor] = {}
    back = section_backward(model.sections[1], second, (torch.ones(()),), parameters, found.__setitem__)
    section_backward(model.sections[0], first, back, parameters, found.__setitem__)
    assert expected["words.weight"].is_sparse
    assert torch.equal(found["words.weight"], expected["words.weight"].to_dense())
    assert torch.equal(found["linear.weight"], expected["linear.weight"])


def test_errors_only_with_real_numbers_are_reported_with_line_before_training(tools: Any) -> None:
    from morph.preflight.mean_loss import loss_warnings
    from morph.tracing import check_dependencies

    items = [{"x": item["x"].double()} for item in ITEMS]
    job = tools.make_job(Layers, lambda model, batch: model.second(model.first(batch["x"])).mean(), items)
    for look in (loss_warnings, check_dependencies):
        with pytest.raises(
            JobError, match=r"loss failed: RuntimeError: mat1 and mat2 must have the same dtype"
        ) as caught:
            look(job)
        assert str(caught.value.source).startswith(f"{HERE}:")


def penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    return grad(model(x).sum(), x, create_graph=True)[0].square().mean()  # takes a gradient


def tangent(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return torch.func.jvp(model, (batch["x"],), (batch["x"],))[1].square().mean()  # transforms


def each(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:  # maps
    return torch.func.vmap(model)(batch["x"]).square().mean()


def number(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    loss = mean_loss(model, batch)
    return loss, {"loss": torch.tensor(loss.item())}  # takes a number


def number_itself(model: nn.Module, batch: dict[str, Tensor]) -> Any:  # returns a number
    loss = mean_loss(model, batch)
    return loss, {"loss": float(loss)}


def on_a_gpu(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return mean_loss(model.cuda(), batch)  # wants a GPU


@pytest.mark.parametrize(
    ("loss", "place", "problem"),
    [
        (penalty, "# takes a gradient", r"takes \(torch.autograd.grad\) is not traced; .* Job\(num_sections=1\)"),
        (tangent, "# transforms", r"torch.func \(grad, vmap, jacrev, jvp\) in the forward or the loss is not traced"),
        (each, "# maps", r"torch.func \(grad, vmap, jacrev, jvp\) in the forward or the loss is not traced"),
        (
            number,
            "# takes a number",
            r"taken out of a tensor \(.item\(\), float\(\), int\(\)\) is not traced; .*a metric",
        ),
        (number_itself, "# returns a number", r"metric 'loss' is not a scalar \(got '.*'\); .* without .item\(\)"),
        pytest.param(
            *(on_a_gpu, "# wants a GPU", r"asks for a CUDA device, and this machine has none; allowed: .*on the CPU"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one"),
        ),
    ],
)
def test_operations_invisible_to_a_trace_are_refused_with_their_line(
    tools: Any, loss: Any, place: str, problem: str
) -> None:
    model = nn.Sequential
    with pytest.raises(InputError, match=problem) as caught:
        export_job(tools.make_job(lambda: model(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), loss, ITEMS))
    assert caught.value.source == place_of(place)


class Held(Layers):
    """A model with a parameter that no section can hold."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.held = nn.Parameter(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.held.sum()


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(6)), r"1.weight has no shape .* \(got 'LazyLinear'\)"),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.LazyBatchNorm1d()), r"1.weight has no shape before"),
        (lambda: Held(torch.zeros(2, device="meta")), r"held is on a device .* \(got 'meta'\); allowed: .* the CPU"),
        (lambda: Held(torch.zeros(2).to(torch.float8_e4m3fn)), r"held is of a type .* 'torch.float8_e4m3fn'"),
        pytest.param(
            *(lambda: Held(torch.zeros(2, device="cuda")), r"held is on a device that it cannot be built on"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one"),
        ),
    ],
)
def test_a_model_of_a_kind_that_no_section_can_hold_is_refused(tools: Any, model: Any, problem: str) -> None:
    with pytest.raises(JobError, match=f"test_refusals.py:.*: model: {problem}"):
        export_job(tools.make_job(model, mean_loss, ITEMS))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_model_that_torch_jit_compiled_is_refused(tools: Any) -> None:
    with pytest.raises(JobError, match=r"is compiled by torch.jit \(got 'RecursiveScriptModule'\)"):
        export_job(tools.make_job(lambda: torch.jit.script(nn.Linear(6, 6)), mean_loss, ITEMS))


def test_a_lazy_layer_that_the_constructor_runs_once_is_traced(tools: Any) -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 6))
        made(torch.zeros(1, 6))
        return made

    exported = export_job(tools.make_job(model, mean_loss, ITEMS))
    assert exported.initial_parameters.specs["0.weight"] == ((6, 6), torch.float32)


def test_an_error_whose_text_cannot_be_made_is_still_reported(tools: Any) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise Silent

    with pytest.raises(JobError, match="loss failed: Silent: no message"):
        export_job(tools.make_job(Layers, loss, ITEMS))


def test_a_loss_that_runs_backward_itself_is_refused(tools: Any) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        value: Tensor = model.first(batch["x"]).mean()
        value.backward(retain_graph=True)
        return value

    with pytest.raises(JobError, match="the loss runs backward itself"):
        export_job(tools.make_job(Layers, loss, ITEMS))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"optimizer": lambda model: torch.optim.SGD(model.parameters())}, "optimizer failed: AttributeError: 'list'"),
        ({"lr_scheduler": lambda optimizer: 1 / 0}, "lr_scheduler failed: ZeroDivisionError"),
    ],
)
def test_the_error_of_an_optimizer_or_schedule_names_its_line(tools: Any, fields: dict[str, Any], problem: str) -> None:
    from dataclasses import replace

    from morph.runtime.workloads.job_workload import check_training

    job = replace(tools.make_job(lambda: nn.Linear(6, 6), mean_loss, ITEMS), **fields)
    with pytest.raises(JobError, match=problem) as caught:
        check_training(job, cut(export_job(job), num_sections=1, micro_batch_size=1))
    assert str(caught.value.source).startswith(f"{HERE}:")


def test_sparse_samples_are_refused(tools: Any) -> None:
    items = [{"x": torch.eye(6)[index % 6].to_sparse()} for index in range(8)]
    with pytest.raises(JobError, match=r"is not a sample \(got \"'x': torch.sparse_coo\"\); allowed: .* dense tensors"):
        export_job(tools.make_job(Layers, mean_loss, items))

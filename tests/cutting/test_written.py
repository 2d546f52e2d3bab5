"""Buffers that the forward writes: what is accepted, where it is kept, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from morph.contract.errors import ExportError, JobError
from morph.cutting import cut, export_job

pytestmark = pytest.mark.slow

ITEMS = [{"x": torch.randn(6, generator=torch.Generator().manual_seed(index))} for index in range(8)]


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.register_buffer("kept", torch.ones(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.plain = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.change(self.begin(x)))

    def begin(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def end(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(x)))

    def change(self, x: Tensor) -> Tensor:
        return x


class Extreme(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        self.kept.copy_(torch.maximum(self.kept, x.detach().amax(0)))  # here
        return self.end(x)


class Queue(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        with torch.no_grad():
            self.kept[(self.count + torch.arange(x.shape[0])) % 6] = x[:, 0]  # here
            self.count += 1
        return self.end(x)


class CountsSamples(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        self.count += x.shape[0]  # here
        return self.end(x)


class CountsHits(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        self.count += (x > 0).sum()  # here
        return self.end(x)


class Ratio(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        with torch.no_grad():
            self.kept.div_(x.mean(0).exp())  # here
        return self.end(x)


class AssignsExtreme(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        self.kept = torch.maximum(self.kept, x.detach().amax(0))  # here
        return self.end(x)


class AssignsExtremeWithoutGradient(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        with torch.no_grad():
            new = 0.5 * torch.maximum(self.kept, x.amax(0))  # here
        self.kept = new
        return self.end(x)


REFUSED = [
    (Extreme, "buffer kept in a way that depends on how the batch is divided"),
    (Queue, "buffer kept in a way that depends on how the batch is divided"),
    (CountsSamples, "buffer count in a way that depends on how the batch is divided"),
    (CountsHits, "buffer count in a way that depends on how the batch is divided"),
    (Ratio, "buffer kept in a way that depends on how the batch is divided"),
    (AssignsExtremeWithoutGradient, "buffer kept in a way that depends on how the batch is divided"),
    (AssignsExtreme, "buffer kept in a way that depends on how the batch is divided"),
]


class ClampsWeights(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        with torch.no_grad():
            self.second.weight.clamp_(-0.1, 0.1)  # here
        return self.end(x)


class WritesAnAttribute(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        self.plain.add_(1)  # here
        return self.end(x + self.plain)


class ChangesAnActivation(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        with torch.no_grad():
            x.mul_(0.5)  # here
        return self.end(x)


OTHERWISE_REFUSED = [
    (ClampsWeights, "the forward changes parameter second.weight"),
    (WritesAnAttribute, "the forward changes a tensor that existed before"),
    (ChangesAnActivation, "changes an activation in place inside torch.no_grad()"),
]


def line_here(module: type) -> str:
    lines, start = inspect.getsourcelines(module)
    return f"{inspect.getsourcefile(module)}:{start + next(i for i, line in enumerate(lines) if '# here' in line)}"


@pytest.mark.parametrize(("model", "problem"), REFUSED + OTHERWISE_REFUSED)
def test_a_change_that_depends_on_the_shape_is_refused_with_its_line(tools: Any, model: type, problem: str) -> None:
    with pytest.raises((JobError, ExportError)) as caught:
        export_job(tools.make_job(model, mean_loss, ITEMS))
    assert problem in str(caught.value)
    assert str(caught.value).startswith(line_here(model))
    assert caught.value.allowed


def test_batch_norm_with_a_cumulative_average_is_refused_by_name(tools: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None))

    with pytest.raises(JobError, match=r"1 averages its statistics over all batches.*momentum=None.*momentum=0\.1"):
        export_job(tools.make_job(model, mean_loss, ITEMS))


class Statistics(Layers):
    """A model with all kinds of accepted changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.BatchNorm1d(6).requires_grad_(False).eval()
        self.register_buffer("also_kept", self.kept)
        self.register_buffer("assigned", torch.zeros(6))
        for name, parameter in list(self.named_parameters()):
            if parameter.dim() == 2:
                self.register_buffer(f"slow_{name.replace('.', '_')}", 0.5 * parameter.detach())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    self.get_buffer(f"slow_{name.replace('.', '_')}").lerp_(parameter, 0.1)
        return super().forward(x)

    def change(self, x: Tensor) -> Tensor:
        x = self.frozen(self.norm(x))
        with torch.no_grad():
            self.kept.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.count += 1
            self.assigned = 0.5 * self.assigned + 0.5 * x.var(0)
        return x - self.also_kept + self.assigned


def written_by_sections(cut_model: Any, initial: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    values: tuple[Tensor, ...] = ()
    for section in cut_model.sections:
        results = section(values, batch, {name: initial[name] for name in initial})
        values = results[: len(section.outputs)]
        found |= dict(zip(section.writes, results[len(section.outputs) :], strict=True))
    return found


@pytest.mark.parametrize("num_sections", [1, 2, 3, 5])
def test_a_forward_in_sections_writes_what_the_model_writes(tools: Any, num_sections: int) -> None:
    job = tools.make_job(Statistics, mean_loss, ITEMS)
    exported = export_job(job)
    cut_model = cut(exported, num_sections=num_sections, micro_batch_size=4)
    batch = tools.stack(ITEMS, 4)
    expected_loss, expected = tools.run_whole(job, exported.initial_state, batch)
    loss, gradients = tools.run_sections(cut_model, exported.initial_state, batch)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    model = tools.build_whole(job, exported.initial_state)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        model(batch["x"])
    changed = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    written = written_by_sections(cut_model, exported.initial_state, batch)
    assert written.keys() == changed == set(cut_model.buffer_specs)
    assert all(torch.equal(written[name], model.get_buffer(name)) for name in changed)


def assigned_alone(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model.kept = 0.9 * model.kept + 0.1 * x.mean(0)


def assigned_outside(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        new = 0.9 * model.kept + 0.1 * x.mean(0)
    model.kept = new


def copied_outside(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        new = 0.9 * model.kept + 0.1 * x.mean(0)
    model.kept.copy_(new)


@torch.no_grad()
def in_a_function(model: Any, x: Tensor) -> None:
    model.kept = torch.lerp(model.kept, x.mean(0), 0.1)


def one_within_another(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        statistic = x.mean(0)
    with torch.no_grad():
        old = model.kept * 0.9
        with torch.inference_mode(False), torch.no_grad():
            model.kept = old + 0.1 * statistic


class Averages(Layers):
    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.write = write

    def change(self, x: Tensor) -> Tensor:
        self.write(self, x)
        return x - self.kept


@pytest.mark.parametrize("write", [assigned_alone, assigned_outside, copied_outside, in_a_function, one_within_another])
def test_an_average_is_one_however_it_is_written_down_without_gradients(tools: Any, write: Any) -> None:
    job = tools.make_job(lambda: Averages(write), mean_loss, ITEMS)
    exported = export_job(job)
    cut_model = cut(exported, num_sections=2, micro_batch_size=4)
    batch = tools.stack(ITEMS, 4)
    expected_loss, expected = tools.run_whole(job, exported.initial_state, batch)
    loss, gradients = tools.run_sections(cut_model, exported.initial_state, batch)
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    model = tools.build_whole(job, exported.initial_state)
    model(batch["x"])
    assert torch.equal(written_by_sections(cut_model, exported.initial_state, batch)["kept"], model.kept)


def test_initial_buffers_are_those_of_the_constructor_although_the_model_was_tried(tools: Any) -> None:
    initial = export_job(tools.make_job(Statistics, mean_loss, ITEMS)).initial_buffers
    assert int(initial["count"]) == int(initial["norm.num_batches_tracked"]) == 0
    assert torch.equal(initial["kept"], torch.ones(6))
    assert torch.equal(initial["assigned"], torch.zeros(6))


def test_an_average_of_a_weight_is_kept_where_the_weight_is_used(tools: Any) -> None:
    """All averages are updated in the first line of the forward."""
    model = cut(export_job(tools.make_job(Statistics, mean_loss, ITEMS)), num_sections=3, micro_batch_size=4)
    unit_of = {name: unit.id for unit in model.units for name in unit.names}
    assert unit_of["first.weight"] != unit_of["third.weight"]
    for layer in ("first", "second", "third"):
        assert unit_of[f"slow_{layer}_weight"] == unit_of[f"{layer}.weight"]


class ReadsWithoutGradient(Layers):
    """A model that writes into a view, which makes torch rewrite the whole graph."""

    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.square().mean(1, keepdim=True)
            self.kept.mul_(0.5).add_(x.mean(0))
        out = torch.zeros_like(x)
        out[:, :3] = x[:, 3:] * scale
        return out + self.kept


def test_code_without_gradients_stays_so_when_the_graph_is_rewritten(tools: Any) -> None:
    job = tools.make_job(ReadsWithoutGradient, mean_loss, ITEMS)
    exported = export_job(job)
    batch = tools.stack(ITEMS, 4)
    expected_loss, expected = tools.run_whole(job, exported.initial_state, batch)
    cut_model = cut(exported, num_sections=2, micro_batch_size=4)
    loss, gradients = tools.run_sections(cut_model, exported.initial_state, batch)
    torch.testing.assert_close((loss, gradients), (expected_loss, expected))
    written = written_by_sections(cut_model, exported.initial_state, batch)
    model = tools.build_whole(job, exported.initial_state)
    model(batch["x"])
    torch.testing.assert_close(written, {"kept": model.kept}, check_device=False)


def test_a_model_that_changes_its_batch_gives_the_loss(tools: Any) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return mean_loss(model, {"x": batch["x"].mul_(2.0)})

    job = tools.make_job(Layers, loss, ITEMS)
    exported = export_job(job)
    expected_loss, _ = tools.run_whole(job, exported.initial_state, tools.stack(ITEMS, 4))
    found, _ = tools.run_sections(
        cut(exported, num_sections=1, micro_batch_size=4), exported.initial_state, tools.stack(ITEMS, 4)
    )
    assert torch.equal(found, expected_loss)


class ReallyBuilt(Statistics):
    def __init__(self) -> None:
        super().__init__()
        self.scale = float(self.first.weight.detach().numpy().sum())


def test_a_model_that_cannot_be_recorded_begins_with_its_constructors_buffers(tools: Any) -> None:
    exported = export_job(tools.make_job(ReallyBuilt, mean_loss, ITEMS))
    assert exported.not_recorded is not None
    assert int(exported.initial_buffers["count"]) == 0
    assert torch.equal(exported.initial_buffers["assigned"], torch.zeros(6))
    assert set(exported.initial_buffers) == set(
        export_job(tools.make_job(Statistics, mean_loss, ITEMS)).initial_buffers
    )

"""A loop of one worker and a plain loop over the same batches: parameters of every kind, schedules and clipping."""

from __future__ import annotations

import copy
import logging
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, StepLR

from morph.contract.errors import InputError
from morph.data.order import sample_indices
from morph.elastic.mini_batches import batches, loss_warnings
from morph.elastic.optimizer import Optimizer
from morph.elastic.settings import difference
from morph.elastic.state import TrainingState
from morph.elastic.sums import Accumulation
from morph.losses import cross_entropy
from morph.optimizers import Optimizers

NUM_STEPS, BATCH = 8, 12


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples with positions, of which ``num_labels`` have a label."""

    def __init__(self, num_labels: int = 0) -> None:
        self.num_labels = num_labels

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(*([self.num_labels] if self.num_labels else []), 8, generator=generator)
        labels = torch.randint(0, 4, inputs.shape[:-1], generator=generator)
        if self.num_labels:
            labels[1 + index % self.num_labels :] = -100
        return inputs, labels


class Net(nn.Module):
    """Has every kind of parameter that a plain sum of dense, real gradients would get wrong."""

    def __init__(self, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.phase = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(16, dtype=torch.complex128))
        self.expert = nn.Linear(16, 16)
        self.codes = nn.Embedding(6, 16, sparse=is_sparse)
        self.head, self.unused = nn.Linear(16, 4), nn.Linear(4, 4)
        self.register_buffer("turned", torch.zeros(16, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs).relu()
        spectrum = torch.fft.fft(hidden) * self.phase
        hidden = (torch.fft.ifft(spectrum).real + (hidden * self.wide).real.float()).tanh()
        if float(inputs[..., 0].max()) > 1.3:  # no share of some batches uses it
            hidden = hidden + self.expert(hidden)
        hidden = hidden + self.codes((inputs[..., 0].abs() * 2).long().clamp(max=5))
        logits: Tensor = self.head(hidden)
        return logits


Change = Callable[[Net, torch.optim.Optimizer, int], None]


def unchanged(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def frozen_and_thawed(net: Net, _: torch.optim.Optimizer, step: int) -> None:
    net.body.requires_grad_(step < 3 or step == 5)
    net.phase.requires_grad_(step >= 2)


def added(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 0:
        removed = {id(one) for one in net.body.parameters()}
        (group,) = optimizer.param_groups
        group["params"] = [one for one in group["params"] if id(one) not in removed]
    if step == 3:
        optimizer.add_param_group({"params": list(net.body.parameters()), "lr": 0.03})


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.5)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def step_lr(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=3, gamma=0.3)


def loss_of(net: nn.Module, share: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(net(share[0]), share[1])


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the ring of a test: this process runs further tests."""
    begun: list[Optimizer] = []
    begin = Optimizer.__init__

    def keep(self: Optimizer, *given: Any, **options: Any) -> None:
        begin(self, *given, **options)
        begun.append(self)

    monkeypatch.setattr(Optimizer, "__init__", keep)
    yield
    for one in begun:
        one.finish()


def plain_loop(
    net: Net,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    change: Change = unchanged,
    *,
    lr_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    clip_grad_norm: float | None = None,
) -> None:
    optimizer, data = make(net), Data()
    scheduler = None if lr_scheduler is None else lr_scheduler(optimizer)
    for step in range(NUM_STEPS):
        change(net, optimizer, step)
        rows = [data[int(index)] for index in sample_indices(0, step, BATCH, len(data))]
        optimizer.zero_grad()
        for row in range(0, BATCH, 4):  # in shares: which samples the expert sees is part of the model
            inputs, labels = zip(*rows[row : row + 4], strict=True)
            (loss_of(net, (torch.stack(inputs), torch.stack(labels))) / 3).backward()  # type: ignore[no-untyped-call]
        if clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip_grad_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def elastic_loop(
    net: Net, make: Callable[[nn.Module], torch.optim.Optimizer], change: Change = unchanged, **options: Any
) -> Optimizer:
    inner = make(net)
    optimizer = Optimizer(inner, net, **options)
    for step, _ in enumerate(batches(Data(), global_batch=BATCH, share_size=4, num_steps=NUM_STEPS)):
        change(net, inner, step)
        optimizer.step(lambda share: loss_of(net, share))
    return optimizer


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=0, atol=1e-6, msg=name)


LOOPS: dict[str, tuple[Any, Change, dict[str, Any]]] = {
    "of every kind": (adamw, unchanged, {}),
    "in floating point": (sgd, unchanged, {"accumulation": "fast"}),
    "by sma": (sgd, unchanged, {"sync": "sma"}),
    "by ad-psgd": (adamw, unchanged, {"sync": "ad-psgd"}),
    "frozen and thawed": (sgd, frozen_and_thawed, {}),
    "frozen and thawed, by ad-psgd": (sgd, frozen_and_thawed, {"sync": "ad-psgd"}),
    "added": (adamw, added, {}),
    "clipped": (sgd, unchanged, {"clip_grad_norm": 0.3}),
    "measured, and clipped by nothing": (sgd, unchanged, {"clip_grad_norm": float("inf")}),
    "with a schedule": (sgd, unchanged, {"lr_scheduler": step_lr}),
}


@pytest.mark.parametrize("case", LOOPS)
def test_parameters_are_those_of_a_plain_loop(case: str) -> None:
    make, change, options = LOOPS[case]
    torch.manual_seed(0)
    net = Net()
    plain, before = copy.deepcopy(net), copy.deepcopy(net)
    plain_loop(
        plain, make, change, **{key: options[key] for key in ("lr_scheduler", "clip_grad_norm") if key in options}
    )
    optimizer = elastic_loop(net, make, change, **options)
    assert_equal(net, plain)
    assert bool(optimizer.gradient_norm) == ("clip_grad_norm" in options)
    moved = {name for name, value in net.named_parameters() if bool((value != before.get_parameter(name)).any())}
    assert moved == {name for name, _ in net.named_parameters()} - {"unused.weight", "unused.bias"}
    assert bool((net.phase.imag != before.phase.imag).any())


class Sentences(Data):
    """Sequences with and without labels: none from ``BATCH`` to twice ``BATCH``, in the order of ``by_token``."""

    def __init__(self) -> None:
        super().__init__(num_labels=5)
        self.empty = set(sample_indices(0, 1, BATCH, len(self)).tolist())

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, labels = super().__getitem__(index)
        if index in self.empty or index % 3 == 0:
            labels.fill_(-100)
        return inputs, labels


@pytest.mark.parametrize("options", [{}, {"accumulation": "fast"}, {"clip_grad_norm": 0.3}, {"sync": "sma"}])
def test_a_mean_over_labels_is_that_of_a_plain_loop_over_whole_batches(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    plain, data = copy.deepcopy(net), Sentences()
    inner, expected = sgd(plain), []
    for step in range(3):
        rows = [data[int(index)] for index in sample_indices(0, step, BATCH, len(data))]
        inputs, labels = (torch.stack(part) for part in zip(*rows, strict=True))
        loss = functional.cross_entropy(plain(inputs).flatten(0, 1), labels.flatten())
        expected.append(loss.item())
        if step != 1:  # no sample of this step has labels
            inner.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if "clip_grad_norm" in options:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), options["clip_grad_norm"])
            inner.step()
    optimizer = Optimizer(sgd(net), net, **options)
    with caplog.at_level(logging.INFO, "morph.elastic"):
        found = [
            optimizer.step(lambda share: cross_entropy(net(share[0]), share[1]))
            for _ in batches(data, global_batch=BATCH, share_size=4, num_steps=3)
        ]
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert_equal(net, plain)
    assert [record.message for record in caplog.records if "has a weight" in record.message] == [
        "step 1: nothing in it has a weight, so parameters stay as they are"
    ]
    assert not [record for record in caplog.records if "the sum of" in record.message or "the mean" in record.message]


@pytest.mark.parametrize("accumulation", ["exact", "fast"])
def test_gradients_of_embeddings_may_be_sparse(accumulation: Accumulation) -> None:
    """Sums are dense, which is the same if the optimizer leaves rows without a gradient as they are."""
    torch.manual_seed(0)
    net = Net(is_sparse=True)
    plain = copy.deepcopy(net)

    def make(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.1)

    plain_loop(plain, make)
    elastic_loop(net, make, accumulation=accumulation)
    assert_equal(net, plain)


def test_gradients_are_clipped_by_hand_in_a_hook_of_the_optimizer() -> None:
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    plain_loop(plain, sgd, clip_grad_norm=0.3)

    def make(net: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(net)
        optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3) and None)
        return optimizer

    elastic_loop(net, make)
    assert_equal(net, plain)


def backward_before(net: Net, _: Optimizer, scheduler: LRScheduler) -> None:
    loss_of(net, (torch.ones(2, 8), torch.zeros(2, dtype=torch.long))).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def scheduler_stepped(net: Net, optimizer: Optimizer, scheduler: LRScheduler) -> None:
    if optimizer.num_steps == 1:
        scheduler.step()


def layer_replaced(net: Net, optimizer: Optimizer, scheduler: LRScheduler) -> None:
    net.head = nn.Linear(16, 4)


def stranger_added(net: Net, optimizer: Optimizer, scheduler: LRScheduler) -> None:
    scheduler.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (backward_before, r"has a gradient before step\(\), which would ignore it.*clip_grad_norm="),
        (scheduler_stepped, "lr_scheduler: was stepped by the loop; allowed: no scheduler.step"),
        (layer_replaced, "model: has other parameters than before"),
        (stranger_added, "optimizer: has a parameter that is not the model's"),
    ],
)
def test_changes_between_steps_are_honoured_or_refused(between: Any, said: str) -> None:
    net = Net()
    inner = sgd(net)
    scheduler = step_lr(inner)
    optimizer = Optimizer(inner, net, lr_scheduler=scheduler)

    def loop() -> None:
        for _ in batches(Data(), global_batch=BATCH, num_steps=2):
            between(net, optimizer, scheduler)
            optimizer.step(lambda share: loss_of(net, share))

    with pytest.raises(InputError, match=said):
        loop()


@pytest.mark.parametrize(
    ("between", "is_warned"),
    [
        (lambda net, _: torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0), True),
        (lambda net, _: [one.grad.div_(8.0) for one in net.parameters() if one.grad is not None], True),
        (lambda net, optimizer: optimizer.zero_grad(), False),
        (lambda net, _: [one.grad for one in net.parameters()], False),
    ],
)
def test_clipping_by_hand_between_steps_is_said_to_have_no_effect(
    between: Any, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    optimizer = Optimizer(sgd(net), net)
    for _ in batches(Data(), global_batch=BATCH, num_steps=13):
        between(net, optimizer)
        optimizer.step(lambda share: loss_of(net, share))
    said = [record.getMessage() for record in caplog.records if "without any effect" in record.getMessage()]
    assert len(said) == int(is_warned)
    assert all("clip_grad_norm=" in line for line in said)


class Players(nn.Module):
    """The two models of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, real: Tensor, noise: Tensor, *, is_judge: bool) -> Tensor:
        said = self.judge(self.maker(noise)).sigmoid()
        if not is_judge:
            return -said.log().mean()
        return -(self.judge(real).sigmoid().log() + (1 - said).log()).mean()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.judge.parameters(), lr=0.02, weight_decay=0.1),
            torch.optim.RMSprop(self.maker.parameters(), lr=0.01),
        ]


def test_two_players_with_one_elastic_optimizer_train_as_with_two_plain_ones() -> None:
    torch.manual_seed(0)
    players = Players()
    plain = copy.deepcopy(players)
    draws = [(torch.randn(12, 8) + 2, torch.randn(12, 4)) for _ in range(20)]
    optimizers = plain.optimizers()
    for real, noise in draws:
        for number, inner in enumerate(optimizers):
            plain.zero_grad()
            plain.loss(real, noise, is_judge=number == 0).backward()
            inner.step()
    inner = Optimizers(
        (players.judge.parameters(), lambda found: torch.optim.Adam(found, lr=0.02, weight_decay=0.1)),
        (players.maker.parameters(), lambda found: torch.optim.RMSprop(found, lr=0.01)),
    )
    optimizer = Optimizer(inner, players)
    while optimizer.num_steps < 2 * len(draws):
        real, noise = draws[optimizer.num_steps // 2]
        is_judge = optimizer.num_steps % 2 == 0
        players.judge.requires_grad_(is_judge)
        players.maker.requires_grad_(not is_judge)
        optimizer.step(lambda _, real=real, noise=noise, mine=is_judge: players.loss(real, noise, is_judge=mine))
    assert_equal(players, plain)


def test_a_second_optimizer_is_refused_under_morph_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    net, other = Net(), Net()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("MORPH_ELASTIC_LISTEN_FD", str(listening.fileno()))
        with Optimizer(sgd(net), net) as first:
            with pytest.raises(InputError, match=r"is the second in this process.*morph\.Optimizers for several"):
                Optimizer(sgd(other), other)
            assert first.step(lambda _: loss_of(net, (torch.ones(2, 8), torch.zeros(2, dtype=torch.long)))) > 0
        with Optimizer(sgd(other), other) as later:  # the first has left the job
            assert later.num_workers == 1


def test_of_two_optimizers_alone_the_one_without_batches_is_told_why() -> None:
    net, other = Net(), Net()
    first, second = Optimizer(sgd(net), net), Optimizer(sgd(other), other)
    fixed = (torch.ones(2, 8), torch.zeros(2, dtype=torch.long))
    for _ in batches(Data(), global_batch=BATCH, num_steps=1):
        second.step(lambda share: loss_of(other, share))
        first.step(lambda _: loss_of(net, fixed))
        with pytest.raises(InputError, match="batches: gives its batches to the optimizer that was made last"):
            first.step(lambda share: loss_of(net, share))


def test_gradients_that_are_forgotten_before_a_step_do_no_harm() -> None:
    net = Net()
    optimizer = Optimizer(sgd(net), net)
    backward_before(net, optimizer, step_lr(sgd(net)))
    optimizer.zero_grad()
    assert optimizer.step(lambda _: loss_of(net, (torch.ones(2, 8), torch.zeros(2, dtype=torch.long)))) > 0


def test_a_loss_function_that_runs_backward_is_refused() -> None:
    net = Net()

    def loss(share: tuple[Tensor, Tensor]) -> Tensor:
        found = loss_of(net, share)
        found.backward()  # type: ignore[no-untyped-call]
        return found.detach()

    optimizer = Optimizer(sgd(net), net)
    with pytest.raises(InputError, match="loss_of: runs backward itself; allowed: a function that returns the loss"):
        optimizer.step(lambda _: loss((torch.ones(2, 8), torch.zeros(2, dtype=torch.long))))


def test_a_parameter_thawed_within_a_step_is_refused() -> None:
    net = Net()
    net.body.requires_grad_(False)
    optimizer = Optimizer(sgd(net), net)

    def loss(_: object) -> Tensor:
        net.body.requires_grad_(True)
        return loss_of(net, (torch.ones(2, 8), torch.zeros(2, dtype=torch.long)))

    with pytest.raises(InputError, match=r"body\.\w+: requires_grad was set within a step"):
        optimizer.step(loss)


ELSEWHERE = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda net: torch.optim.SparseAdam(net.parameters()), {}, "requires sparse gradients.*'SparseAdam'"),
        (lambda net: torch.optim.SGD(ELSEWHERE.parameters()), {}, "a parameter that is not the model's"),
        (sgd, {"clip_grad_norm": 0}, "clip_grad_norm: is not a bound of a norm"),
        (sgd, {"clip_grad_norm": True}, "clip_grad_norm: is not a bound of a norm"),
        (sgd, {"lr_scheduler": ReduceLROnPlateau}, "lr_scheduler: returns a scheduler whose step needs a value"),
        (sgd, {"lr_scheduler": StepLR(sgd(ELSEWHERE), 3)}, "lr_scheduler: schedules another optimizer"),
        (sgd, {"lr_scheduler": lambda _: 3}, "lr_scheduler: does not return a scheduler"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_once(make: Any, options: dict[str, Any], said: str) -> None:
    net = nn.Linear(8, 4)
    with pytest.raises(InputError, match=said):
        Optimizer(make(net), net, **options)


def warned(
    num_labels: int, of_share: Callable[[nn.Module, Any], Tensor], caplog: pytest.LogCaptureFixture
) -> list[str]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))
    caplog.set_level(logging.WARNING, "morph.elastic")
    optimizer = Optimizer(sgd(net), net)
    for _ in batches(Data(num_labels), global_batch=BATCH, num_steps=2):
        optimizer.step(lambda share: of_share(net, share))
    return [record.getMessage() for record in caplog.records]


def token_mean(net: nn.Module, share: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(net(share[0]).flatten(0, 1), share[1].flatten())


def test_a_mean_over_tokens_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = warned(6, token_mean, caplog)
    assert "not the mean of their separate ones" in said
    assert "changes with share_size" in said
    assert "micro" not in said


def test_a_mean_over_samples_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert warned(0, loss_of, caplog) == []


def test_the_trial_of_a_loss_changes_no_model_and_raises_nothing() -> None:
    norm = nn.BatchNorm1d(4)
    net = nn.Sequential(nn.Linear(8, 4), norm)
    given = batches(Data(), global_batch=BATCH)

    def fails(share: Any) -> Tensor:
        raise KeyError("in the loop's own code")

    assert loss_warnings(given, net, fails) == ()
    assert loss_warnings(given, net, lambda share: loss_of(net, share)) == ()
    optimizer = Optimizer(torch.optim.SGD(net.parameters(), lr=0.0), net)
    calls: list[Any] = []
    assert norm.num_batches_tracked is not None
    num_before = int(norm.num_batches_tracked)
    for _ in batches(Data(), global_batch=BATCH, share_size=BATCH, num_steps=1):
        optimizer.step(lambda share: calls.append(share) or loss_of(net, share))  # type: ignore[func-returns-value]
    assert len(calls) > 1
    assert int(norm.num_batches_tracked) == num_before + 1


@pytest.mark.parametrize(
    "samples", [[(torch.ones(8), torch.tensor(1))], [1, 2, 3], [{"a": {"b": [1.0]}}, {"a": {"b": [2.0]}}], ["a", "b"]]
)
def test_samples_of_any_kind_leave_the_trial_of_the_loss_silent(samples: list[Any]) -> None:
    data: Any = samples
    assert loss_warnings(batches(data, global_batch=1), nn.Linear(8, 4), lambda _: torch.tensor(1.0)) == ()


def test_a_schedule_s_state_is_part_of_what_joiners_get() -> None:
    def state_of(net: Net) -> TrainingState:
        inner = sgd(net)
        schedule = LambdaLR(inner, lambda step: 1.0 / (1 + step))
        return TrainingState(net, inner, scheduler=schedule)

    one, other = state_of(Net()), state_of(Net())
    one.named["body.bias"].requires_grad_(False)
    one.optimizer.step()
    for _ in range(3):
        one.advance_schedule()
    other.unpack(one.pack())
    assert other.trained() == one.trained()
    assert torch.equal(one.pack(), other.pack())
    for each in (one, other):
        each.optimizer.step()
        each.advance_schedule()
    assert other.optimizer.param_groups[0]["lr"] == one.optimizer.param_groups[0]["lr"] == 0.1 * (1 / 5)
    assert torch.equal(one.pack(), other.pack())


def test_a_state_sent_before_a_step_has_the_settings_before_its_code() -> None:
    nets = [Net(), Net()]
    for net in nets:
        net.body.requires_grad_(False)
    one, other = (TrainingState(net, torch.optim.SGD(net.head.parameters(), lr=0.1)) for net in nets)
    one.num_steps = 4
    one.pass_boundary()
    one.optimizer.param_groups[0]["lr"] *= 0.5
    one.optimizer.add_param_group({"params": list(nets[0].body.parameters()), "lr": 0.3})
    nets[0].body.requires_grad_(True)
    other.unpack(one.pack())
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.1]
    assert not nets[1].body.weight.requires_grad
    one.num_steps = 5  # the step was applied, so the state includes what the code before it did
    other.unpack(one.pack())
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.05, 0.3]
    assert nets[1].body.weight.requires_grad
    other.pass_boundary()
    other.optimizer.param_groups[0]["lr"] = 0.025
    other.unpack(one.pack())  # once more within the step, before which the code has run here
    assert other.optimizer.param_groups[0]["lr"] == 0.025


def test_a_worker_with_other_options_is_refused_when_it_joins() -> None:
    states = [
        TrainingState(net, sgd(net), agreed={"accumulation": kind})
        for net, kind in zip((Net(), Net()), ("exact", "fast"), strict=True)
    ]
    with pytest.raises(
        InputError, match=r"accumulation: must be the same at all workers .got 'fast'.; allowed: 'exact'"
    ):
        states[1].unpack(states[0].pack())


def test_a_joiner_with_its_own_schedule_or_groups_is_refused() -> None:
    nets = [Net(), Net(), Net()]
    one, scheduled = (TrainingState(net, sgd(net)) for net in nets[:2])
    scheduled.scheduler = step_lr(scheduled.optimizer)
    with pytest.raises(InputError, match="lr_scheduler: is given only at this worker"):
        scheduled.unpack(one.pack())
    grouped = TrainingState(nets[2], torch.optim.SGD([{"params": [p]} for p in nets[2].parameters()]))
    with pytest.raises(InputError, match="optimizer: is not the one with which the other workers train"):
        grouped.unpack(one.pack())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda mine: mine.update(trained="0" + mine["trained"][1:]),
            "phase.requires_grad: differs from the oldest worker's in step 7 .got False.; allowed: True",
        ),
        (
            lambda mine: mine["groups"][0]["values"].update(lr=0.5),
            r"param_groups\[0\]\['lr'\]: .* .got 0.5.; allowed: 0.1, as there; give",
        ),
        (lambda mine: mine["groups"].append({}), "optimizer: has parameter groups or a schedule"),
        (lambda mine: mine.update(scheduler={}), "optimizer: has parameter groups or a schedule"),
    ],
)
def test_a_difference_is_reported_in_one_sentence(change: Any, said: str) -> None:
    net = Net()
    oldest = TrainingState(net, sgd(net)).settings()
    mine = copy.deepcopy(oldest)
    change(mine)
    assert re.search(said, str(difference(mine, oldest, list(dict(net.named_parameters())), 7)))


def test_a_changed_group_is_seen_whatever_it_holds() -> None:
    """Settings are read again only where they may have changed."""
    net = nn.Linear(2, 2)
    state = TrainingState(net, torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1), betas=(0.5, 0.6)))
    (group,) = state.optimizer.param_groups
    group["lr"].mul_(0.5)
    assert state.settings()["groups"][0]["values"]["lr"]["number"] == pytest.approx(0.05)
    state.optimizer.param_groups[0]["lr"] = 0.25
    groups = state.settings()["groups"]
    assert state.settings()["groups"] is groups
    group["betas"] = (0.5, 0.7)
    assert state.settings()["groups"][0]["values"]["betas"]["items"] == [0.5, 0.7]
    group["params"] = group["params"][:1]
    assert state.settings()["groups"][0]["parameters"] == [0]

"""A loss or metric that is not a mean over samples is recognised, and its numbers are shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from morph.contract.errors import JobError
from morph.losses import Loss, cross_entropy
from morph.preflight.mean_loss import LossTrial, loss_warnings, mean_warnings
from tests.cutting.zoo import ZOO

ITEMS = [
    {
        "x": torch.randn(5, 6, generator=torch.Generator().manual_seed(index)),
        "labels": torch.where(torch.arange(5) < 1 + index % 5, torch.arange(5) % 6, -100),
        "mask": torch.arange(5) < 1 + index % 5,
    }
    for index in range(8)
]


class Noisy(nn.Module):
    """A model with dropout, noise, random layer drop and batch statistics, which are not the loss's fault."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.out = nn.Linear(6, 6), nn.BatchNorm1d(5), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.norm(self.linear(x)), 0.5)
        if torch.rand(()) < 0.3:
            x = x * 2
        levels = torch.randint(0, 9, (len(x), 1, 1)) * 0.1
        return self.out(x + torch.randn_like(x) * levels)


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean((1, 2)).sum()


def over_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def shifted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def over_a_mask(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    errors = model(batch["x"]).square().mean(-1)
    return (errors * batch["mask"]).sum() / batch["mask"].sum()


def within_samples_first(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    errors = model(batch["x"]).square().mean(-1)
    return ((errors * batch["mask"]).sum(1) / batch["mask"].sum(1)).mean()


def contrastive(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    rows = functional.normalize(model(batch["x"]).flatten(1), dim=1)
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def with_metrics(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch["x"])
    return out.square().mean(), {"right": out.abs().mean(), "largest": out.max()}


def by_token(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Loss, dict[str, Loss]]:
    logits = model(batch["x"])
    counts = batch["labels"] != -100
    right = (logits.argmax(-1) == batch["labels"]) & counts
    return cross_entropy(logits, batch["labels"]), {"right": Loss(right.sum(), counts.sum())}


def total_of_a_mean(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    return Loss(over_tokens(model, batch), (batch["labels"] != -100).sum())


def weight_of_a_mean(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    return Loss(summed(model, batch), (batch["labels"] != -100).float().mean())


@pytest.mark.parametrize(
    ("loss", "what"), [(total_of_a_mean, "total of the loss"), (weight_of_a_mean, "weight of the loss")]
)
def test_a_total_or_weight_that_is_not_a_sum_is_reported(tools: Any, loss: Any, what: str) -> None:
    (sentence,) = loss_warnings(tools.make_job(Noisy, loss, ITEMS))
    assert sentence.startswith(f"the {what} of samples run together is not the sum of their separate ones (")


MEET = "the loss of samples run together is not the mean of their separate ones ("


@pytest.mark.parametrize("loss", [mean_loss, within_samples_first, by_token])
def test_a_mean_over_samples_is_not_warned_of_whatever_the_model_draws(tools: Any, loss: Any) -> None:
    assert loss_warnings(tools.make_job(Noisy, loss, ITEMS)) == ()


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (summed, "the loss is a sum over the samples, not their mean"),
        (over_tokens, MEET),
        (shifted, MEET),
        (over_a_mask, MEET),
        (contrastive, MEET),
    ],
)
def test_a_loss_that_is_not_a_mean_is_reported_with_its_kind(tools: Any, loss: Any, what: str) -> None:
    items = [{key: item[key] for key in ("x", "mask" if loss is over_a_mask else "labels")} for item in ITEMS]
    (sentence,) = loss_warnings(tools.make_job(Noisy, loss, items if loss is not shifted else items[1:5]))
    assert sentence.startswith(what)
    assert "micro_batch_size" in sentence
    assert "\n" not in sentence


def test_a_metric_that_is_not_a_mean_is_reported_by_name(tools: Any) -> None:
    (sentence,) = loss_warnings(tools.make_job(Noisy, with_metrics, ITEMS))
    assert sentence.startswith("metric 'largest' of samples run together is not the mean of their separate ones")


class TakesPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x[:, 0]))


def test_samples_that_cannot_stand_alone_are_taken_twice(tools: Any) -> None:
    assert loss_warnings(tools.make_job(TakesPairs, mean_loss, ITEMS)) == ()
    (sentence,) = loss_warnings(
        tools.make_job(TakesPairs, lambda model, batch: model(batch["x"]).square().mean(1).sum(), ITEMS)
    )
    assert "is a sum over the samples" in sentence
    assert re.search(r"\(samples \d and \d together, each twice: ", sentence)


@pytest.mark.parametrize(("batch_size", "end", "num_left"), [(7, "short", 1), (6, "short", 2), (7, "drop", 1)])
def test_a_last_step_of_one_sample_that_cannot_stand_alone_is_told(
    tools: Any, batch_size: int, end: str, num_left: int
) -> None:
    assert len(ITEMS) % batch_size == num_left
    told = loss_warnings(tools.make_job(TakesPairs, mean_loss, ITEMS, batch_size=batch_size, epoch_end=end))
    expected = num_left == 1 and end == "short"
    assert ["the last step of each epoch has 1 sample" in sentence for sentence in told] == [True] * expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_models_of_others_are_means_with_their_dropout(tools: Any, name: str) -> None:
    assert loss_warnings(tools.make_job(*ZOO[name])) == ()


def test_the_error_of_a_loss_on_numbers_names_its_line(tools: Any) -> None:
    def fails(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise ValueError("not today")

    with pytest.raises(JobError, match=r"test_mean_trial.py:\d+: loss failed: ValueError: not today"):
        loss_warnings(tools.make_job(Noisy, fails, ITEMS))


def test_an_operation_that_this_device_lacks_does_not_refuse_the_job(tools: Any) -> None:
    def elsewhere(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError("Could not run 'mine::attention' with arguments from the 'CPU' backend")

    assert loss_warnings(tools.make_job(Noisy, elsewhere, ITEMS)) == ()


def rare_items() -> list[dict[str, Tensor]]:
    """Bags of words, most of them empty, of which the last 5 % are of class 1."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, 4, (400, 12), generator=generator).float()
    words *= torch.rand(400, 12, generator=generator) < torch.rand(400, 1, generator=generator)
    return [{"words": row, "y": torch.tensor(int(index >= 380))} for index, row in enumerate(words)]


class Classifier(nn.Module):
    """A classifier that begins with the same loss for every sample, because its last layer is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(12, 8), nn.Linear(8, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.relu(self.first(words)))


def by_class(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["words"]), batch["y"], weight=torch.tensor([0.05, 0.95]))


def one_class_alone(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["words"]), batch["y"], ignore_index=1)


def class_times_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    own = functional.cross_entropy(model(batch["words"]), batch["y"], reduction="none")
    return (own * torch.tensor([0.05, 0.95])[batch["y"]]).mean()


def test_class_weights_are_reported_however_rare_the_class(tools: Any) -> None:
    (sentence,) = loss_warnings(tools.make_job(Classifier, by_class, rare_items()))
    assert sentence.startswith(f"{MEET}samples ")
    assert "weighed, by class (cross_entropy(weight=...))" in sentence
    assert "return morph.Loss(total, weight)" in sentence
    assert loss_warnings(tools.make_job(Classifier, class_times_loss, rare_items())) == ()


def test_a_sample_without_weight_is_named_even_if_its_loss_is_nan(tools: Any) -> None:
    told, left_out = loss_warnings(tools.make_job(Classifier, one_class_alone, rare_items()))
    assert told.startswith(MEET)
    assert "is nan: left out of the check whether the loss is a mean over samples" in left_out
    numbers = re.findall(r"\d+", left_out)
    assert numbers
    assert all(int(number) >= 380 for number in numbers)


def with_an_infinite_sample(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    own = model(batch["x"]).square().mean((1, 2))
    return torch.where((batch["mask"].sum(1) == 1), torch.inf, own).sum() / (1 if OF_ALL else len(own))


OF_ALL = False


@pytest.mark.parametrize("summed", [False, True])
def test_a_sample_that_cannot_be_judged_is_left_out(tools: Any, summed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "OF_ALL", summed)
    *told, left_out = loss_warnings(tools.make_job(Noisy, with_an_infinite_sample, ITEMS))
    assert [sentence.startswith("the loss is a sum over the samples") for sentence in told] == [True] * summed
    assert left_out.startswith("the loss of sample 0 alone is inf: left out of the check")


def nowhere_finite(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).mean() * torch.nan


def test_a_loss_that_is_nan_everywhere_is_reported(tools: Any) -> None:
    (sentence,) = loss_warnings(tools.make_job(Noisy, nowhere_finite, ITEMS))
    assert sentence.startswith("the loss is nan for all samples tried")


def over_weights(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]).square().mean((1, 2)) * batch["w"]).sum() / batch["w"].sum()


def over_hidden_weights(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    weights = batch["x"].abs().sum((1, 2))
    return (model(batch["x"]).square().mean((1, 2)) * weights).sum() / weights.sum()


def over_tokens_by_class(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = model(batch["x"]).flatten(0, 1), batch["x"].argmax(2).flatten()
    return functional.cross_entropy(logits, labels, weight=torch.arange(1.0, 7.0))


def hard_ones_of_many(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss that leaves out the easiest tenth of the samples, which is none of two samples."""
    own = model(batch["x"]).square().mean((1, 2))
    return own.topk(len(own) - len(own) // 8).values.mean()


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (over_weights, "samples "),
        (over_hidden_weights, "samples "),
        (over_tokens_by_class, "samples "),
        (hard_ones_of_many, "8 samples together: "),
    ],
)
def test_weights_and_choices_among_samples_are_reported(tools: Any, loss: Any, what: str) -> None:
    items = [{"x": item["x"], "w": torch.tensor(1.0 + index)} for index, item in enumerate(ITEMS)]
    (sentence,) = loss_warnings(tools.make_job(Noisy, loss, items))
    assert sentence.startswith(MEET + what)


class Draws(nn.Module):
    """A model that runs ``between`` among its layers."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, dtype=dtype), nn.Linear(6, 6, dtype=dtype)
        self.normed = torch.nn.utils.spectral_norm(nn.Linear(6, 6)) if between is through_spectral_norm else None
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(6, 6))
        self.between, self.dtype = between, dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self, self.first(x.to(self.dtype)))).float()


def through_rrelu(self: Any, x: Tensor) -> Tensor:
    return functional.rrelu(functional.rrelu(x, training=True), 0.1, 0.9, training=True, inplace=True)


def of_a_multinomial(self: Any, x: Tensor) -> Tensor:
    rows = x.softmax(-1).flatten(0, 1)
    chosen = torch.cat([torch.multinomial(rows, 2), torch.multinomial(rows, 3, replacement=True)], 1)
    return x * functional.one_hot(chosen, 6).sum(1).view_as(x)


def of_described_distributions(self: Any, x: Tensor) -> Tensor:
    positive = x.exp()
    drawn = torch.poisson(positive) + torch.binomial(torch.full_like(x, 9.0), x.sigmoid()) + torch.normal(x, 0.5)
    return x + drawn + torch._standard_gamma(positive) + torch._sample_dirichlet(positive)


def of_fixed_distributions(self: Any, x: Tensor) -> Tensor:
    shaped = torch.empty_like(x)
    drawn = shaped.geometric_(0.5) + x.new_empty(x.shape).uniform_(1, 2) + x.new_empty(x.shape).exponential_()
    return x + drawn + functional.gumbel_softmax(x, hard=True) + functional.alpha_dropout(x, 0.3, training=True)


def counts_its_steps(self: Any, x: Tensor) -> Tensor:
    self.steps += 1
    return x * (1 + self.steps)


def through_spectral_norm(self: Any, x: Tensor) -> Tensor:
    return self.normed(x)


def averages_its_weights(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.average = self.average * 0.9 + self.first.weight * 0.1
        self.average.data.mul_(0.99)
    return x @ self.average + x


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm`:FutureWarning")
@pytest.mark.parametrize(
    "between",
    [
        through_rrelu,
        of_a_multinomial,
        of_described_distributions,
        of_fixed_distributions,
        counts_its_steps,
        through_spectral_norm,
        averages_its_weights,
    ],
)
def test_samples_share_neither_draws_nor_what_a_forward_leaves(tools: Any, between: Any) -> None:
    assert loss_warnings(tools.make_job(lambda: Draws(between), mean_loss, ITEMS)) == ()
    assert len(loss_warnings(tools.make_job(lambda: Draws(between), summed, ITEMS))) == 1


def under_autocast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch["x"]).float().square().mean()


@pytest.mark.parametrize("loss", [mean_loss, under_autocast])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_to_few_bits_is_not_mistaken_for_weights(tools: Any, loss: Any, dtype: torch.dtype) -> None:
    assert loss_warnings(tools.make_job(lambda: Draws(lambda _, x: x.tanh(), dtype), loss, ITEMS)) == ()


def test_a_users_own_loop_is_tried_with_its_samples_and_batches() -> None:
    torch.manual_seed(0)
    model = Draws(counts_its_steps)
    samples = [(item["x"], item["labels"].tolist().count(-100)) for item in ITEMS]

    def over_all(batch: Any) -> Tensor:
        return (model(batch[0]).square().mean((1, 2)) * batch[1]).sum() / batch[1].sum()

    def trial(loss: Callable[[Any], Tensor]) -> LossTrial:
        read = lambda indices: [samples[index] for index in indices]  # noqa: E731
        return LossTrial(loss, model, len(samples), read, torch.utils.data.default_collate, "share", "share_size")

    state = torch.get_rng_state()
    told, left_out = mean_warnings(trial(over_all))
    assert told.startswith(MEET)
    assert "only the m samples of a share run together" in told
    assert "the result changes with share_size" in told
    assert left_out.startswith("the loss of sample 4 alone is nan")
    assert mean_warnings(trial(lambda batch: model(batch[0]).square().mean())) == ()
    assert torch.equal(torch.get_rng_state(), state)
    assert int(model.steps) == 0


def test_a_costly_loss_is_tried_on_one_pair_alone() -> None:
    sizes: list[int] = []

    def costly(batch: Tensor) -> Tensor:
        sizes.append(len(batch))
        return batch.mean()

    read = lambda indices: [torch.tensor(float(index)) for index in indices]  # noqa: E731
    assert mean_warnings(LossTrial(costly, nn.Linear(1, 1), 100, read, torch.stack), running_s=0) == ()
    assert sizes == [1, 1, 2]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.head = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.experts = nn.Parameter(torch.randn(4, 16, 16) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        shares = self.router(hidden).softmax(-1)
        chosen = functional.one_hot(shares.argmax(-1), 4).to(shares)
        self.balance = 4 * (shares.mean(0) * chosen.mean(0)).sum()
        self.entropy = (shares.mean(0) * shares.mean(0).log()).sum()
        mixed = torch.einsum("bi,eio->beo", hidden, self.experts) * (shares * chosen)[..., None]
        return self.head(hidden + mixed.sum(1))


@pytest.mark.parametrize(
    ("term", "coefficient"), [("balance", 1e-4), ("entropy", 2e-4), ("balance", 0.0), ("entropy", 0.0)]
)
def test_a_small_term_of_the_whole_batch_shows_in_gradients(tools: Any, term: str, coefficient: float) -> None:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        value = functional.cross_entropy(model(batch["x"]), batch["y"])
        return value + coefficient * getattr(model, term)

    draw = torch.Generator().manual_seed(0)
    items = [{"x": torch.randn(8, generator=draw), "y": torch.tensor(index % 4)} for index in range(64)]
    told = loss_warnings(tools.make_job(Experts, loss, items))
    assert [sentence.split("(")[0] for sentence in told] == (
        ["the gradients of samples run together are not the mean of their separate ones "] if coefficient else []
    )
    assert all("the gradient of router.weight is" in sentence for sentence in told)

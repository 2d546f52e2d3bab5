"""A loss, or a metric, that is no mean over samples is told by what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from morph.contract.errors import JobError
from morph.cutting.trials.mean_trial import loss_warnings
from tests.cutting.zoo import ZOO, padded_texts

ITEMS = [
    {
        "x": torch.randn(5, 6, generator=torch.Generator().manual_seed(index)),
        "labels": torch.where(torch.arange(5) < 1 + index % 5, torch.arange(5) % 6, -100),
        "mask": torch.arange(5) < 1 + index % 5,
    }
    for index in range(8)
]


class Noisy(nn.Module):
    """With dropout, noise, a random layer drop and statistics of the batch: none of them is the loss's fault."""

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


@pytest.mark.parametrize("loss", [mean_loss, within_samples_first])
def test_a_mean_over_samples_is_not_warned_of_whatever_the_model_draws(tools: Any, loss: Any) -> None:
    assert loss_warnings(tools.make_job(Noisy, loss, ITEMS)) == ()


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (summed, "the loss is a sum over the samples, not their mean"),
        (over_tokens, "the loss weighs samples by their number of entries of 'labels' other than -100"),
        (shifted, "the loss weighs samples by their number of entries of 'labels' other than -100"),
        (over_a_mask, "the loss weighs samples by their number of entries of 'mask' other than 0"),
        (contrastive, "the loss of samples that come together is not the mean of their own"),
    ],
)
def test_a_loss_that_is_no_mean_is_told_by_what_it_is(tools: Any, loss: Any, what: str) -> None:
    items = [{key: item[key] for key in ("x", "mask" if loss is over_a_mask else "labels")} for item in ITEMS]
    (sentence,) = loss_warnings(tools.make_job(Noisy, loss, items if loss is not shifted else items[1:5]))
    assert sentence.startswith(what)
    assert "micro_batch_size" in sentence
    assert "\n" not in sentence


def test_a_metric_that_is_no_mean_is_told_by_its_name(tools: Any) -> None:
    (sentence,) = loss_warnings(tools.make_job(Noisy, with_metrics, ITEMS))
    assert sentence.startswith("metric 'largest' of samples that come together is not the mean of their own")


class TakesPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x[:, 0]))


def test_samples_that_cannot_stand_alone_are_taken_in_halves(tools: Any) -> None:
    assert loss_warnings(tools.make_job(TakesPairs, mean_loss, ITEMS)) == ()
    (sentence,) = loss_warnings(
        tools.make_job(TakesPairs, lambda model, batch: model(batch["x"]).square().mean(1).sum(), ITEMS)
    )
    assert "is a sum over the samples" in sentence
    assert "4 samples together" in sentence
    assert "in halves" in sentence


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_models_of_others_are_means_with_their_dropout(tools: Any, name: str) -> None:
    assert loss_warnings(tools.make_job(*ZOO[name])) == ()


def test_a_model_given_padded_labels_is_told_of(tools: Any) -> None:
    items = [
        {"input_ids": item["input_ids"], "labels": torch.where(item["attention_mask"] > 0, item["labels"], -100)}
        for item in padded_texts()
    ]
    (sentence,) = loss_warnings(tools.make_job(ZOO["gpt2"][0], lambda model, batch: model(**batch).loss, items))
    assert "by their number of entries of 'labels' other than -100 (5 and 10)" in sentence


def test_a_loss_that_fails_on_numbers_is_told_with_its_line(tools: Any) -> None:
    def fails(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise ValueError("not today")

    with pytest.raises(JobError, match=r"test_mean_trial.py:\d+: loss failed: ValueError: not today"):
        loss_warnings(tools.make_job(Noisy, fails, ITEMS))


def test_an_operation_that_this_device_lacks_is_not_held_against_the_job(tools: Any) -> None:
    def elsewhere(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError("Could not run 'mine::attention' with arguments from the 'CPU' backend")

    assert loss_warnings(tools.make_job(Noisy, elsewhere, ITEMS)) == ()

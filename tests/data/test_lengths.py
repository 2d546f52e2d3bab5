"""Samples of varying length: samples of similar length share micro-batches, which are padded to declared lengths."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import morph.elastic
from calibrate.computing.compute import _mixed
from calibrate.computing.sections import SectionMeasurement
from calibrate.timing.samples import mean_of, timing
from morph import Job, Loss
from morph.contract.errors import JobError
from morph.cutting import cut, export_job
from morph.data import MicroBatchLoader, Packed
from morph.data.lengths import divided
from morph.data.loader import lengths_of, mix_of, order_of, varying_dims
from morph.data.packing import packs
from morph.jobs.job import ShortStep
from morph.losses import cross_entropy
from morph.preflight.mean_loss import loss_warnings
from morph.preflight.plain_comparison import PATIENT_FLOPS, Limits, compare_with_plain
from tests.training.training_jobs import Reader, Texts, length_of, padded_by_hand, varying

BUCKETS = (4, 8, 16)


def loader(job: Job = varying, size: int = 2) -> MicroBatchLoader:
    return MicroBatchLoader.of(job, size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_has_the_same_samples_for_every_micro_batch_size(size: int) -> None:
    wanted, lengths = order_of(varying).mini_batch(3), lengths_of(varying)
    parts = divided(wanted, size, lengths, BUCKETS)
    assert sorted(place for part in parts for place in part.places) == sorted(wanted)
    for part in parts:
        longest = max(length_of(index) for _, index in part.places)
        assert part.length == min(bucket for bucket in BUCKETS if bucket >= longest)


def test_like_lengths_share_micro_batches() -> None:
    parts = divided(order_of(varying).mini_batch(0), 2, lengths_of(varying), BUCKETS)
    ranges = sorted((min(found), max(found)) for part in parts for found in [[length_of(i) for _, i in part.places]])
    assert all(high <= low for (_, high), (low, _) in pairwise(ranges))


def test_a_short_step_of_a_loops_batches_keeps_the_batches() -> None:
    job = replace(varying, dataset=lambda: Texts(0, 27), epoch_end=ShortStep())
    found, numbers = MicroBatchLoader.of(job, 2), order_of(job).epoch(0)[24:].tolist()
    parts = [found._micro_batch(3, number) for number in range(found.num_micro_batches(3))]
    assert sorted([index for _, index in part.places] for part in parts) == sorted([numbers[:2], numbers[2:]])
    assert sorted(len(part.places) for part in parts) == [1, 2]


@pytest.mark.parametrize("num_replicas", [2, 3, 5, 8])
def test_every_replica_gets_short_and_long_micro_batches(num_replicas: int) -> None:
    lengths = np.arange(1, 513)
    parts = divided([(0, index) for index in range(512)], 4, lengths, tuple(range(4, 513, 4)))
    shares = np.array_split([part.length for part in parts], num_replicas)
    means = [share.mean() for share in shares]
    assert max(means) / min(means) < 1.2


def test_entries_are_padded_with_what_does_not_count() -> None:
    batch = loader(replace(varying, padding={"tokens": 7})).load(0, 0, ("tokens", "labels"))
    length, _ = loader().size(0, 0)
    index = next(index for (_, index) in order_of(varying).mini_batch(0) if length_of(index) < (length or 0))
    number = next(j for j in range(4) if any(place[1] == index for place in loader()._micro_batch(0, j).places))
    batch = loader(replace(varying, padding={"tokens": 7})).load(0, number, ("tokens", "labels"))
    row = [place[1] for place in loader()._micro_batch(0, number).places].index(index)
    size = length_of(index)
    assert torch.equal(batch["tokens"][row, :size], Texts()[index]["tokens"])
    assert set(batch["tokens"][row, size:].tolist()) <= {7}
    assert set(batch["labels"][row, size:].tolist()) == {-100}


def test_what_collate_fn_pads_is_padded_on_to_the_bucket() -> None:
    by_hand = replace(varying, collate_fn=padded_by_hand)
    for number in range(4):
        one, other = (loader(job).load(0, number, ("tokens", "labels")) for job in (varying, by_hand))
        assert all(torch.equal(one[key], other[key]) for key in one)


class Longer(Texts):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        return {**item, "tokens": torch.zeros(17, dtype=torch.int64)} if index == 3 else item


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"buckets": (4, 8)},
            r"lengths\(dataset\): has a sample that is longer than all buckets: number 11 \(got 14\)",
        ),
        (
            {"lengths": lambda data: [3]},
            r"does not return lengths \(got '\[1\] int64'\); allowed: .* each of the 40 samples",
        ),
        ({"lengths": lambda data: [0.5] * 40}, "float64"),
        (
            {"dataset": Longer},
            r"dataset\(\)\[3\]\['tokens'\]: is longer than its sample's length allows.*\(up to 16\)",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_refused(changes: dict[str, Any], told: str) -> None:
    job = replace(varying, **changes)
    with pytest.raises(JobError, match=told):
        [loader(job).load(step, number, ("tokens",)) for step in range(5) for number in range(4)]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"buckets": (8, 4)},
            r"buckets: is not right \(got .8, 4.\); allowed: up to 32 whole numbers from 1",
        ),
        ({"buckets": ()}, "buckets: is not right .* to be given together with lengths"),
        ({"padding": {"tokens": "x"}}, "padding: is not right"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        replace(varying, **changes)


def test_samples_that_do_not_vary_need_no_buckets() -> None:
    class Even(Texts):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"tokens": torch.zeros(4), "labels": torch.zeros(4)}

    with pytest.raises(JobError, match="buckets: have nothing to pad: no entry of the samples varies in length"):
        varying_dims(replace(varying, dataset=Even))


def test_the_mix_of_lengths_is_that_of_an_epoch() -> None:
    found = mix_of(varying, 2)
    parts = [loader().size(step, number)[0] for step in range(5) for number in range(4)]
    assert found == {bucket: parts.count(bucket) / 20 for bucket in BUCKETS}


def test_times_of_a_profile_are_means_over_the_mix() -> None:
    model = cut(export_job(varying), num_sections=2, micro_batch_size=2)

    def measured(time_s: float) -> SectionMeasurement:
        return SectionMeasurement(
            forward=timing([time_s] * 3),
            backward=timing([2 * time_s] * 3),
            input_bytes_per_sample=1,
            activation_bytes_per_sample=1,
            peak_bytes=round(time_s),
        )

    times = {length: {s.signature: measured(length or 0) for s in model.at(length).sections} for length in BUCKETS}
    found = _mixed(model, times, {4: 0.25, 16: 0.75})
    assert {(entry.forward.median_s, entry.backward.mean_s, entry.peak_bytes) for entry in found.values()} == {
        (13.0, 26.0, 16)
    }
    assert mean_of([(1.0, timing([1.0, 2.0]))]) == timing([1.0, 2.0])


LLAMA = LlamaConfig(
    vocab_size=8,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
)


def masked_texts(texts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate as ``DataCollatorWithPadding`` does."""
    sizes = torch.tensor([len(text["tokens"]) for text in texts])
    padded = padded_by_hand(texts)
    return {**padded, "attention_mask": (torch.arange(int(sizes.max())) < sizes[:, None]).long()}


def llama_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
    logits = model(input_ids=batch["tokens"], attention_mask=batch["attention_mask"]).logits
    return cross_entropy(logits[:, :-1], batch["labels"][:, 1:])


@pytest.mark.slow
def test_a_model_of_transformers_is_cut_for_every_length_and_stays_itself() -> None:
    job = replace(varying, model=lambda: LlamaForCausalLM(LLAMA), loss=llama_loss, collate_fn=masked_texts)
    exported = export_job(job)
    model = cut(exported, num_sections=3, micro_batch_size=2)
    assert {one.sections[0].outputs[0].shape for one in model.every().values()} == {(2, n, 16) for n in BUCKETS}
    assert len({one.fingerprint for one in model.every().values()}) == 1
    limits = Limits(available_bytes=1 << 33, flops=PATIENT_FLOPS, device=torch.device("cpu"))
    assert compare_with_plain(job, exported, 3, limits).how == "whole"
    assert not loss_warnings(job)


class Branching(Reader):
    """A model that torch.export refuses."""

    def forward(self, tokens: torch.Tensor, *others: Any) -> torch.Tensor:
        """Return logits, which are larger for some texts."""
        logits = super().forward(self.cut(tokens), *others)
        return logits * 2 if float(logits.detach().sum()) > 0 else logits

    cut = nn.Identity()


def test_a_model_that_is_not_cut_takes_every_length() -> None:
    job = replace(varying, model=Branching, num_sections=1)
    model = cut(export_job(job), num_sections=1, micro_batch_size=2)
    assert sorted(model.by_length) == list(BUCKETS)
    limits = Limits(available_bytes=1 << 33, flops=PATIENT_FLOPS, device=torch.device("cpu"))
    assert compare_with_plain(job, export_job(job), 1, limits).how == "whole"


def test_padding_that_counts_is_warned_of() -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        logits = model(batch["tokens"])[:, :-1]
        total = functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        return Loss(total, batch["labels"][:, 1:].numel())

    warnings = loss_warnings(replace(varying, loss=loss, padding={"labels": 0}))
    assert any("of samples run together is not the sum of their separate ones" in warning for warning in warnings)


def test_shares_of_an_elastic_loop_are_of_like_lengths() -> None:
    batches = morph.elastic.batches(
        Texts(), global_batch=8, share_size=2, lengths=varying.lengths, buckets=BUCKETS, seed=varying.seed
    )
    shares = [morph.elastic.mini_batches.Batch(batches, 0).share(index) for index in range(4)]
    expected = [loader().load(0, number, ("tokens", "labels")) for number in range(4)]
    assert all(
        torch.equal(share[key], batch[key]) for share, batch in zip(shares, expected, strict=True) for key in batch
    )


def packed_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
    """Compute the loss as transformers does, which makes the mask of the documents from their positions."""
    logits = model(input_ids=batch["tokens"], position_ids=batch["position_ids"], use_cache=False).logits
    return cross_entropy(logits[:, :-1], batch["labels"][:, 1:])


@pytest.mark.slow
def test_packed_texts_in_a_model_of_transformers_do_not_see_each_other() -> None:
    data = Packed(Texts(), 16, varying.lengths)
    model = LlamaForCausalLM(LLAMA)
    job = replace(
        varying, model=lambda: LlamaForCausalLM(LLAMA), loss=packed_loss, dataset=lambda: data, lengths=None, buckets=()
    )
    limits = Limits(available_bytes=1 << 33, flops=PATIENT_FLOPS, device=torch.device("cpu"))
    exported = export_job(job)
    assert compare_with_plain(job, exported, 3, limits).how == "whole"
    sections = cut(exported, num_sections=3, micro_batch_size=2).sections
    batch, parameters = MicroBatchLoader.of(job, 2).load(0, 0, tuple(data[0])), dict(model.named_parameters())
    values: tuple[torch.Tensor, ...] = ()
    for section in sections:
        values = section(values, batch, parameters)
    numbers = [i for _, row in order_of(job).mini_batch(0)[:2] for i in packs(varying.lengths(Texts()), 16)[row]]
    alone = [model(input_ids=Texts()[i]["tokens"][None], labels=Texts()[i]["tokens"][None]) for i in numbers]
    total = sum(out.loss.item() * (length_of(i) - 1) for out, i in zip(alone, numbers, strict=True))
    assert values[0].item() == pytest.approx(total, rel=1e-6)

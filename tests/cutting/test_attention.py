"""Attention in traced models of transformers: Morph chooses as the plain model does, and results have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from morph.contract.errors import ExportError
from morph.cutting import cut, export_job
from morph.cutting.source.guards import replaced
from morph.preflight.checks import CutJob, Effort, check
from tests.cutting.attentions import plainly, traced
from tests.cutting.zoo import NUM_LAYERS, bert, causal_loss, llama, made, texts
from tests.models.language import DECODER, LENGTH

pytestmark = pytest.mark.slow


def attentions(tools: Any, model: Callable[[], nn.Module], loss: Any, items: Any) -> list[tuple[Any, ...]]:
    return traced(export_job(tools.make_job(model, loss, items)))


def sliding(window: int) -> Callable[[], nn.Module]:
    return made("MistralForCausalLM", **{**DECODER, "num_hidden_layers": 1}, sliding_window=window)


def test_only_a_window_shorter_than_the_text_needs_a_mask(tools: Any) -> None:
    for window, masked in ((LENGTH + 1, False), (LENGTH, True), (4, True)):
        found = attentions(tools, sliding(window), causal_loss, texts())
        assert [attention[:2] for attention in found] == [(masked, not masked)]
        assert found == plainly(sliding(window), causal_loss, tools.stack(texts(), 4))


def packed(length: int) -> list[dict[str, Tensor]]:
    """Put two texts into one sample: positions restart after ``length`` tokens."""
    positions = torch.cat([torch.arange(length), torch.arange(LENGTH - length)])
    return [{**item, "position_ids": positions} for item in texts()]


def packed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def test_positions_of_the_batch_may_pack_several_texts_so_the_mask_stays(tools: Any) -> None:
    expected = [(True, False, False, 4, 4)] * NUM_LAYERS
    job = tools.make_job(llama, packed_loss, packed(5))
    exported, batch = export_job(job), tools.stack(packed(5), 4)
    assert traced(exported) == expected
    assert plainly(llama, packed_loss, batch) == expected
    loss, gradients = tools.run_sections(
        cut(exported, num_sections=3, micro_batch_size=4), exported.initial_state, batch
    )
    assert_same(loss, gradients, *tools.run_whole(job, exported.initial_state, batch))


def assert_same(loss: Tensor, gradients: dict[str, Tensor], plain_loss: Tensor, plain: dict[str, Tensor]) -> None:
    assert torch.equal(loss, plain_loss)
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain[name]), name


def unmasked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def test_an_encoder_without_padding_has_no_mask(tools: Any) -> None:
    """A model that gets a padding mask keeps its masks: see ``test_models``."""
    assert attentions(tools, bert, unmasked_loss, texts()) == [(False, False, False, 4, 4)] * NUM_LAYERS


def test_heads_of_other_lengths_get_the_bits_of_the_plain_model(tools: Any) -> None:
    """The text is long enough for several tiles of the flash kernel, with one key head for all query heads."""
    length = 80
    sizes = {**DECODER, "num_hidden_layers": 2, "num_key_value_heads": 1, "max_position_embeddings": length}
    items = [
        {key: torch.randint(2, 50, (length,), generator=torch.Generator().manual_seed(n)) for key in ("input_ids",)}
        for n in range(4)
    ]
    items = [{**item, "labels": item["input_ids"]} for item in items]
    job = tools.make_job(made("LlamaForCausalLM", **sizes, head_dim=24), causal_loss, items)
    exported, batch = export_job(job), tools.stack(items, 4)
    found = tools.run_sections(cut(exported, num_sections=2, micro_batch_size=4), exported.initial_state, batch)
    assert_same(*found, *tools.run_whole(job, exported.initial_state, batch))


class Masked(nn.Module):
    """Attention with a mask of its own, made from a mask that hides nothing."""

    def __init__(self, shown: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shown = shown
        self.embed = nn.Embedding(50, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)[:, None]
        mask = self.shown(torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=ids.device))
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["input_ids"]).square().mean()


def test_a_mask_that_hides_what_is_causal_would_is_reported(tools: Any) -> None:
    masks: list[tuple[Callable[[Tensor], Tensor], bool]] = [
        (lambda ones: ones.tril(), True),
        (lambda ones: ones, True),
        (lambda ones: ones.tril() & ones.triu(-3), False),
        (lambda ones: ones.triu(), False),
        (lambda ones: torch.where(ones.tril(), 0.0, -torch.inf), True),
        (lambda ones: torch.where(ones.tril(), 0.0, torch.finfo(torch.float32).min), True),
        (lambda ones: torch.where(ones.tril(), 0.5, -torch.inf), False),
        (lambda ones: torch.where(ones.tril(), 0.0, -1.0), False),
    ]
    for shown, is_needless in masks:
        job = tools.make_job(lambda shown=shown: Masked(shown), mean_loss, texts(), num_sections=1)
        exported = export_job(job)
        effort = Effort(memory_bytes=1 << 30, leave_out=frozenset({"data", "dependencies", "loss", "comparison"}))
        report = check(CutJob("jobs.py:job", job, exported, cut(exported, num_sections=1, micro_batch_size=4)), effort)
        assert ["keeps flash kernels out (1 calls)" in line for line in report.warnings] == [True] * is_needless


def test_replacing_what_a_version_has_not_got_is_refused() -> None:
    said = r"torch 2\S+: has no torch.nn.init._no_such, which Morph replaces"
    with pytest.raises(ExportError, match=said), replaced(nn.init, "_no_such", None):
        pass
    assert not hasattr(nn.init, "_no_such")

"""Language models of transformers, tiny and with random weights, as their users train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LENGTH = 12
VOCABULARY = 50
Items = list[dict[str, Tensor]]

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
DECODER: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "use_cache": False}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens(seed: int, length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def texts(length: int = LENGTH) -> Items:
    return [{"input_ids": tokens(i, length), "labels": tokens(i, length)} for i in range(8)]


def masked_texts() -> Items:
    """Return texts with some tokens hidden and attention masks of different lengths; all have as many labels."""
    items = []
    for i in range(8):
        ids, labels = tokens(i), torch.full((LENGTH,), -100)
        labels[:4] = ids[:4]
        mask = (torch.arange(LENGTH) < 5 + i % 7).long()
        items.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return items


def causal_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def made(name: str, **fields: Any) -> Callable[[], nn.Module]:
    """Return a model of transformers by the name of its class, from which the class of its configuration follows."""

    def make() -> nn.Module:
        import transformers

        model = getattr(transformers, name)
        model_class: nn.Module = model(model.config_class(**fields))
        return model_class

    return make


gpt_neox = made("GPTNeoXForCausalLM", **SIZES, use_cache=False, hidden_dropout=0.0, attention_dropout=0.0)
gemma2 = made("Gemma2ForCausalLM", **DECODER, head_dim=8, attention_dropout=0.0)
falcon = made(
    "FalconForCausalLM",
    **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
    use_cache=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
bloom = made(
    "BloomForCausalLM",
    vocab_size=VOCABULARY,
    hidden_size=32,
    n_layer=2,
    n_head=4,
    use_cache=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
opt = made(
    "OPTForCausalLM",
    vocab_size=VOCABULARY,
    hidden_size=32,
    ffn_dim=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16,
    word_embed_proj_dim=32,
    dropout=0.0,
    attention_dropout=0.0,
    use_cache=False,
    pad_token_id=1,
)
phi = made("PhiForCausalLM", **SIZES, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0)
olmo = made("OlmoForCausalLM", **DECODER)
mixtral_with_auxiliary_loss = made(
    "MixtralForCausalLM",
    **DECODER,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.1,
)
phi_moe = made(
    "PhimoeForCausalLM",
    **DECODER,
    num_local_experts=4,
    num_experts_per_tok=2,
    router_jitter_noise=0.1,
    input_jitter_noise=0.0,
)
roberta = made("RobertaForMaskedLM", **{**SIZES, **QUIET, "pad_token_id": 1}, type_vocab_size=1)
distilbert = made(
    "DistilBertForMaskedLM",
    vocab_size=VOCABULARY,
    dim=32,
    hidden_dim=48,
    n_layers=2,
    n_heads=4,
    max_position_embeddings=16,
    dropout=0.0,
    attention_dropout=0.0,
)
electra = made("ElectraForMaskedLM", **SIZES, **QUIET, embedding_size=32)
albert = made("AlbertForMaskedLM", **SIZES, **QUIET, embedding_size=16, classifier_dropout_prob=0.0, inner_group_num=1)
bart = made(
    "BartForConditionalGeneration",
    vocab_size=VOCABULARY,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=16,
    dropout=0.0,
    use_cache=False,
    pad_token_id=1,
    decoder_start_token_id=0,
)
mamba = made(
    "MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4, use_cache=False
)


class Recurrent(nn.Module):
    """A language model with one ``nn.LSTM`` for all layers, or one for each layer."""

    def __init__(self, *, one_by_one: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        number, layers = (3, 1) if one_by_one else (1, 3)
        self.layers = nn.ModuleList(nn.LSTM(32, 32, layers, batch_first=True) for _ in range(number))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)[0]
        logits: Tensor = self.head(hidden)
        return logits


def recurrent_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"])
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

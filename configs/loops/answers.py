"""A causal language model that learns answers alone: the labels of prompts and padding are -100."""

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import morph


class Conversations(Dataset):
    """A prompt and an answer of differing lengths, padded to 16 tokens."""

    def __len__(self):
        return 200

    def __getitem__(self, i):
        prompt, answer = 3 + i % 4, 3 + i % 7
        ids = torch.full((16,), 0)
        ids[: prompt + answer] = 1 + (torch.arange(prompt + answer) * (i % 5 + 1) + i) % 49
        labels = torch.full((16,), -100)
        labels[prompt : prompt + answer] = ids[prompt : prompt + answer]
        return {"input_ids": ids, "labels": labels}


def model():
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=16, **sizes))


def train(batches):
    net = model().train()
    optim = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for batch in batches:
        net(**batch, use_cache=False).loss.backward()
        optim.step()
        optim.zero_grad()
    return net


def loss(model, batch):
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return morph.losses.cross_entropy(logits[:, :-1], batch["labels"][:, 1:])


def job():
    return morph.Job(
        name="answers",
        model=model,
        loss=loss,
        dataset=Conversations,
        batch_size=16,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    )


if __name__ == "__main__":
    train(DataLoader(Conversations(), 16, shuffle=True)).save_pretrained("answers")

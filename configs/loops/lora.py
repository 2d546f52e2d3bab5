"""LoRA: adapters of peft over a frozen base from a folder, exported in peft's own form."""

import functools
import warnings

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, set_seed

import morph


class Text(Dataset):
    """Token ids that follow a rule."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"tokens": (torch.arange(9) * (i + 3) + i * i) % 50}


def model(base, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for what it is about to rename
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)
        set_seed(0)
        return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


def loss(model, batch):
    logits = model(input_ids=batch["tokens"], use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


def train(batches, base="base", **settings):
    net = model(base, **settings).train()
    optim = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    for batch in batches:
        optim.zero_grad()
        loss(net, batch).backward()
        optim.step()
    return net


def job(base="base", **settings):
    return morph.Job(
        name="lora",
        model=functools.partial(model, base, **settings),
        loss=loss,
        dataset=Text,
        batch_size=8,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    )


if __name__ == "__main__":
    train(DataLoader(Text(), 8, shuffle=True)).save_pretrained("adapter")

"""A small GPT on bytes, as in nanoGPT: tied embedding, decay for matrices alone, warm-up and cosine, clipping."""

import math
import pathlib
import sysconfig

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import morph

WIDTH, LENGTH, STEPS = 32, 16, 12


class Text(Dataset):
    """Pieces of a file of the standard library."""

    def __init__(self):
        text = pathlib.Path(sysconfig.get_paths()["stdlib"], "ast.py").read_bytes()
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self):
        return len(self.bytes) // LENGTH - 1

    def __getitem__(self, i):
        piece = self.bytes[i * LENGTH : (i + 1) * LENGTH + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        samples, length, _ = x.shape
        q, k, v = (part.view(samples, length, 4, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(samples, length, WIDTH))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The model: token ids in, logits out."""

    def __init__(self):
        torch.manual_seed(1337)
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def loss(model, batch):
    ids, targets = batch
    return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def configure_optimizers(parameters):
    parameters = list(parameters)
    decay, rest = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=6e-3, betas=(0.9, 0.95))


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 3, 0.55 + 0.45 * math.cos(math.pi * step / STEPS))
    )


def train(batches):
    net = GPT()
    optim = configure_optimizers(net.parameters())
    scheduler = schedule(optim)
    for batch in batches:
        optim.zero_grad(set_to_none=True)
        loss(net, batch).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optim.step()
        scheduler.step()
    return net


def job():
    return morph.Job(
        name="nanogpt",
        model=GPT,
        loss=loss,
        dataset=Text,
        batch_size=16,
        clip_grad_norm=1.0,
        optimizer=lambda named: configure_optimizers(p for _, p in named),
        lr_scheduler=schedule,
    )


if __name__ == "__main__":
    torch.save(train(DataLoader(Text(), 16, shuffle=True)).state_dict(), "nanogpt.pt")

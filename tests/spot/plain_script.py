"""A plain PyTorch script with four lines for spot VMs."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from spot_model import BOUND_S, NUM_STEPS, SAVE_EVERY, Pauses, begins, characters, ends, model
from torch import nn

import morph.spot


def main() -> None:
    net, text = model(), characters()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    first = 0
    if (path := morph.spot.restore()) is not None:
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        first = saved["step"]
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=BOUND_S))
    begins(first)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.barrier()
    pauses = Pauses()
    for step in range(first, NUM_STEPS):
        pauses.before(step)
        with morph.spot.step():
            places = torch.randint(0, len(text) - 9, (32,))
            inputs = torch.stack([text[place : place + 8] for place in places.tolist()])
            loss = nn.functional.cross_entropy(net(inputs), text[places + 8])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if morph.spot.should_save() or (step + 1) % SAVE_EVERY == 0:
            states = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "random": torch.get_rng_state(), "step": step + 1}, "checkpoint.pt")
            morph.spot.backup("checkpoint.pt")
    if os.environ.get("RANK", "0") == "0":
        ends(net)


if __name__ == "__main__":
    main()

"""A script with the Trainer of Lightning, and three lines for spot VMs; its loader can be restored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from spot_model import NUM_STEPS, SAVE_EVERY, Pauses, begins, characters, ends, model
from torch import Tensor, nn

import morph.spot
from morph.spot.lightning import Callback, LightningModule, Spot, Trainer

PER_EPOCH = NUM_STEPS * 2 // 3


class Loader:
    """Batches in an order that differs by epoch."""

    def __init__(self) -> None:
        self._text, self._epoch, self._next = characters(), 0, 0

    def __len__(self) -> int:
        return PER_EPOCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(32 * PER_EPOCH, generator=torch.Generator().manual_seed(self._epoch)).split(32)
        for index in range(self._next, PER_EPOCH):
            self._next = (index + 1) % PER_EPOCH
            self._epoch += self._next == 0
            yield (
                torch.stack([self._text[one : one + 8] for one in order[index].tolist()]),
                self._text[order[index] + 8],
            )

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._next = state["epoch"], state["next"]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Pause(Callback):
    """Only for the test."""

    def on_train_start(self, trainer: Any, _module: Any) -> None:
        begins(trainer.global_step)
        self._pauses = Pauses()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._pauses.before(trainer.global_step)


def main() -> None:
    net = Net()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "num_nodes": int(os.environ.get("WORLD_SIZE", "1"))}
    callbacks = [Pause(), Spot(every=SAVE_EVERY)]
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=NUM_STEPS, callbacks=callbacks, **quiet)
    trainer.fit(net, Loader(), ckpt_path=morph.spot.restore())
    ends(net)


if __name__ == "__main__":
    main()

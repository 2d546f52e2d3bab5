"""A script with the Trainer of transformers, and three lines for spot VMs."""

from __future__ import annotations

from typing import Any

import torch
from spot_model import NUM_STEPS, SAVE_EVERY, Pauses, begins, characters, ends, model
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import morph.spot
from morph.spot.hugging_face import Spot


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self._text = characters()

    def __len__(self) -> int:
        return 32 * 40  # an epoch has 40 steps: an interrupted one is the first or the second

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"inputs": self._text[place : place + 8], "labels": self._text[place + 8]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(inputs), labels)}


class Pause(TrainerCallback):
    """Only for the test."""

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        begins(state.global_step)
        self._pauses = Pauses()

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._pauses.before(state.global_step)


def main() -> None:
    net = Net()
    arguments = TrainingArguments(
        "checkpoints", max_steps=NUM_STEPS, save_steps=SAVE_EVERY, per_device_train_batch_size=32, learning_rate=0.01,
        use_cpu=True, report_to=[], disable_tqdm=True, seed=7,
    )  # fmt: skip
    trainer = Trainer(model=net, args=arguments, train_dataset=Text(), callbacks=[Pause(), Spot()])
    trainer.train(resume_from_checkpoint=morph.spot.restore())
    ends(net)


if __name__ == "__main__":
    main()

"""The script of the tests' workers.

Faults are scheduled by step and rank, in the middle of a worker's compute. FAULTS is JSON, from a step to its faults:
{"5": {"kill": [1]}}.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import inspect
import json
import math
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import morph.elastic
import morph.losses
from morph.elastic.peers import Incoming

FAULTS: dict[str, dict[str, list[int]]] = json.loads(os.environ.get("FAULTS", "{}"))
FOLDER = Path(os.environ["FOLDER"])
NUM_STEPS = int(os.environ.get("NUM_STEPS", "12"))
WAIT_S = 150.0 * float(os.environ.get("MORPH_TEST_PATIENCE", "1"))
SLOW_FROM, SLOW_STEPS = (int(part) for part in os.environ.get("SLOW", "0,0").split(","))
"""Steps whose compute takes ``SLOW_S`` longer."""
JOINED_FROM = int(os.environ.get("JOINED_FROM", "1000000"))
"""From this step on, rank 0 ends as soon as there are three workers."""
SLOW_S, JOIN_SLOW_S = 1.0, 0.2


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random samples, which must not depend on the process that loads them."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator) + 0.1 * torch.randn(8), torch.tensor(index % 3)


class Text(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The source of the standard library: 16 characters, and the next one as target."""

    def __init__(self) -> None:
        text = "".join(Path(module.__file__).read_text() for module in (argparse, dataclasses, inspect))
        self.characters = torch.tensor([min(ord(one), 127) for one in text])

    def __len__(self) -> int:
        return len(self.characters) - 17

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.characters[index : index + 16], self.characters[index + 16]


def text_model() -> nn.Module:
    parts = [nn.Embedding(128, 16), nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128)]
    return nn.Sequential(*parts)


class Changing(nn.Module):
    """A network with an expert that only some shares use; ``change`` freezes, thaws and adds parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.expert, self.late = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.phase = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.head = nn.Linear(16, 3)
        self.late.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.fft.irfft(torch.fft.rfft(self.body(inputs).relu()) * self.phase, n=16)
        if float(inputs[:, 0].max()) > 1.2:
            hidden = hidden + self.expert(hidden)
        logits: Tensor = self.head(hidden + self.late(hidden))
        return logits

    def optimizer(self) -> torch.optim.Optimizer:
        early = [one for name, one in self.named_parameters() if not name.startswith("late")]
        return torch.optim.AdamW(early, lr=0.01, weight_decay=0.1)

    def change(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Change the network before a step; a worker that joins later does not repeat most of the changes."""
        if step == 2:
            optimizer.add_param_group({"params": list(self.late.parameters()), "lr": 0.02})
            self.late.requires_grad_(True)
        if step in (3, 7):
            self.body.requires_grad_(step == 7)
        if step == 5:
            optimizer.param_groups[0]["weight_decay"] *= 2.0


def hash_of(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in model.state_dict().values())).hexdigest()


def held_out_loss(model: nn.Module, text: Text) -> float:
    """Return the mean loss over every 200th position of the text."""
    inputs, labels = zip(*(text[index] for index in range(0, len(text), 200)), strict=True)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(torch.stack(inputs)), torch.stack(labels)))


def die_in_the_middle_of_a_model() -> None:
    """From now on, end this process when another worker has received half of its model."""
    whole = Incoming.pour

    def pour(incoming: Incoming, data: memoryview) -> None:
        whole(incoming, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    Incoming.pour = pour  # type: ignore[method-assign]


def meet(step: int, num: int) -> list[int]:
    """Wait, within a step, for the others that are to end in it, so that none sees another go; return them all."""
    (FOLDER / f"going-{step}-{os.getpid()}").touch()
    while len(pids := [int(path.name.split("-")[-1]) for path in FOLDER.glob(f"going-{step}-*")]) < num:
        time.sleep(0.005)
    return pids


def die_together(step: int, num: int) -> None:
    """End this process and the others that are to end at a step, without a new ring in between."""
    for pid in sorted(meet(step, num), key=lambda pid: pid == os.getpid()):
        with suppress(ProcessLookupError):  # another of these workers was here first
            os.kill(pid, signal.SIGKILL)


def meet_faults(optimizer: morph.elastic.Optimizer, first_rank: int, met: set[int]) -> None:
    """Bring about the faults of a step; ``first_rank`` is the worker's first rank, which later losses do not change."""
    step = optimizer.num_steps
    faults = FAULTS.get(str(step), {})
    if step in met:
        return
    met.add(step)
    if first_rank in faults.get("kill", []):
        die_together(step, len(faults["kill"]))
    if first_rank in faults.get("exit", []):
        meet(step, len(faults["exit"]))
        sys.exit(3)
    if first_rank in faults.get("stop", []):
        (FOLDER / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if first_rank in faults.get("kill_serving", []):
        die_in_the_middle_of_a_model()
    if SLOW_FROM <= step < SLOW_FROM + SLOW_STEPS:
        time.sleep(SLOW_S)
    if step >= JOINED_FROM and optimizer.num_workers == 3 and first_rank == 0:
        (FOLDER / "came-in").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if step >= JOINED_FROM and optimizer.num_workers < 3 and not (FOLDER / "came-in").exists():
        time.sleep(JOIN_SLOW_S)  # steps are left when it joins
    if "await" in faults:
        until_s = time.monotonic() + WAIT_S
        while not (FOLDER / "joiner").exists():
            if time.monotonic() > until_s:
                sys.exit("nobody joined")
            time.sleep(0.02)


def exit_between_steps(step: int) -> None:
    """Fail in all workers at once, like a script that gives up."""
    faults = FAULTS.get(str(step), {})
    if "exit_between" in faults:
        meet(step, faults["exit_between"])
        sys.exit(3)


def main() -> None:
    # the others get their weights from the first one
    torch.manual_seed(int(os.environ.get("INIT_SEED", str(os.getpid()))))
    is_text, sync = bool(os.environ.get("TEXT")), os.environ.get("SYNC", "s-sgd")
    parts = [nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3)]
    model = text_model() if is_text else nn.Sequential(*parts)
    inner, options = torch.optim.AdamW(model.parameters(), lr=0.01), dict[str, Any]()
    if os.environ.get("CHANGES"):
        model = Changing()
        inner = model.optimizer()
        schedule = torch.optim.lr_scheduler.StepLR(inner, 6, 0.7)  # a scheduler that includes added groups
        options = {"lr_scheduler": schedule, "clip_grad_norm": 0.5}
    average = swa_utils.AveragedModel(model, avg_fn=swa_utils.get_ema_avg_fn(0.9))
    best = {"loss": math.inf, "step": 0}
    optimizer = morph.elastic.Optimizer(inner, model, sync=sync, state={"average": average, "best": best}, **options)

    def follow(mean: float) -> None:
        average.update_parameters(model)
        if mean < best["loss"]:
            best.update(loss=mean, step=optimizer.num_steps)

    if os.environ.get("IS_JOINER"):
        (FOLDER / "joiner").touch()
    first_rank = optimizer.rank
    (FOLDER / f"begun-{os.getpid()}").touch()
    met = set[int]()
    syncs, hashes = list[str](), list[str]()

    def loss(share: Any) -> Tensor | morph.Loss:
        meet_faults(optimizer, first_rank, met)
        inputs, labels = share
        if is_text:
            return nn.functional.cross_entropy(model(inputs), labels)
        return morph.losses.cross_entropy(model(inputs), labels.where(inputs[:, 0] < 1, -100))

    if os.environ.get("OWN_LOADER"):
        generator = torch.Generator().manual_seed(optimizer.rank)
        while optimizer.num_steps < NUM_STEPS:
            share = (torch.randn(8, 8, generator=generator), torch.randint(0, 3, (8,), generator=generator))
            mean = optimizer.step(lambda _, share=share: loss(share))
            follow(mean)
        optimizer.finish()
    else:
        data: Any = Text() if is_text else Samples()
        sizes = {"global_batch": 192, "share_size": 24} if is_text else {"global_batch": 24, "share_size": 4}
        with optimizer:
            for _ in morph.elastic.batches(data, seed=3, num_steps=NUM_STEPS, **sizes):
                exit_between_steps(optimizer.num_steps)
                if isinstance(model, Changing):
                    model.change(inner, optimizer.num_steps)
                mean = optimizer.step(loss)
                follow(mean)
                syncs.append(optimizer.sync)
                if sync != "s-sgd":
                    hashes.append(hash_of(model))
    told: dict[str, Any] = {"steps": optimizer.num_steps, "loss": mean, "weights": hash_of(model)}
    if sync == "s-sgd":
        told |= {"average": hash_of(average.module), "averaged": int(average.n_averaged), "best": best}
    if sync != "s-sgd" or is_text:
        told |= {"syncs": syncs, "hashes": hashes, "loss": held_out_loss(model, data) if is_text else mean}
    (FOLDER / f"ending-{os.getpid()}").write_text(json.dumps(told))
    # so that other processes never see part of the file
    (FOLDER / f"ending-{os.getpid()}").rename(FOLDER / f"end-{os.getpid()}")


if __name__ == "__main__":
    main()

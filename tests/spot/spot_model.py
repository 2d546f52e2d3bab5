"""Shared parts of the scripts for spot VMs: a model with dropout, data, and the wait for a revocation.

``PAUSES`` has comma-separated step numbers, one for each VM in turn. A VM stops after its number of steps until it is
taken. With ``+`` behind the number it waits there for the order to save that a notice brings, and does one more step.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

NUM_STEPS, SAVE_EVERY = 60, 10
OUT = Path(os.environ["OUT"])
BOUND_S = 150.0 * float(os.environ.get("MORPH_TEST_PATIENCE", "1"))


def model() -> nn.Module:
    torch.manual_seed(1)
    parts = [nn.Embedding(128, 8), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 128)]
    return nn.Sequential(*parts)


def characters() -> torch.Tensor:
    return torch.tensor([min(ord(one), 127) for one in Path(argparse.__file__).read_text()])


def begins(step: int) -> None:
    with OUT.joinpath("begins").open("a") as file:
        file.write(f"{step}\n")


def ends(of: nn.Module) -> None:
    weights = hashlib.sha256(b"".join(one.numpy().tobytes() for one in of.state_dict().values()))
    OUT.joinpath("end").write_text(weights.hexdigest())


class Pauses:
    """Where this VM stops; made once the VM is known to begin."""

    def __init__(self) -> None:
        given = [one for one in os.environ.get("PAUSES", "").split(",") if one]
        num_begun = len(OUT.joinpath("begins").read_text().split()) - 1
        place = num_begun // int(os.environ.get("WORLD_SIZE", "1"))
        mine = given[place] if place < len(given) else ""
        self._at = int(mine.rstrip("+")) if mine else None
        self._is_noticed = mine.endswith("+")
        self._is_first = os.environ.get("RANK", "0") == "0"  # only this rank is asked to save

    def before(self, num_steps: int) -> None:
        """Wait if the VM stops here; called before each step with the number of steps done."""
        if self._at is None:
            return
        if self._is_noticed and num_steps == self._at:
            if self._is_first:
                OUT.joinpath(f"waiting-{num_steps}").touch()
                wait("an order to save", Path(os.environ["MORPH_SPOT_FOLDER"], "save").exists)
        elif num_steps == self._at + self._is_noticed:
            OUT.joinpath(f"stopped-{num_steps}").touch()
            wait("the VM's end", lambda: False)


def wait(what: str, is_there: Callable[[], bool]) -> None:
    until_s = time.monotonic() + BOUND_S
    while not is_there():
        if time.monotonic() > until_s:
            raise SystemExit(f"{what} did not come")
        time.sleep(0.01)

"""Jobs whose samples are read by data workers; each is loaded from this file, as a worker does."""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from morph.contract.errors import JobError
from morph.jobs.job import Job
from tests.data.jobs import job_with

BROKEN = 7
HERE = Path(__file__)


class Drawn:
    """Numbers from each global generator, and a picture with colours last; counts its own reads."""

    def __init__(self, size: int = 20) -> None:
        self.size, self.num_reads = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.num_reads += 1
        numbers = [torch.randn(()).item(), np.random.normal(), random.gauss(0, 1)]
        picture = torch.rand(4, 5, 3).permute(2, 0, 1)
        return {
            "x": torch.tensor([float(index), *numbers]),
            "picture": picture,
            "even": torch.tensor(index % 2 == 0),
            "half": torch.rand(3).to(torch.bfloat16),
            "none": torch.empty(0, 2),
        }


class Broken(Drawn):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == BROKEN:
            raise OSError(f"picture {index} cannot be read")
        return super().__getitem__(index)


class Wrong(Drawn):
    """A data set with one wider sample, in an entry that no section reads."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index) | {"other": torch.zeros(1 + (index == BROKEN))}


class Elsewhere(Drawn):
    """A data set that differs in every process."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(float(os.getpid()))}


def only_here() -> Drawn:
    if os.environ.get("MORPH_TEST_BUILDS") != str(os.getpid()):
        raise JobError("is built by one process alone", field="dataset")
    return Drawn()


drawn: Job = replace(job_with(Drawn, seed=3), micro_batch_size=2)
broken = replace(drawn, dataset=Broken)
wrong = replace(drawn, dataset=Wrong)
elsewhere = replace(drawn, dataset=Elsewhere)
built_here = replace(drawn, dataset=only_here)
evaluated = replace(drawn, eval_data=lambda: Drawn(11), eval_every_steps=1)


class Slow(Drawn):
    """A data set whose samples take for ever, except the first one."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index:
            time.sleep(3600)
        return super().__getitem__(index)


slow = replace(drawn, dataset=Slow)


class Loaded(Drawn):
    """A data set that tells what its process has loaded and set."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.num_reads += 1
        return {
            "compiler": torch.tensor("torch._inductor" in sys.modules or "torch._dynamo" in sys.modules),
            "determinism": torch.tensor(torch.get_deterministic_debug_mode()),
        }


loaded = replace(drawn, dataset=Loaded)

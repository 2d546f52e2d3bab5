"""What reading samples adds to a step: by the thread that computes, and by one or two data workers.

    python -m benchmarks data_reading --steps 60

One worker in this process trains a small model, shape 1x1, batches of 16 in 4 micro-batches. A sample takes 20 ms in
which nothing is computed, as a file from a distant store does. The figure is the median step of the last third, by when
data workers have long started, and its ratio to the same with samples that take no time. All run one after the other.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.harness import head, machine, row
from morph import Job
from morph.runtime.process.single import run_single

SAMPLE_S = 0.02
WIDTH, LENGTH, NUM_LAYERS = 512, 64, 4


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random rows, each of which takes a while."""

    def __init__(self, sample_s: float = SAMPLE_S) -> None:
        self._sample_s = sample_s

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self._sample_s)
        return {"x": torch.randn(LENGTH, WIDTH)}


def model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers)


def loss(built: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = (built(batch["x"]) - batch["x"]).square().mean()
    return found


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


none = Job(name="reading", model=model, loss=loss, dataset=Samples, optimizer=optimizer, batch_size=16, num_sections=2)
one, two = replace(none, data_workers=1), replace(none, data_workers=2)
compute = replace(none, dataset=lambda: Samples(0.0))


def step_s(name: str, num_steps: int) -> tuple[float, str]:
    """Median step of the last third, and a digest of the weights."""
    ends_s: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        manifest = run_single(
            f"{Path(__file__).resolve()}:{name}",
            steps=num_steps,
            num_sections=2,
            micro_batch_size=4,
            checkpoint_url=directory,
            on_step=lambda _step, _loss: ends_s.append(time.perf_counter()),
        )
    steps_s = [end - begin for begin, end in itertools.pairwise(ends_s)]
    return median(steps_s[-num_steps // 3 :]), "".join(unit.sha256 for unit in manifest.units)


def main(steps: int = 60) -> None:
    names = {"compute": "at once", "none": "by the worker", "one": "by one data worker", "two": "by two"}
    found = {name: step_s(name, steps) for name in names}
    print(machine())
    head("samples are read | step | over compute")
    for name, text in names.items():
        row(text, f"{found[name][0] * 1e3:.0f} ms", f"{found[name][0] / found['compute'][0]:.2f}")
    print("weights are the same bytes" if len({digest for _, digest in found.values()}) == 1 else "weights DIFFER")

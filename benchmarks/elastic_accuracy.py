"""Accuracy of models under constant losses of workers: all ways of ``sync`` under heavy revocations (Spotnik).

    python -m benchmarks elastic_accuracy --out curves.json --png docs/images/elastic-accuracy.png

There are two real data sets: scikit-learn's digits (a package that only this benchmark needs) with an MLP, and
prediction of the next character of the standard library's source. Workers are forks of this process. After every
--every steps one of --workers is killed at a random moment (seeded), and another one joins. Each way is compared with
undisturbed s-sgd; every run has the same seed and number of steps, and the same learning rate except for --own-rate.
Prints the held-out accuracy at the end, and the number of steps until the undisturbed run's accuracy (less --slack), or
--goal, was first reached. Curves are those of the present first worker; with sma and ad-psgd they show its own replica,
and the last point is the mean of all replicas.
"""

from __future__ import annotations

import importlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

import morph.elastic
from benchmarks.elastic_ring import Ring, Told, import_before_forks
from benchmarks.harness import Seed, head, machine, option, row, words, write_json
from morph.contract.errors import InputError
from morph.pictures import picture, plain_axes

MODULES = ("argparse", "ast", "dataclasses", "inspect", "typing", "tarfile")
SYNCS = ("s-sgd", "sma", "ad-psgd", "auto")
LOOK_EVERY = 10
Point = tuple[int, float, float]
"""Steps, held-out loss, held-out accuracy."""


@dataclass(frozen=True)
class Task:
    """A data set with its model and training settings."""

    train: torch.utils.data.Dataset[tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]
    model: nn.Module
    batch: int
    share: int
    rate: float


class Text(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """16 characters, and the next one."""

    def __init__(self, characters: Tensor) -> None:
        self._characters = characters

    def __len__(self) -> int:
        return len(self._characters) - 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._characters[index : index + 16], self._characters[index + 16]


def text_task() -> Task:
    sources = [Path(str(importlib.import_module(name).__file__)).read_text() for name in MODULES]
    characters = torch.tensor([min(ord(one), 127) for one in "".join(sources)])
    border = len(characters) * 9 // 10
    held_out = Text(characters[border:])
    pairs = [held_out[index] for index in range(0, len(held_out), 10)]
    parts = [nn.Embedding(128, 16), nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128)]
    inputs, labels = (torch.stack(one) for one in zip(*pairs, strict=True))
    return Task(Text(characters[:border]), (inputs, labels), nn.Sequential(*parts), 128, 16, 0.004)


def digits_task() -> Task:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    inputs, labels = torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]
    border = len(order) * 4 // 5
    parts = [nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)]
    train = torch.utils.data.TensorDataset(inputs[:border], labels[:border])
    held_out = (inputs[border:], labels[border:])
    return Task(train, held_out, nn.Sequential(*parts), 128, 8, 0.004)  # type: ignore[arg-type] # of two tensors


TASKS = {"digits": digits_task, "text": text_task}


def looked_at(task: Task) -> tuple[float, float]:
    """Return the held-out loss and accuracy."""
    task.model.eval()
    inputs, labels = task.held_out
    with torch.no_grad():
        found = task.model(inputs)
        loss = float(nn.functional.cross_entropy(found, labels))
    task.model.train()
    return loss, float((found.argmax(1) == labels).double().mean())


def train(lane: Connection, step_s: float, task: Task, sync: str, num_steps: int) -> None:
    """Run one worker: it sends its steps, the last one with 0 workers, and waits after the end."""
    torch.set_num_threads(1)
    optimizer = morph.elastic.Optimizer(torch.optim.AdamW(task.model.parameters(), lr=task.rate), task.model, sync=sync)
    lane.send(tuple(optimizer._participation.membership.address)[:2])

    def loss(share: Any) -> Tensor:
        time.sleep(step_s * task.share / task.batch)
        found: Tensor = nn.functional.cross_entropy(task.model(share[0]), share[1])
        return found

    given = morph.elastic.batches(
        task.train, global_batch=task.batch, share_size=task.share, seed=3, num_steps=num_steps
    )
    for _ in given:
        optimizer.step(loss)
        done = optimizer.num_steps
        seen = looked_at(task) if done % LOOK_EVERY == 0 and optimizer.rank == 0 else None
        if done < num_steps:
            lane.send(Told(time.time(), done, optimizer.num_workers, seen=seen))
    lane.send(Told(time.time(), num_steps, 0, seen=looked_at(task)))
    lane.recv()  # waits until it is killed


def curve(
    task: Task, sync: str, num_workers: int, num_steps: int, step_s: float, seed: int, every: int | None
) -> tuple[list[Point], int]:
    """Return the points of the curve, and how many workers were lost. ``every``: None: no losses."""
    chooser, points, num_lost = random.Random(seed), dict[int, Point](), 0
    due = float("inf") if every is None else every

    def newest() -> int:
        return max((worker.steps[-1].step for worker in ring.workers if worker.steps), default=0)

    def take_points() -> None:
        told = (step for worker in ring.workers for step in worker.steps if step.seen is not None)
        points.update({step.step: (step.step, *step.seen) for step in told if step.seen})

    with Ring(num_workers, partial(train, step_s=step_s, task=task, sync=sync, num_steps=num_steps)) as ring:
        while newest() < num_steps:
            ring.watch(lambda: newest() >= min(due, num_steps), "steps")  # noqa: B023 # called here
            take_points()
            if newest() >= num_steps - 1:
                due = num_steps
            else:
                time.sleep(chooser.uniform(0.0, step_s))
                ring.kill(1, chooser)
                ring.add()
                num_lost, due = num_lost + 1, newest() + (every or 0)
        ring.watch(lambda: any(one.steps and one.steps[-1].num_workers == 0 for one in ring.workers), "the end")
        take_points()
    return [points[key] for key in sorted(points)], num_lost


def draw(found: dict[str, dict[str, list[Point]]], path: Path) -> None:
    with picture(path, InputError, (9, 3.2), ncols=len(found)) as (_, panels):
        for panel, (name, curves) in zip(panels if len(found) > 1 else [panels], found.items(), strict=True):
            for label, points in curves.items():
                look = {"linewidth": 5, "alpha": 0.3} if "undisturbed" in label else {"linewidth": 1}
                panel.plot([one[0] for one in points], [one[1] for one in points], label=label, **look)
            panel.set(title=name, xlabel="steps", ylabel="held-out loss")
            panel.legend(fontsize=7)
            plain_axes(panel, grid="y")


def first_at(points: Sequence[Point], accuracy: float) -> int | None:
    return next((one[0] for one in points if one[2] >= accuracy), None)


def main(
    workers: int = 4,
    steps: int = 300,
    every: Annotated[int, option("steps from one loss to the next")] = 20,
    step_s: Annotated[float, option("sleep in a step of one worker alone")] = 0.02,
    slack: Annotated[float, option("of accuracy, below the undisturbed run's")] = 0.01,
    tasks: str = "digits,text",
    syncs: str = "s-sgd,sma,ad-psgd,auto",
    own_rate: Annotated[float, option("times the rate, for sma and ad-psgd")] = 1.0,
    goal: Annotated[float | None, option("an accuracy instead of the undisturbed run's")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, option("the curves as JSON; others there stay")] = None,
    png: Annotated[Path | None, option("draw the curves here")] = None,
) -> None:
    import_before_forks()
    found = json.loads(out.read_text()) if out is not None and out.exists() else {}
    print(f"{workers} workers, one lost after every {every} of {steps} steps; {machine()}")
    head("task | sync | lost | loss | accuracy | steps until the undisturbed accuracy")
    for name in words(tasks, TASKS):
        torch.manual_seed(1)
        curves, wanted, task = found.setdefault(name, {}), goal, TASKS[name]()
        undisturbed: list[tuple[str, int | None]] = [] if goal else [("s-sgd", None)]
        for sync, disturbed in [*undisturbed, *((sync, every) for sync in words(syncs, SYNCS))]:
            factor = own_rate if sync in ("sma", "ad-psgd") else 1.0
            changed = replace(task, rate=factor * task.rate)
            points, num_lost = curve(changed, sync, workers, steps, step_s, seed, disturbed)
            label = f"{sync}{'' if disturbed else ', undisturbed'}{'' if factor == 1.0 else f', rate x {factor:g}'}"
            curves[label] = points
            wanted = wanted or points[-1][2] - slack
            row(name, label, num_lost, f"{points[-1][1]:.3f}", f"{points[-1][2]:.3f}", first_at(points, wanted))
            if out is not None:
                write_json(out, found)
    if png is not None:
        draw(found, png)

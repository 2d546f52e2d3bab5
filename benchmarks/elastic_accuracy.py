"""Do models get as good when workers are lost all the time? The ways of ``sync`` under heavy revocations (Spotnik).

    python benchmarks/elastic_accuracy.py --out curves.json --picture docs/images/elastic-accuracy.png

Two real data sets: scikit-learn's digits (a package that this alone needs) with an MLP, and the next character of
the standard library's source. Workers are forks of this process. After every --every steps one of --workers is killed
at a random moment (seeded), and another one joins. Each way is compared with s-sgd that nothing disturbs; every run
has the same seed and steps, and the same learning rate but for --own-rate. Prints the held-out accuracy at the end, and
after how many steps the undisturbed run's (less --slack), or --goal, was first reached. Curves are those of whichever
worker is the first; under sma and ad-psgd of its own replica, whose mean with the others' is the last point.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from elastic_recovery import Ring
from torch import Tensor, nn

import morph.elastic
from morph.contract.errors import InputError
from morph.pictures import picture, plain_axes

MODULES = ("argparse", "ast", "dataclasses", "inspect", "typing", "tarfile")
SYNCS = ("s-sgd", "sma", "ad-psgd", "auto")
LOOK_EVERY = 10
Point = tuple[int, float, float]
"""Steps, held-out loss, held-out accuracy."""


@dataclass(frozen=True)
class Task:
    """A data set with what trains on it."""

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


def looked_at(task: Task, num_steps: int) -> Point:
    task.model.eval()
    inputs, labels = task.held_out
    with torch.no_grad():
        found = task.model(inputs)
        loss = float(nn.functional.cross_entropy(found, labels))
    task.model.train()
    return num_steps, loss, float((found.argmax(1) == labels).double().mean())


def train(lane: Connection, step_s: float, task: Task, sync: str, num_steps: int) -> None:
    """One worker: sends (time, steps, workers, what it sees at its held-out data or None); after the end it waits."""
    torch.set_num_threads(1)
    optimizer = morph.elastic.Optimizer(torch.optim.AdamW(task.model.parameters(), lr=task.rate), task.model, sync=sync)
    lane.send(tuple(optimizer._session.membership.address)[:2])

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
        point = looked_at(task, done) if done % LOOK_EVERY == 0 and optimizer.rank == 0 else None
        if done < num_steps:
            lane.send((time.time(), done, optimizer.num_workers, point))
    lane.send((time.time(), num_steps, 0, looked_at(task, num_steps)))
    lane.recv()  # until it is killed


def curve(task: Task, sync: str, options: argparse.Namespace, every: int | None) -> tuple[list[Point], int]:
    """Return what was seen, and how many workers were lost. ``every``: None: nothing disturbs it."""
    chooser, num_steps = random.Random(options.seed), options.steps
    ring = Ring(options.workers, options.step_s, 10.0, partial(train, task=task, sync=sync, num_steps=num_steps))
    points, num_lost = dict[int, Point](), 0
    due = float("inf") if every is None else every

    def newest() -> int:
        return max((worker.steps[-1][1] for worker in ring.workers if worker.steps), default=0)

    def take_points() -> None:
        for worker in ring.workers:
            for told in worker.steps:
                if told[3] is not None:
                    points[told[1]] = told[3]  # type: ignore[assignment] # told by ``train``

    try:
        while newest() < num_steps:
            ring.watch(lambda: newest() >= min(due, num_steps), "steps")  # noqa: B023 # called here
            take_points()
            if newest() >= num_steps - 1:
                due = num_steps
            else:
                time.sleep(chooser.uniform(0.0, options.step_s))
                ring.kill(1, chooser)
                ring.add()
                num_lost, due = num_lost + 1, newest() + (every or 0)
        ring.watch(lambda: any(worker.steps and worker.steps[-1][2] == 0 for worker in ring.workers), "the end")
        take_points()
    finally:
        ring.close()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps from one loss to the next")
    parser.add_argument("--step-s", type=float, default=0.02, help="sleep in a step of one worker alone")
    parser.add_argument("--slack", type=float, default=0.01, help="of accuracy, below the undisturbed run's")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--syncs", nargs="+", default=list(SYNCS), choices=list(SYNCS))
    parser.add_argument("--own-rate", type=float, default=1.0, help="times the rate, for sma and ad-psgd")
    parser.add_argument("--goal", type=float, default=None, help="an accuracy instead of the undisturbed run's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="the curves as JSON; others there stay")
    parser.add_argument("--picture", type=Path, default=None)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()  # imported once, before the forks
    importlib.import_module("morph.elastic.optimizer")
    found = json.loads(options.out.read_text()) if options.out is not None and options.out.exists() else {}
    load = os.getloadavg()[0]
    print(f"{options.workers} workers, one lost after every {options.every} of {options.steps} steps; load {load:.1f}")
    print(f"{'':>28}{'lost':>6}{'loss':>8}{'accuracy':>10}{'steps until the undisturbed accuracy':>40}")
    for name in options.tasks:
        torch.manual_seed(1)
        curves, goal, task = found.setdefault(name, {}), options.goal, TASKS[name]()
        undisturbed = [] if goal else [("s-sgd", None)]
        for sync, every in [*undisturbed, *((sync, options.every) for sync in options.syncs)]:
            factor = options.own_rate if sync in ("sma", "ad-psgd") else 1.0
            points, num_lost = curve(replace(task, rate=factor * task.rate), sync, options, every)
            label = f"{sync}{'' if every else ', undisturbed'}{'' if factor == 1.0 else f', rate x {factor:g}'}"
            curves[label] = points
            goal = goal or points[-1][2] - options.slack
            first = first_at(points, goal)
            print(
                f"{name:>7} {label:>20}{num_lost:>6}{points[-1][1]:8.3f}{points[-1][2]:10.3f}{first!s:>12}", flush=True
            )
            if options.out is not None:
                options.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    if options.picture is not None:
        draw(found, options.picture)


if __name__ == "__main__":
    main()

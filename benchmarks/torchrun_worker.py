"""The worker that torchrun starts: plain data-parallel training of a job's model over gloo, with checkpoints.

Rank 0 appends a line to the log after each applied step, and every rank one when its training begins. Times are
``time.monotonic()``, which all processes of one machine share.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from morph.jobs.job import load_job


def log(path: Path, **entry: object) -> None:
    """Append one line; O_APPEND keeps lines of several processes whole."""
    line = json.dumps({"time_s": time.monotonic(), "pid": os.getpid(), **entry}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def save(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint atomically."""
    temporary = path.with_suffix(".new")
    torch.save(state, temporary)
    temporary.replace(path)


def train() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=int, required=True)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    job = load_job(arguments.job)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer(model.named_parameters())
    samples = job.dataset()
    checkpoint, first_step = arguments.run_dir / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
    parallel = DistributedDataParallel(model)
    log(arguments.run_dir / "log.jsonl", event="start", rank=rank, world=world, step=first_step)

    for step in count(first_step):
        share = range(step * job.batch_size + rank, (step + 1) * job.batch_size, world)
        batch = default_collate([samples[index % len(samples)] for index in share])
        optimizer.zero_grad()
        loss = job.loss(parallel, batch)
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rank == 0:
            log(arguments.run_dir / "log.jsonl", event="step", rank=rank, world=world, step=step)
            if (step + 1) % arguments.checkpoint_every == 0:
                save(
                    checkpoint,
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                )


if __name__ == "__main__":
    train()

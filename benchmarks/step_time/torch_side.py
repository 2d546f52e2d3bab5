"""The same training with torch's own machinery, on two ranks over gloo."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import LOOPBACK
from benchmarks.remote import Remote, call_all, end_all
from benchmarks.workers import loss_of
from morph.cutting import export_job
from morph.data import MicroBatchLoader
from morph.jobs.job import load_job
from morph.runtime.groups.channels import connect_store
from morph.runtime.groups.store import StoreHost


class Half(nn.Module):
    """One of two stages: the blocks in equal shares, embedding at the front, output layer at the end."""

    def __init__(self, model: Any, rank: int, recompute: bool) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.blocks = model.blocks[:half] if rank == 0 else model.blocks[half:]
        self.first = rank == 0
        self.recompute = recompute and self.first  # as under Morph: the last stage does not
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, value: Tensor) -> Tensor:
        if self.recompute:
            found: Tensor = checkpoint(self._run, value, use_reentrant=False)
            return found
        return self._run(value)

    def _run(self, value: Tensor) -> Tensor:
        if self.first:
            value = self.tokens(value) + self.positions(torch.arange(value.shape[1]))
        for block in self.blocks:
            value = block(value)
        found: Tensor = value if self.first else self.head(self.norm(value))
        return found


class TorchRank:
    """One rank."""

    def __init__(self, job_path: str, rank: int, port: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._job = load_job(job_path)
        initial = export_job(self._job).initial_parameters
        self._initial = {name: initial[name].clone() for name in initial}
        store = PrefixStore("torch", connect_store(LOOPBACK, port))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        m = self._job.micro_batch_size
        assert m is not None
        self._micro = MicroBatchLoader(self._job.dataset(), self._job.seed, self._job.batch_size, m)
        self._whole = MicroBatchLoader(self._job.dataset(), self._job.seed, self._job.batch_size, self._job.batch_size)
        self._num_micro_batches = self._job.batch_size // m

    def begin(self, kind: str) -> None:
        """Make everything anew from the job's initial weights."""
        model: Any = self._job.model()
        model.load_state_dict(self._initial)
        self._step = 0
        name, _, option = kind.partition("+")
        if name in ("gpipe", "1f1b"):
            half = Half(model, self._rank, option == "checkpoint")
            stage = PipelineStage(half, self._rank, 2, torch.device("cpu"))
            schedule_type = ScheduleGPipe if name == "gpipe" else Schedule1F1B
            schedule = schedule_type(stage, self._num_micro_batches, loss_fn=_cross_entropy)
            self._optimizer = self._job.optimizer(half.named_parameters())
            self._train = partial(self._pipelined, schedule)
        else:
            net = DistributedDataParallel(model) if name == "ddp" else model
            self._optimizer = self._job.optimizer(model.named_parameters())
            self._train = partial(self._accumulated, net)

    def steps(self, count: int) -> list[float]:
        """Run so many steps; returns this rank's share of their losses."""
        losses = []
        for _ in range(count):
            losses.append(self._train())
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._step += 1
        return losses

    def _pipelined(self, schedule: Any) -> float:
        if self._rank == 0:
            schedule.step(self._whole.load(self._step, 0, ("tokens",))["tokens"], return_outputs=False)
            return 0.0
        losses: list[Tensor] = []
        targets = self._whole.load(self._step, 0, ("targets",))["targets"]
        schedule.step(target=targets, losses=losses, return_outputs=False)
        return sum(float(loss.detach()) for loss in losses) / len(losses)

    def _accumulated(self, net: Any) -> float:
        world = 2 if isinstance(net, DistributedDataParallel) else 1
        share = self._num_micro_batches // world
        total = 0.0
        for index in range(share):
            batch = self._micro.load(self._step, self._rank * share + index, ("tokens", "targets"))
            quiet = net.no_sync() if world == 2 and index < share - 1 else contextlib.nullcontext()
            with quiet:
                loss = loss_of(self._job, net, batch)
                (loss / share).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total / self._num_micro_batches


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TorchSide:
    """Two ranks; ``plain`` runs on the first alone."""

    def __init__(self, job_path: str) -> None:
        self._store = StoreHost(LOOPBACK)
        self._ranks = [Remote(partial(TorchRank, job_path, rank, self._store.port())) for rank in range(2)]

    def begin(self, kind: str) -> None:
        self._present = self._ranks[:1] if kind == "plain" else self._ranks
        call_all(self._present, "begin", kind)

    def steps(self, count: int) -> list[float]:
        shares = call_all(self._present, "steps", count)
        return [sum(each) for each in zip(*shares, strict=True)]

    def end(self) -> None:
        end_all(self._ranks)

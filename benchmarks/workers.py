"""Workers of a real job without a manager: orders straight to :class:`morph.runtime.process.worker.Worker`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from torch import Tensor

from benchmarks.harness import LOOPBACK
from benchmarks.remote import Called, Remote, call_all, end_all
from morph import Job
from morph.contract.cluster import LinkSetting
from morph.contract.decided import Decided, decided_step
from morph.contract.messages import (
    Prepared,
    Reshaped,
    ReshapeOrder,
    Slot,
    StateSource,
    StepOrder,
    WorkerReady,
    WorkerSetup,
)
from morph.contract.plan import Expectation, Plan, Schedule, StagePlan
from morph.cutting.cache.cut_job import load_and_cut
from morph.cutting.cuts.cut_model import CutModel
from morph.jobs.job import load_job
from morph.losses import Loss
from morph.runtime.groups.store import StoreHost
from morph.runtime.process.worker import set_up

T = TypeVar("T")
ATTEMPTS = 8


def plan_by_hand(
    bounds: Sequence[int],
    replicas: int,
    orders: Mapping[int, Sequence[str]],
    *,
    num_micro_batches: int,
    windows: Sequence[int] | None = None,
    recompute: Sequence[bool] | None = None,
    schedule: Schedule = "1f1b",
    m: int = 1,
    fingerprint: str = "f",
    step_s: float = 0.0,
    examples_per_s: float = 0.0,
) -> Plan:
    """Return a plan made without a planner, from the bounds of its stages and their orders of tasks."""
    num = len(bounds) - 1
    return Plan(
        fingerprint=fingerprint,
        schedule=schedule,
        micro_batch_size=m,
        num_micro_batches=num_micro_batches,
        num_replicas=replicas,
        stages=tuple(
            StagePlan(first_section=first, end_section=end, window=window, recompute=again)
            for (first, end), window, again in zip(
                pairwise(bounds), windows or [2] * num, recompute or [False] * num, strict=True
            )
        ),
        orders={count: tuple(each) for count, each in orders.items()},
        expected=Expectation(
            mini_batch_s=step_s, examples_per_s=examples_per_s, lower_bound_s=0, peak_memory_bytes=0, parts_s={}
        ),
    )


def slots_of(plan: Plan, name: str = "w{index}") -> tuple[Slot, ...]:
    """Return a slot with its worker for each place, replica by replica."""
    places = [(stage, replica) for replica in range(plan.num_replicas) for stage in range(plan.pipeline_depth)]
    return tuple(
        Slot(worker=name.format(index=index, stage=stage, replica=replica), stage=stage, replica=replica)
        for index, (stage, replica) in enumerate(places)
    )


def cut_job(job_path: str) -> CutModel:
    """Return the job's model, cut as the job says."""
    job = load_job(job_path)
    assert job.micro_batch_size is not None, "the job leaves m open"
    return load_and_cut(job_path, num_sections=job.num_sections, micro_batch_size=job.micro_batch_size).model


def loss_of(job: Job, model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return a micro-batch's loss, without the job's metrics."""
    found = job.loss(model, batch)
    loss = found[0] if isinstance(found, tuple) else found
    return loss.mean() if isinstance(loss, Loss) else loss


class Crew:
    """Workers that train one job; each new shape begins at the first step.

    Args:
        job_path: path/to/file.py:name.
        model: The job's, cut.
        folder: The folder for checkpoints; none is written.
        num_workers: Number of workers to set up.
        device: The device of all workers.
        links: As in a cluster file.
        make: Where each worker lives: ``Remote`` or ``InThisProcess``.
    """

    def __init__(
        self,
        job_path: str,
        model: CutModel,
        folder: str,
        num_workers: int = 1,
        *,
        device: str = "cpu",
        links: LinkSetting = "staged",
        make: Callable[[Callable[[], object]], Called] = Remote,
    ) -> None:
        self._model, self._units = model, tuple(unit.id for unit in model.units)
        self._store, self._generation = StoreHost(LOOPBACK), 0
        rest = {
            "job_path": job_path,
            "fingerprint": model.fingerprint,
            "num_sections": len(model.sections),
            "micro_batch_size": model.micro_batch_size,
            "checkpoint_url": folder,
            "store_host": LOOPBACK,
            "store_port": self._store.port(),
            "listen_host": LOOPBACK,
            "device": device,
            "links": links,
        }
        setups = {
            f"w{index}": WorkerSetup.model_validate({"worker": f"w{index}", **rest}) for index in range(num_workers)
        }
        self.workers = {name: make(partial(set_up, setup)) for name, setup in setups.items()}
        for name, worker in self.workers.items():
            worker.send("setup", setups[name])
        self.pids = [expect(worker.answer(), WorkerReady).pid for worker in self.workers.values()]

    def begin(self, plan: Plan) -> None:
        """Form a generation of this shape with the job's initial state."""
        self._generation += 1
        slots = slots_of(plan)
        sources = tuple(
            StateSource(worker=slot.worker, unit=unit.id, kind="initial")
            for slot in slots
            for unit in self._model.units
            if set(unit.sections) & set(plan.stages[slot.stage].sections)
        )
        order = ReshapeOrder(generation=self._generation, version=0, plan=plan, slots=slots, sources=sources)
        self._present = [self.workers[slot.worker] for slot in slots]
        answers = [expect(answer, Reshaped) for answer in call_all(self._present, "reshape", order)]
        self._decided: Decided | None = None
        self._step, self._scale = 0, answers[0].loss_scale

    def steps(self, count: int) -> list[float]:
        """Run so many steps; return their losses."""
        return [self.step() for _ in range(count)]

    def step(self) -> float:
        """Run a step; return its loss. ``answers`` keeps the workers' answers, ``attempts`` the number of attempts."""
        for attempt in range(ATTEMPTS):
            order = StepOrder(
                generation=self._generation,
                step=self._step,
                attempt=attempt,
                decided=self._decided,
                loss_scale=self._scale,
            )
            self.answers = [expect(answer, Prepared) for answer in call_all(self._present, "step", order)]
            self.attempts = attempt + 1
            if not any(answer.overflowed for answer in self.answers):
                break
        else:
            raise RuntimeError("a gradient overflows again and again")
        self._step += 1
        norms = [answer.unit_norms_sq for answer in self.answers]
        non_finite = [answer.non_finite for answer in self.answers]
        self._decided = decided_step(self._step, norms, non_finite, self._units)
        losses = [entry.loss for answer in self.answers for entry in answer.losses]
        return sum(losses) / len(losses)

    def end(self) -> None:
        """End the workers' processes."""
        end_all(list(self.workers.values()))


def expect(answer: Any, kind: type[T]) -> T:
    """Return the answer, which must be of this kind."""
    if not isinstance(answer, kind):
        raise RuntimeError(f"{answer} is no {kind.__name__}")
    return answer

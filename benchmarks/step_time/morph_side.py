"""Morph's runtime without a manager: orders straight to :class:`morph.runtime.process.worker.Worker`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from remote import Remote

from morph.contract.decided import decided_step
from morph.contract.messages import Prepared, Reshaped, ReshapeOrder, Slot, Source, StepOrder, WorkerReady, WorkerSetup
from morph.contract.plan import Expectation, Plan, Schedule, StagePlan
from morph.cutting import cut, export_job
from morph.cutting.cuts.cut_model import CutModel
from morph.jobs.job import load_job
from morph.runtime.groups.store import StoreHost
from morph.runtime.process.worker import Worker
from simulator.engine.mini_batch import StageTimes, run_pipeline
from simulator.engine.schedules import fixed_order, stage_windows

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Shape:
    """What Morph is asked to run."""

    num_stages: int
    num_replicas: int
    schedule: Schedule = "varuna"
    recompute: bool = False
    slope: int = 2


def make_plan(shape: Shape, fingerprint: str, num_sections: int, m: int, num_micro_batches: int) -> Plan:
    """Equal stages; backward taken as twice the forward, and messages as free."""
    stages, count = shape.num_stages, num_micro_batches // shape.num_replicas
    windows = stage_windows(shape.schedule, stages, count, shape.slope)
    again = [shape.recompute and stage < stages - 1 for stage in range(stages)]
    if shape.schedule == "varuna":
        unit = np.full(stages, 1_000_000, np.int64)
        times = StageTimes(unit, unit, 2 * unit, 0 * unit, 0 * unit, np.array(windows, np.int64), np.array(again))
        orders = run_pipeline(times, (count,), keep_orders=True).orders[0]
    else:
        orders = tuple(fixed_order(shape.schedule, s, stages, count, again[s]) for s in range(stages))
    bounds = [num_sections * stage // stages for stage in range(stages + 1)]
    return Plan(
        fingerprint=fingerprint,
        schedule=shape.schedule,
        micro_batch_size=m,
        num_micro_batches=num_micro_batches,
        num_replicas=shape.num_replicas,
        stages=tuple(
            StagePlan(first_section=bounds[s], end_section=bounds[s + 1], window=windows[s], recompute=again[s])
            for s in range(stages)
        ),
        orders={count: orders},
        expected=Expectation(mini_batch_s=0, examples_per_s=0, lower_bound_s=0, peak_memory_bytes=0, parts_s={}),
    )


def cut_job(job_path: str) -> CutModel:
    job = load_job(job_path)
    assert job.micro_batch_size is not None
    return cut(export_job(job), num_sections=job.num_sections, micro_batch_size=job.micro_batch_size)


class MorphSide:
    """Workers that train one job, from its first step again in every turn."""

    def __init__(self, job_path: str, model: CutModel, checkpoint_url: str, num_workers: int = 2) -> None:
        self._job, self._model = load_job(job_path), model
        self._generation = 0
        self._store = StoreHost(LOOPBACK)
        self._workers = {name: Remote(Worker) for name in (f"w{number}" for number in range(num_workers))}
        for name, remote in self._workers.items():
            setup = WorkerSetup(
                worker=name,
                job_path=job_path,
                fingerprint=model.fingerprint,
                num_sections=len(model.sections),
                micro_batch_size=model.micro_batch_size,
                checkpoint_url=checkpoint_url,
                store_host=LOOPBACK,
                store_port=self._store.port(),
                listen_host=LOOPBACK,
            )
            remote.send("setup", setup)
        for remote in self._workers.values():
            _expect(remote.answer(), WorkerReady)

    def begin(self, shape: Shape) -> None:
        """Form a generation of this shape with the job's initial state."""
        m = self._model.micro_batch_size
        count = self._job.batch_size // m
        self.begin_plan(make_plan(shape, self._model.fingerprint, len(self._model.sections), m, count))

    def begin_plan(self, plan: Plan) -> None:
        """The same with a plan from elsewhere."""
        self._generation += 1
        places = [(stage, replica) for replica in range(plan.num_replicas) for stage in range(len(plan.stages))]
        slots = tuple(Slot(worker=f"w{i}", stage=s, replica=r) for i, (s, r) in enumerate(places))
        sources = tuple(
            Source(worker=slot.worker, unit=unit.id, kind="initial")
            for slot in slots
            for unit in self._model.units
            if set(unit.sections) & set(plan.stages[slot.stage].sections)
        )
        order = ReshapeOrder(generation=self._generation, version=0, plan=plan, slots=slots, sources=sources)
        self._present = [self._workers[slot.worker] for slot in slots]
        self._ask("reshape", order, Reshaped)
        self._step, self._decided = 0, None
        self.wait_s: list[float] = []

    def steps(self, count: int) -> list[float]:
        """Run so many steps; returns their losses."""
        losses = []
        for _ in range(count):
            for attempt in range(8):
                order = StepOrder(generation=self._generation, step=self._step, attempt=attempt, decided=self._decided)
                answers: list[Prepared] = self._ask("step", order, Prepared)
                if not any(answer.overflowed for answer in answers):
                    break
            else:
                raise RuntimeError("a gradient overflows again and again")
            units = tuple(unit.id for unit in self._model.units)
            self._step += 1
            norms = [answer.unit_norms_sq for answer in answers]
            self._decided = decided_step(self._step, norms, [answer.non_finite for answer in answers], units)
            found = [entry.loss for answer in answers for entry in answer.losses]
            losses.append(sum(found) / len(found))
        return losses

    def _ask(self, method: str, order: object, kind: type[Any]) -> list[Any]:
        for remote in self._present:
            remote.send(method, order)
        return [_expect(remote.answer(), kind) for remote in self._present]

    def end(self) -> None:
        for remote in self._workers.values():
            remote.end()


def _expect(answer: object, kind: type[Any]) -> Any:
    if not isinstance(answer, kind):
        raise RuntimeError(f"{answer} is no {kind.__name__}")
    return answer

"""A run on one worker without a cluster: the uninterrupted reference that any history must equal bit for bit.

``python -m morph.runtime.process.single JOB --steps N --sections K --micro-batch M --checkpoints DIR`` runs it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from morph.checkpoint.manifest import write_manifest
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.decided import Decided, decided_step
from morph.contract.errors import MorphError, TrainingStopped
from morph.contract.messages import (
    CommitOrder,
    Committed,
    Failed,
    Prepared,
    Reshaped,
    ReshapeOrder,
    Slot,
    StateSource,
    StepOrder,
    WorkerSetup,
    weights_of,
)
from morph.contract.plan import Expectation, Plan, StagePlan
from morph.cutting.cache.artefact import CannotKeep
from morph.cutting.cache.cut_job import LoadedJob
from morph.jobs.files import imported_once
from morph.runtime.process.worker import Worker, set_up

ME = "single"
MAX_ATTEMPTS = 8
AnswerT = TypeVar("AnswerT")


def single_plan(fingerprint: str, num_sections: int, micro_batch_size: int, num_micro_batches: int) -> Plan:
    """Return a plan of shape 1x1."""
    nothing = Expectation(mini_batch_s=0, examples_per_s=0, lower_bound_s=0, peak_memory_bytes=0, parts_s={})
    return Plan(
        fingerprint=fingerprint,
        schedule="varuna",
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        num_replicas=1,
        stages=(StagePlan(first_section=0, end_section=num_sections, window=1, recompute=False),),
        orders={num_micro_batches: ("FB" * num_micro_batches,)},
        expected=nothing,
    )


def run_single(
    job_path: str,
    *,
    steps: int,
    num_sections: int | None,
    micro_batch_size: int,
    checkpoint_url: str,
    on_step: Callable[[int, float], None] | None = None,
    save_each: bool = False,
) -> Manifest:
    """Train ``steps`` steps, from the job's seed, on one worker; return the manifest of the final checkpoint.

    ``num_sections`` is K, or None for the job's own choice; ``on_step`` gets (step, loss). ``save_each``: save every
    version. Raises InputError if the job is wrong, and TrainingStopped if training failed.
    """
    with imported_once(job_path):
        return _run_single(job_path, steps, num_sections, micro_batch_size, checkpoint_url, on_step, save_each)


def _run_single(
    job_path: str,
    steps: int,
    num_sections: int | None,
    micro_batch_size: int,
    checkpoint_url: str,
    on_step: Callable[[int, float], None] | None,
    save_each: bool,
) -> Manifest:
    torch.set_num_threads(1)
    loaded = LoadedJob(job_path)
    job, cut = loaded.job, None
    model = loaded.cut(job.num_sections if num_sections is None else num_sections, micro_batch_size).model
    with suppress(CannotKeep):
        cut = loaded.handed(len(model.sections), micro_batch_size)
    plan = single_plan(model.fingerprint, len(model.sections), micro_batch_size, job.batch_size // micro_batch_size)
    setup = WorkerSetup(
        worker=ME,
        job_path=job_path,
        fingerprint=model.fingerprint,
        num_sections=len(model.sections),
        micro_batch_size=micro_batch_size,
        checkpoint_url=checkpoint_url,
        store_host="127.0.0.1",
        store_port=0,
        listen_host="127.0.0.1",
        cut=cut,
    )
    worker = _expect(set_up(setup), Worker)
    sources = tuple(StateSource(worker=ME, unit=unit.id, kind="initial") for unit in model.units)
    slots = (Slot(worker=ME, stage=0, replica=0),)
    order = ReshapeOrder(generation=1, version=0, plan=plan, slots=slots, sources=sources)
    reshaped, epochs = _expect(worker.reshape(order), Reshaped), worker.ready.epochs
    units = tuple(unit.id for unit in model.units)
    decided, scale = None, reshaped.loss_scale
    for step in range(steps):
        num = None if epochs is None else epochs.num_micro_batches(step, micro_batch_size)
        step_order = StepOrder(generation=1, step=step, decided=decided, loss_scale=scale, num_micro_batches=num)
        answer = _run_step(worker, step_order)
        decided = decided_step(
            step + 1, [answer.unit_norms_sq], [answer.non_finite], units, [weights_of(answer.losses)]
        )
        scale = decided.next_scale(scale)
        if on_step is not None:
            on_step(step, mean_loss(answer))
        if save_each and step + 1 < steps:
            _save(worker, setup, step + 1, decided, units)
    return _save(worker, setup, steps, decided, units)


def _save(worker: Worker, setup: WorkerSetup, version: int, decided: Decided | None, units: Sequence[str]) -> Manifest:
    commit = CommitOrder(generation=1, version=version, decided=decided, checkpoint_units=tuple(units))
    _expect(worker.commit(commit), Committed)
    files: list[UnitFile] = []
    while len(files) < len(units):
        beat = worker.heartbeat(60.0)
        if beat.checkpoint_error or not beat.written:
            raise TrainingStopped(f"checkpoint not written within 60 s: {beat.checkpoint_error}")
        files += [UnitFile(**written.model_dump(exclude={"worker", "version", "stall_s"})) for written in beat.written]
    written = tuple(sorted(files, key=lambda file: file.unit))
    manifest = Manifest(fingerprint=setup.fingerprint, version=version, units=written, kind="final")
    write_manifest(setup.checkpoint_url, manifest)
    return manifest


def mean_loss(answer: Prepared) -> float:
    """Return the mean over micro-batches, or the total over weight, summed in their global order."""
    ordered = sorted(answer.losses, key=lambda entry: entry.micro_batch)
    weight = sum(weights_of(ordered).values()) if ordered[0].weight_of() is not None else len(ordered)
    return sum(entry.loss for entry in ordered) / weight if weight else math.nan


def _run_step(worker: Worker, order: StepOrder) -> Prepared:
    """Run one step, again each time its gradients overflow their scales."""
    for attempt in range(MAX_ATTEMPTS):
        answer = _expect(worker.step(order.model_copy(update={"attempt": attempt})), Prepared)
        if answer.non_finite or not answer.overflowed:
            return answer
    raise TrainingStopped(f"step {order.step}: a gradient overflowed {MAX_ATTEMPTS} times in a row")


def _expect(answer: object, kind: type[AnswerT]) -> AnswerT:
    if isinstance(answer, Failed):
        raise TrainingStopped(answer.error)
    assert isinstance(answer, kind), f"{answer} is no {kind.__name__}"
    return answer


def main() -> int:
    """Entry point of ``python -m morph.runtime.process.single``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sections", type=int, default=None)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    options = parser.parse_args()
    try:
        run_single(
            options.job,
            steps=options.steps,
            num_sections=options.sections,
            micro_batch_size=options.micro_batch,
            checkpoint_url=str(options.checkpoints),
            on_step=lambda step, loss: print(json.dumps({"step": step, "loss": loss}), flush=True),
        )
    except MorphError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Workers that train a job in one shape after another, and the results."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manager.controller.state.evaluations import totals_of
from manager.report.figures import EvaluationReader, extreme_rates
from morph.checkpoint.manifest import write_manifest
from morph.checkpoint.unit_files import from_payload
from morph.contract.checkpoint import Manifest
from morph.contract.decided import Decided, LossScale
from morph.contract.evaluation import Array, EvaluationTotals
from morph.contract.messages import Committed, Evaluation, HandedCut, PreCopyMove, PreCopyOrder, Prepared
from morph.contract.plan import Plan
from morph.cutting import CutModel
from morph.cutting.exporting.export import export_job
from morph.data.loader import MicroBatchLoader
from morph.jobs.job import Job, Precision
from morph.runtime.process.single import run_single
from morph.runtime.step.stage import Stage
from morph.runtime.step.sums import MicroBatchSums
from tests.crew import Crew
from tests.members import SETUP_S
from tests.system.harness import TinyJob, load_tiny_job
from tests.training.training_jobs import BATCH_SIZE, MICRO_BATCH_SIZE, NUM_SECTIONS

JOBS = Path(__file__).parent / "training_jobs.py"
NAMES = ("w0", "w1", "w2", "w3")


def spec_of(name: str) -> str:
    """Return the job path for a name, as workers get it; return path/to/file.py:name unchanged."""
    return name if ":" in name else f"{JOBS}:{name}"


def make_plan(shape: str, fingerprint: str, *, recompute: bool = True, live_sections: int | None = None) -> Plan:
    """Return a plan for ``"PxD"`` with Varuna's orders; without recompute every stage keeps its activations.

    ``live_sections`` is the same for every stage.
    """
    found: dict[str, Any] = (
        TinyJob(fingerprint, BATCH_SIZE, {}, NUM_SECTIONS, MICRO_BATCH_SIZE).plan(shape).model_dump()
    )
    found["stages"] = [stage | {"live_sections": live_sections} for stage in found["stages"]]
    if not recompute:
        found["stages"] = [stage | {"recompute": False} for stage in found["stages"]]
        found["orders"] = {count: [order.replace("R", "") for order in o] for count, o in found["orders"].items()}
    return Plan.model_validate(found)


@dataclass
class Trained:
    """The results of a run: sha256 by unit, and the reports of each step."""

    directory: Path
    decided: list[Decided] = field(default_factory=list)
    scales: list[LossScale | None] = field(default_factory=list)
    answers: list[list[Prepared]] = field(default_factory=list)
    commits: list[Committed] = field(default_factory=list)
    num_sent_ahead: int = 0
    num_own_reads: int = 0
    manifest: Manifest = field(init=False)

    @property
    def digests(self) -> dict[str, str]:
        return {entry.unit: entry.sha256 for entry in self.manifest.units}

    @property
    def learning_rates(self) -> dict[int, tuple[float, float] | None]:
        """Return the lowest and highest rate by step, as in a report."""
        return {answers[0].step: extreme_rates(answers) for answers in self.answers}

    @property
    def losses(self) -> list[str]:
        """Return losses and metrics of each step's micro-batches in order, as text, because NaN is not equal to NaN."""
        steps = [
            sorted((e for a in answers for e in a.losses), key=lambda e: e.micro_batch) for answers in self.answers
        ]
        return [str(entries) for entries in steps]

    @property
    def evaluations(self) -> list[Any]:
        """Return every evaluation, put together as in the report."""
        reader = EvaluationReader()
        for answers in (*self.answers, self.commits):
            for answer in answers:
                reader.take(answer)
        return list(reader.all())

    def numbers(self, unit: str) -> dict[str, Any]:
        """Return the plain numbers in a unit's final state."""
        entry = next(entry for entry in self.manifest.units if entry.unit == unit)
        path = self.directory / f"v{self.manifest.version:08d}" / entry.file
        found: dict[str, Any] = json.loads(bytes(from_payload(path.read_bytes())["numbers"].tolist()))
        return found


def parameters_of(manifest: Manifest, directory: Path) -> dict[str, Tensor]:
    folder = directory / f"v{manifest.version:08d}"
    states = [from_payload((folder / entry.file).read_bytes()) for entry in manifest.units]
    tensors = {name: value for state in states for name, value in state.items()}
    return {name.removeprefix("param/"): value for name, value in tensors.items() if name.startswith("param/")}


def trained_alone(
    name: str, num_steps: int, directory: Path, on_loss: Callable[[float], object] = lambda _: None, **fields: int
) -> dict[str, Tensor]:
    """Return the weights after some steps of one worker in this process."""
    given = {"num_sections": NUM_SECTIONS, "micro_batch_size": MICRO_BATCH_SIZE} | fields
    with torch.random.fork_rng():
        manifest = run_single(
            spec_of(name),
            steps=num_steps,
            checkpoint_url=str(directory),
            on_step=lambda _, loss: on_loss(loss),
            **given,
        )
    return parameters_of(manifest, directory)


def totals_of_all(trained: Trained) -> list[EvaluationTotals]:
    """Return the evaluations of a run, put together from its workers' reports."""
    shares: dict[int, list[Evaluation]] = {}
    for answer in itertools.chain(*trained.answers, trained.commits):
        if answer.evaluation is not None:
            shares.setdefault(answer.evaluation.version, []).append(answer.evaluation)
    found = [totals_of(parts) for _, parts in sorted(shares.items())]
    return [totals for totals in found if totals is not None]


def rows_of(array: Array) -> NDArray[Any]:
    """Return the values of each sample, as they were reported."""
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


class ShapesCrew:
    """Worker processes for all tests; after a failed test they are replaced, because they have unread answers."""

    def __init__(self) -> None:
        self.crew = Crew(load_tiny_job(), NAMES)

    def close(self) -> None:
        self.crew.close()

    def train(
        self,
        job: str,
        spans: Sequence[tuple[Plan | str, int]],
        directory: Path,
        *,
        lose: bool = False,
        ahead: bool = False,
        kill_readers_at: int | None = None,
        cut: HandedCut | None = None,
    ) -> Trained:
        """Train a job from its seed.

        Args:
            job: Its name in ``training_jobs``, or path/to/file.py:name.
            spans: (shape or plan, version until which it runs), in turn.
            lose: Whether the first worker of a shape with replicas is lost before the next shape. The others learn only
                then of the last decided step, and roll forward.
            ahead: Whether in every step each worker gets all units of another by pre-copy, and then drops them.
            kill_readers_at: Before this step, one data worker of each worker is killed.
            cut: The cut model that workers receive; None: each exports the model, or reads a cached cut.
        """
        try:
            return self._train(job, spans, directory, lose, ahead, kill_readers_at, cut)
        except BaseException:
            self.close()
            self.crew = Crew(self.crew.job, NAMES)
            raise

    def _train(
        self,
        job: str,
        spans: Sequence[tuple[Plan | str, int]],
        directory: Path,
        lose: bool,
        ahead: bool,
        kill_readers_at: int | None,
        cut: HandedCut | None,
    ) -> Trained:
        crew, found = self.crew, Trained(directory)
        crew.job = load_tiny_job(NUM_SECTIONS, MICRO_BATCH_SIZE, spec_of(job), cut)
        update = {"fingerprint": crew.job.fingerprint}
        plans = [
            crew.job.plan(shape) if isinstance(shape, str) else shape.model_copy(update=update) for shape, _ in spans
        ]
        names = list(NAMES[: _num_needed(plans, lose=lose)])
        crew.set_up(spec_of(job), crew.job.fingerprint, directory, names, cut=cut)
        for name in names:
            self._data_workers(name)
        for plan, (_, until) in zip(plans, spans, strict=True):
            if lose and crew.version and crew.plan is not None and crew.plan.num_replicas > 1:
                names.remove(crew.present[0])
                crew.held.pop(crew.present[0])
            crew.reshape(plan, names)
            while crew.version < until:
                if ahead:
                    self._send_ahead(found)
                if crew.version == kill_readers_at:
                    for name in crew.present:
                        os.kill(self._data_workers(name)[0][0], signal.SIGKILL)
                found.scales.append(crew.loss_scale)
                crew.prepare()
                found.decided.append(crew.decide())
            self._collect_ahead(found)
        found.manifest, found.commits, found.answers = crew.save(), crew.commits, crew.attempts
        write_manifest(str(directory), found.manifest)
        found.num_own_reads = sum(self._data_workers(name)[1] for name in crew.present)
        return found

    def _data_workers(self, name: str) -> tuple[tuple[int, ...], int]:
        """Return a worker's data workers once they can read, and how many micro-batches it has read itself since."""
        self.crew.members[name].send("data_workers")
        found: tuple[tuple[int, ...], int] = self.crew.members[name].answer(SETUP_S)
        return found

    def _send_ahead(self, found: Trained) -> None:
        """Let each worker pre-copy all its units to the next one, which drops earlier ones."""
        crew, present = self.crew, self.crew.present
        assert crew.plan is not None
        self._collect_ahead(found)
        nexts = dict(zip(present, [*present[1:], *present[:1]], strict=True))
        moves = tuple(
            PreCopyMove(unit=unit, sender=name, receiver=nexts[name])
            for name in present
            for unit in sorted(crew.held[name] - crew.held[nexts[name]])
        )
        number = crew.version + 1
        order = PreCopyOrder(number=number, num_micro_batches=crew.plan.num_micro_batches, moves=moves)
        for name in present:
            crew.members[name].control("ahead", order)

    def _collect_ahead(self, found: Trained) -> None:
        """Count the units that follow their senders."""
        for name in self.crew.present:
            report = self.crew.members[name].control("heartbeat", 0.0).ahead
            found.num_sent_ahead += len(report.following) if report is not None else 0


def _num_needed(plans: Sequence[Plan], *, lose: bool) -> int:
    """Return the number of workers for all shapes, if the first worker of each shape with replicas is lost after it."""
    lost = num_needed = 0
    for plan in plans:
        num_needed = max(num_needed, lost + plan.num_workers)
        lost += lose and plan.num_replicas > 1
    return num_needed


def gradients_of_stages(
    job: Job, model: CutModel, begins: list[int], *, recompute: bool, precision: Precision | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and summed gradients of one micro-batch, by stages that begin at these sections.

    ``precision``: None: the job's.
    """
    initial = export_job(job).initial_parameters
    parameters = {name: value.clone().requires_grad_() for name, value in initial.items()}
    loader = MicroBatchLoader(job.dataset(), job.seed, job.batch_size, MICRO_BATCH_SIZE)
    stages = [
        Stage(
            model,
            range(first, end),
            recompute=recompute,
            parameters=parameters,
            load_batch=lambda micro_batch, keys: loader.load(0, micro_batch, keys),
            seed=1,
            step=2,
            precision=precision or job.precision,
        )
        for first, end in zip(begins, [*begins[1:], len(model.sections)], strict=True)
    ]
    values: tuple[Tensor, ...] = ()
    for stage in stages:
        values = stage.forward(3, tuple(value.clone() for value in values))
    found: dict[str, Tensor] = {}

    def add(_section: int, name: str, gradient: Tensor) -> None:
        found[name] = gradient + found.get(name, 0)

    sink = MicroBatchSums(add, lambda _section: None)
    arriving: tuple[Tensor | None, ...] = (torch.ones(()),)
    for stage in reversed(stages):
        if recompute:
            stage.recompute(3)
        arriving = stage.backward(3, arriving, sink)
        if job.boundary != "same":
            assert all(gradient is None or gradient.dtype == torch.bfloat16 for gradient in arriving)
    return values[0], found

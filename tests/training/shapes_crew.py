"""Four worker processes that train a job in one shape after another, as a manager would have them do."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manager.controller.shape.placement import choose_sources, place, share_units
from manager.controller.state.config import units_by_stage
from manager.report.means import EvaluationReader, extreme_rates
from morph.checkpoint.manifest import write_manifest
from morph.checkpoint.unit_files import from_payload
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.decided import Decided, LossScale, decided_step
from morph.contract.messages import (
    CommitOrder,
    Committed,
    PreCopyMove,
    PreCopyOrder,
    Prepared,
    Reshaped,
    ReshapeOrder,
    Slot,
    StepOrder,
    UnitWritten,
    WorkerReady,
    WorkerSetup,
    weights_of,
)
from morph.contract.plan import Plan
from morph.cutting.cache.cut_job import load_and_cut
from morph.jobs.files import imported_once
from morph.jobs.snapshot import collect, pack
from morph.runtime.groups.store import StoreHost
from simulator import plan, synthetic_profile
from tests.runtime.worker_crew import ANSWER_S, LOOPBACK, SETUP_S, Member
from tests.training.training_jobs import BATCH_SIZE, MICRO_BATCH_SIZE, NUM_SECTIONS

JOBS = Path(__file__).parent / "training_jobs.py"


def spec_of(name: str) -> str:
    """The job of a name, as workers are told it."""
    return f"{JOBS}:{name}"


def make_plan(shape: str, fingerprint: str, *, recompute: bool = True, live_sections: int | None = None) -> Plan:
    """A plan for ``"PxD"``; without recompute every stage keeps its activations. Orders are Varuna's.

    ``live_sections`` is every stage's.
    """
    depth, replicas = map(int, shape.split("x"))
    profile = synthetic_profile(
        num_sections=NUM_SECTIONS, batch_size=BATCH_SIZE, micro_batch_sizes=(1, MICRO_BATCH_SIZE)
    )
    best = plan(
        profile,
        num_gpus=depth * replicas,
        pipeline_depth=depth,
        num_replicas=replicas,
        micro_batch_size=MICRO_BATCH_SIZE,
        schedule="varuna",
        recompute=True,
    ).best
    found: dict[str, Any] = best.model_dump() | {"fingerprint": fingerprint}
    found["stages"] = [stage | {"live_sections": live_sections} for stage in found["stages"]]
    if not recompute:
        found["stages"] = [stage | {"recompute": False} for stage in found["stages"]]
        found["orders"] = {count: [order.replace("R", "") for order in o] for count, o in found["orders"].items()}
    return Plan.model_validate(found)


@dataclass
class Trained:
    """What came of a run: sha256 by unit, and what was reported of each step."""

    manifest: Manifest
    decided: list[Decided] = field(default_factory=list)
    scales: list[LossScale | None] = field(default_factory=list)
    answers: list[list[Prepared]] = field(default_factory=list)
    commits: list[Committed] = field(default_factory=list)
    directory: Path = Path()
    num_sent_ahead: int = 0
    num_own_reads: int = 0

    @property
    def digests(self) -> dict[str, str]:
        """Of every unit."""
        return {entry.unit: entry.sha256 for entry in self.manifest.units}

    @property
    def learning_rates(self) -> dict[int, tuple[float, float] | None]:
        """Lowest and highest by step, as a report has them."""
        return {answers[0].step: extreme_rates(answers) for answers in self.answers}

    @property
    def losses(self) -> list[str]:
        """Losses and metrics of each step's micro-batches, in their order; as text, for NaN is not itself."""
        steps = [
            sorted((e for a in answers for e in a.losses), key=lambda e: e.micro_batch) for answers in self.answers
        ]
        return [str(entries) for entries in steps]

    @property
    def evaluations(self) -> list[Any]:
        """Every evaluation, put together as the report does it."""
        reader = EvaluationReader()
        for answers in (*self.answers, self.commits):
            for answer in answers:
                reader.take(answer.evaluation)
        return list(reader.all())

    def numbers(self, unit: str) -> dict[str, Any]:
        """The plain numbers of a unit's final state."""
        entry = next(entry for entry in self.manifest.units if entry.unit == unit)
        path = self.directory / f"v{self.manifest.version:08d}" / entry.file
        found: dict[str, Any] = json.loads(bytes(from_payload(path.read_bytes())["numbers"].tolist()))
        return found


class ShapesCrew:
    """Worker processes, reused by every test; anew after one that failed, for theirs have answers left to give."""

    def __init__(self, count: int = 4) -> None:
        self._count = count
        self.store = StoreHost(LOOPBACK)
        self.generation = 0
        self._start()

    def _start(self) -> None:
        self.members = {f"w{index}": Member(f"w{index}") for index in range(self._count)}

    def close(self) -> None:
        """End every process."""
        for member in self.members.values():
            member.end()

    def train(
        self,
        job: str,
        spans: Sequence[tuple[Plan | str, int]],
        directory: Path,
        *,
        lose: bool = False,
        ahead: bool = False,
        kill_readers_at: int | None = None,
    ) -> Trained:
        """Train a job from its seed.

        Args:
            job: Its name in ``training_jobs``.
            spans: (shape or plan, version until which it runs), in turn.
            directory: For checkpoints.
            lose: The first worker of a shape with replicas does not come along into the next one. The others are
                told of the last decided step only then, and roll forward.
            ahead: In every step, each worker is sent all units of another ahead, which it then drops.
            kill_readers_at: Before this step, one data worker of each worker is killed.
        """
        spec = spec_of(job)
        with imported_once(spec):
            model = load_and_cut(spec, num_sections=NUM_SECTIONS, micro_batch_size=MICRO_BATCH_SIZE).model
        units = {unit.id: unit.sections for unit in model.units}
        names = list(self.members)[: _num_needed([shape for shape, _ in spans], lose=lose)]
        try:
            self._set_up(names, spec, model.fingerprint, directory)
            run = _Run(self, units, names, kill_readers_at)
            trained = self._run(run, spans, model.fingerprint, directory, lose=lose, ahead=ahead)
            return replace(trained, num_own_reads=sum(self._data_workers(name)[1] for name in run.present))
        except BaseException:
            self.close()
            self._start()
            raise

    def _run(
        self,
        run: _Run,
        spans: Sequence[tuple[Plan | str, int]],
        fingerprint: str,
        directory: Path,
        *,
        lose: bool,
        ahead: bool,
    ) -> Trained:
        for place_in_row, (shape, until) in enumerate(spans):
            wanted = make_plan(shape, fingerprint) if isinstance(shape, str) else shape
            wanted = wanted.model_copy(update={"fingerprint": fingerprint})
            spare = place_in_row > 0 and run.num_replicas > 1
            run.reshape(wanted, without=run.present[0] if lose and spare else None)
            while run.version < until:
                if ahead:
                    run.send_ahead()
                run.step()
            run.collect_ahead()
        manifest = run.save(fingerprint)
        write_manifest(str(directory), manifest)
        return Trained(manifest, run.all_decided, run.scales, run.answers, run.commits, directory, run.num_sent_ahead)

    def ask(self, workers: Iterable[str], method: str, order: object) -> list[Any]:
        """Give several workers the same order, and collect their answers."""
        asked = [self.members[name] for name in workers]
        for member in asked:
            member.send(method, order)
        return [member.answer() for member in asked]

    def _data_workers(self, name: str) -> tuple[tuple[int, ...], int]:
        """A worker's data workers, once they can read, and how many micro-batches it has read itself since."""
        self.members[name].send("data_workers")
        found: tuple[tuple[int, ...], int] = self.members[name].answer(SETUP_S)
        return found

    def _set_up(self, names: Sequence[str], spec: str, fingerprint: str, directory: Path) -> None:
        code = pack(spec, collect(spec))
        for name in names:
            setup = WorkerSetup(
                worker=name,
                job_path=spec,
                fingerprint=fingerprint,
                num_sections=NUM_SECTIONS,
                micro_batch_size=MICRO_BATCH_SIZE,
                checkpoint_url=str(directory),
                store_host=LOOPBACK,
                store_port=self.store.port(),
                listen_host=LOOPBACK,
                code=code,
            )
            self.members[name].send("setup", setup)
        for name in names:
            answer = self.members[name].answer(SETUP_S)  # it may compile sections
            assert isinstance(answer, WorkerReady), answer
        for name in names:
            self._data_workers(name)


def _width(shape: Plan | str) -> int:
    if isinstance(shape, Plan):
        return shape.num_workers
    depth, replicas = map(int, shape.split("x"))
    return depth * replicas


def _num_replicas(shape: Plan | str) -> int:
    return shape.num_replicas if isinstance(shape, Plan) else int(shape.partition("x")[2])


def _num_needed(shapes: Sequence[Plan | str], *, lose: bool) -> int:
    """How many workers it takes to have enough in each shape, where the first of one with replicas is lost after it."""
    lost = num_needed = 0
    for place_in_row, shape in enumerate(shapes):
        num_needed = max(num_needed, lost + _width(shape))
        lost += lose and _num_replicas(shape) > 1 and place_in_row < len(shapes) - 1
    return num_needed


class _Run:
    """One job's way through its shapes."""

    def __init__(
        self, crew: ShapesCrew, units: dict[str, tuple[int, ...]], names: Sequence[str], kill_readers_at: int | None
    ) -> None:
        self._kill_readers_at = kill_readers_at
        self.crew, self.units, self.names = crew, units, list(names)
        self.sizes = dict.fromkeys(units, 1)
        self.version = 0
        self.decided: Decided | None = None
        self.scale: LossScale | None = None
        self.plan: Plan | None = None
        self.slots: tuple[Slot, ...] = ()
        self.held: dict[str, frozenset[str]] = {}
        self.all_decided: list[Decided] = []
        self.scales: list[LossScale | None] = []
        self.answers: list[list[Prepared]] = []
        self.commits: list[Committed] = []
        self.num_orders_ahead = self.num_sent_ahead = 0

    @property
    def present(self) -> list[str]:
        """The workers of the present generation."""
        return [slot.worker for slot in self.slots]

    @property
    def num_replicas(self) -> int:
        """D of the present shape."""
        assert self.plan is not None
        return self.plan.num_replicas

    def reshape(self, wanted: Plan, without: str | None = None) -> None:
        """Form the next generation; ``without`` is lost."""
        self.crew.generation += 1
        if without is not None:
            self.names.remove(without)
            self.held.pop(without, None)
        needed = units_by_stage(wanted, self.units)
        self.slots = place(wanted, self.names, self.held, needed, self.sizes)
        sources = choose_sources(self.slots, needed, self.held, self.sizes, "initial" if self.version == 0 else None)
        order = ReshapeOrder(
            generation=self.crew.generation,
            version=self.version,
            decided=self.decided,
            plan=wanted,
            slots=self.slots,
            sources=sources,
        )
        taking_part = dict.fromkeys([*self.present, *(source.peer for source in sources if source.peer)])
        answers = self.crew.ask(taking_part, "reshape", order)
        assert all(isinstance(answer, Reshaped) for answer in answers), answers
        self.plan = wanted
        self.scale = next((answer.loss_scale for answer in answers if answer.loss_scale), None)
        self.held = {slot.worker: frozenset(needed[slot.stage]) for slot in self.slots}

    def send_ahead(self) -> None:
        """Have everybody send all its units to the next worker; what was sent before is dropped."""
        assert self.plan is not None
        self.collect_ahead()
        self.num_orders_ahead += 1
        nexts = dict(zip(self.present, [*self.present[1:], *self.present[:1]], strict=True))
        moves = [
            PreCopyMove(unit=unit, sender=name, receiver=nexts[name])
            for name in self.present
            for unit in sorted(self.held[name] - self.held[nexts[name]])
        ]
        order = PreCopyOrder(
            number=self.num_orders_ahead, num_micro_batches=self.plan.num_micro_batches, moves=tuple(moves)
        )
        for name in self.present:
            self.crew.members[name].control("ahead", order)

    def collect_ahead(self) -> None:
        """Count the units that follow their senders."""
        for name in self.present:
            report = self.crew.members[name].control("heartbeat", 0.0).ahead
            self.num_sent_ahead += len(report.following) if report is not None else 0

    def step(self) -> None:
        """Run and decide one step."""
        if self.version == self._kill_readers_at:
            for name in self.present:
                os.kill(self.crew._data_workers(name)[0][0], signal.SIGKILL)
        for attempt in range(8):
            order = StepOrder(
                generation=self.crew.generation,
                step=self.version,
                attempt=attempt,
                decided=self.decided,
                loss_scale=self.scale,
            )
            answers = self.crew.ask(self.present, "step", order)
            assert all(isinstance(answer, Prepared) for answer in answers), answers
            self.answers.append(answers)
            if any(answer.non_finite for answer in answers) or not any(answer.overflowed for answer in answers):
                break
        self.version += 1
        self.decided = decided_step(
            self.version,
            [answer.unit_norms_sq for answer in answers],
            [answer.non_finite for answer in answers],
            self.units,
            [weights_of(answer.losses) for answer in answers],
        )
        self.all_decided.append(self.decided)
        self.scales.append(self.scale)
        self.scale = self.decided.next_scale(self.scale)

    def save(self, fingerprint: str) -> Manifest:
        """Commit the decided version, and write every unit of it once."""
        assert self.plan is not None
        writers = share_units(self.slots, units_by_stage(self.plan, self.units), self.sizes)
        for name in self.present:
            mine = tuple(unit for unit, writer in writers.items() if writer == name)
            order = CommitOrder(
                generation=self.crew.generation, version=self.version, decided=self.decided, checkpoint_units=mine
            )
            self.crew.members[name].send("commit", order)
        self.commits = [self.crew.members[name].answer() for name in self.present]
        assert all(isinstance(answer, Committed) for answer in self.commits), self.commits
        written: dict[str, UnitWritten] = {}
        deadline_s = time.monotonic() + ANSWER_S
        while len(written) < len(writers):
            assert time.monotonic() < deadline_s, "the checkpoint was not written"
            for name in self.present:
                beat = self.crew.members[name].control("heartbeat", 0.05)
                assert beat.checkpoint_error is None
                written |= {entry.unit: entry for entry in beat.written if entry.version == self.version}
        files = [
            UnitFile(**written[unit].model_dump(exclude={"worker", "version", "stall_s"})) for unit in sorted(written)
        ]
        return Manifest(fingerprint=fingerprint, version=self.version, units=tuple(files))

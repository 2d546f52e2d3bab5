"""Whole workers in threads of one process, each with the bytes of its tensors counted: what a shape really takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calibrate.computing.peak import LiveBytes
from calibrate.computing.subject import Subject
from manager.controller.shape.placement import choose_sources, place
from manager.controller.state.config import units_by_stage
from morph.contract.decided import Decided, decided_step
from morph.contract.messages import Prepared, Reshaped, ReshapeOrder, StepOrder, WorkerSetup
from morph.contract.plan import Plan
from morph.cutting import CutModel
from morph.jobs.files import imported_once
from morph.runtime.groups.store import StoreHost
from morph.runtime.process.worker import Worker, set_up
from morph.runtime.state.reducing import Reduction

LOOPBACK = "127.0.0.1"
BOUND_S = 150.0


class TrackedCrew:
    """Workers that run a job on a CPU; ``live[name]`` counts the bytes of what each of them makes.

    Args:
        subject: The job.
        model: It, cut.
        names: Of the workers.
        directory: For checkpoints, of which none is written.
    """

    def __init__(self, subject: Subject, model: CutModel, names: Sequence[str], directory: Path) -> None:
        self.units = {unit.id: unit.sections for unit in model.units}
        self.workers: dict[str, Worker] = {}
        self.live = {name: LiveBytes() for name in names}
        self._reading = threading.Lock()
        self._here = threading.local()
        self._store = StoreHost(LOOPBACK)
        self._generation = self.version = 0
        self._decided: Decided | None = None
        self._held: dict[str, frozenset[str]] = {}
        self.slots: dict[str, int] = {}
        for name in names:
            setup = WorkerSetup(
                worker=name,
                job_path=subject.job_path,
                fingerprint=model.fingerprint,
                num_sections=len(model.sections),
                micro_batch_size=model.micro_batch_size,
                checkpoint_url=str(directory),
                store_host=LOOPBACK,
                store_port=self._store.port(),
                listen_host=LOOPBACK,
                secret="of the run",
            )
            with imported_once(subject.job_path):  # so that all but the first read the cut that was kept
                worker = set_up(setup)
            assert isinstance(worker, Worker), worker
            self.workers[name] = worker
            self._take_turns(worker)

    def _take_turns(self, worker: Worker) -> None:
        """Let no two workers read data at once: generators belong to the process, and so to one worker."""
        loader = worker._workload._loader  # type: ignore[attr-defined]
        load = loader.load

        def alone(*arguments: Any) -> Any:
            with self._reading:
                return load(*arguments)

        loader.load = alone

    def _all(self, names: Sequence[str], carry_out: Callable[[Worker], Any]) -> list[Any]:
        """Give everybody an order at once, and collect the answers."""
        answers: dict[str, Any] = {}

        def work(name: str) -> None:
            self._here.live = self.live[name]
            with self.live[name]:
                answers[name] = carry_out(self.workers[name])

        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in names]
        with self._reductions_counted():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(BOUND_S)
        assert set(answers) == set(names), "somebody did not answer"
        return [answers[name] for name in names]

    @contextmanager
    def _reductions_counted(self) -> Iterator[None]:
        """What a worker's reductions make, in a thread of their own, counts as the worker's."""
        put, run = Reduction.put, Reduction._run

        def counted_put(reduction: Reduction, *arguments: Any) -> None:
            reduction.live = self._here.live  # type: ignore[attr-defined]
            put(reduction, *arguments)

        def counted_run(reduction: Reduction) -> None:
            with reduction.live:  # type: ignore[attr-defined]
                run(reduction)

        Reduction.put, Reduction._run = counted_put, counted_run  # type: ignore[method-assign]
        try:
            yield
        finally:
            Reduction.put, Reduction._run = put, run  # type: ignore[method-assign]

    def reshape(self, plan: Plan, *, keep_sums: bool = True) -> dict[int, int]:
        """Form this shape on the first workers; returns the most bytes that a worker of each stage had meanwhile."""
        self._generation += 1
        names = list(self.workers)[: plan.num_workers]
        needed, sizes = units_by_stage(plan, self.units), dict.fromkeys(self.units, 1)
        slots = place(plan, names, self._held, needed, sizes)
        sources = choose_sources(slots, needed, self._held, sizes, None if self.version else "initial")
        order = ReshapeOrder(
            generation=self._generation,
            version=self.version,
            decided=self._decided,
            plan=plan,
            slots=slots,
            sources=sources,
            keep_sums=keep_sums,
        )
        self.slots = {slot.worker: slot.stage for slot in slots}
        present = dict.fromkeys([*self.slots, *(source.peer for source in sources if source.peer)])
        self._forget_peaks()
        answers = self._all(list(present), lambda worker: worker.reshape(order))
        assert all(isinstance(answer, Reshaped) for answer in answers), answers
        self._held |= {slot.worker: frozenset(needed[slot.stage]) for slot in slots}
        return self._peaks()

    def train(self, num_steps: int) -> dict[int, tuple[int, int]]:
        """Run steps; returns of the last one, by stage, the most that one of its workers had.

        Bytes, and how many micro-batches were in flight there: the plan's window is what that may become.
        """
        for _ in range(num_steps):
            self._forget_peaks()
            for attempt in range(8):
                order = StepOrder(
                    generation=self._generation,
                    step=self.version,
                    attempt=attempt,
                    decided=self._decided,
                    record_timeline=True,
                )
                answers = self._all(list(self.slots), lambda worker, order=order: worker.step(order))
                assert all(isinstance(answer, Prepared) for answer in answers), answers
                if not any(answer.overflowed for answer in answers):
                    break
            self.version += 1
            norms = [answer.unit_norms_sq for answer in answers]
            self._decided = decided_step(self.version, norms, [False for _ in answers], tuple(self.units))
        found: dict[int, tuple[int, int]] = {}
        for (name, stage), answer in zip(self.slots.items(), answers, strict=True):
            there = self.live[name].peak, answer.timeline.peaks.in_flight
            found[stage] = max(found.get(stage, there), there)
        return found

    def _forget_peaks(self) -> None:
        for live in self.live.values():
            live.peak = live.now

    def _peaks(self) -> dict[int, int]:
        peaks: dict[int, int] = {}
        for name, stage in self.slots.items():
            peaks[stage] = max(peaks.get(stage, 0), self.live[name].peak)
        return peaks

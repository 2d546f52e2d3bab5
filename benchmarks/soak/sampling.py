"""Memory, file handles and threads of every process of a run, over time, and their picture."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from matplotlib.figure import Figure

from manager.controller.state.events import WorkerAnswered
from manager.engine.loop.driver import Observed
from morph.contract.messages import WorkerReady

Role = Literal["manager", "worker", "host"]
MIB = 1024 * 1024


@dataclass(frozen=True)
class Sample:
    """Of one process at one moment."""

    time_s: float
    rss_mib: float
    num_handles: int
    num_threads: int


@dataclass
class Process:
    """One process and its samples, in order of time."""

    pid: int
    role: Role
    name: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def lived_s(self) -> float:
        """Between the first and the last sample."""
        return self.samples[-1].time_s - self.samples[0].time_s if self.samples else 0.0

    def after(self, warm_up_s: float) -> list[Sample]:
        """Samples since ``warm_up_s`` after the first one."""
        return [sample for sample in self.samples if sample.time_s >= self.samples[0].time_s + warm_up_s]


class Sampler:
    """Looks at this process and all below it every ``period_s``, from a thread of its own; also observes the driver.

    Workers are known by the process id with which they answer their setup; whatever else runs below this process
    is a host: what starts VMs, the rendezvous store, Ray's own processes.
    """

    def __init__(self, period_s: float) -> None:
        self.processes: dict[int, Process] = {}
        self.notes: list[tuple[float, int, str | None, int]] = []
        """(when, workers that are set up, shape, version)"""
        self._period_s = period_s
        self._workers: dict[int, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._noted_s = 0.0

    def __call__(self, observed: Observed) -> None:
        """Take note of workers and of the run's shape, the latter once a second."""
        event, state = observed.event, observed.decision.state
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, WorkerReady):
            self._workers[event.answer.pid] = event.worker
        if observed.time_s - self._noted_s >= 1.0:
            self._noted_s = observed.time_s
            shape = None if state.plan is None else state.plan.shape
            self.notes.append((observed.time_s, sum(w.ready for w in state.workers.values()), shape, state.version))

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            self._look()

    def _look(self) -> None:
        me = psutil.Process()
        now_s = time.time()
        for process in (me, *me.children(recursive=True)):
            try:
                with process.oneshot():
                    if process.status() == psutil.STATUS_ZOMBIE:  # killed, and not waited for yet
                        continue
                    sample = Sample(now_s, process.memory_info().rss / MIB, process.num_fds(), process.num_threads())
                    known = self.processes.get(process.pid)
                    if known is None:
                        known = self.processes[process.pid] = Process(process.pid, "host", "")
                    if known.role == "host":  # Ray names its processes only after they have started
                        known.name = _name_of(process)
            except psutil.Error:  # it has just ended
                continue
            known.samples.append(sample)
            if process.pid == os.getpid():
                known.role, known.name = "manager", "manager"
            elif process.pid in self._workers:
                known.role, known.name = "worker", self._workers[process.pid]


def _name_of(process: psutil.Process) -> str:
    arguments = process.cmdline()
    told = [argument for argument in arguments if argument.startswith(("manager.", "ray::"))]
    scripts = [Path(argument).name for argument in arguments if argument.endswith(".py")]
    return next(iter((*told, *scripts)), process.name())


@dataclass(frozen=True)
class Trend:
    """Of one quantity of one process: mean of its first and last quarter, and the slope of a straight line."""

    first: float
    last: float
    per_hour: float


def trend(samples: list[Sample], of: Callable[[Sample], float]) -> Trend:
    """The trend of a quantity; there must be two samples at least."""
    quarter = max(1, len(samples) // 4)
    values = [of(sample) for sample in samples]
    times_h = [(sample.time_s - samples[0].time_s) / 3600 for sample in samples]
    mean_t, mean_v = sum(times_h) / len(times_h), sum(values) / len(values)
    spread = sum((t - mean_t) ** 2 for t in times_h)
    slope = sum((t - mean_t) * (v - mean_v) for t, v in zip(times_h, values, strict=True)) / spread if spread else 0.0
    return Trend(sum(values[:quarter]) / quarter, sum(values[-quarter:]) / quarter, slope)


COLOURS = {"manager": "#c8372d", "worker": "#2f6db3", "host": "#8795a1"}


def draw(sampler: Sampler, path: Path, title: str) -> None:
    """Write the picture, 1600 x 1200 pixels."""
    figure = Figure(figsize=(16, 12), dpi=100)
    vms, workers, memory, handles = figure.subplots(4, 1, sharex=True)
    figure.suptitle(title)
    start_s = sampler.notes[0][0]
    minutes = [(time_s - start_s) / 60 for time_s, *_ in sampler.notes]
    vms.step(minutes, [ready for _, ready, _, _ in sampler.notes], where="post", color=COLOURS["worker"])
    vms.set_ylabel("workers ready")
    for index, label in enumerate(("P", "D")):
        sizes = [int(shape.split("x")[index]) if shape else 0 for _, _, shape, _ in sampler.notes]
        workers.step(minutes, sizes, where="post", label=label)
    workers.set_ylabel("shape")
    workers.legend(loc="upper right")
    for process in sampler.processes.values():
        _line(memory, process, start_s, [sample.rss_mib for sample in process.samples])
        _line(handles, process, start_s, [float(sample.num_handles) for sample in process.samples])
    memory.set_ylabel("RSS, MiB")
    handles.set_ylabel("file handles")
    handles.set_xlabel("minutes")
    for role, colour in COLOURS.items():
        memory.plot([], [], color=colour, label=role)
    memory.legend(loc="upper right")
    for panel in (vms, workers, memory, handles):
        panel.grid(axis="y", color="#e4e8ec")
        panel.set_ylim(bottom=0)
    temporary = path.with_name(f"{path.name}.new")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def _line(panel: Any, process: Process, start_s: float, values: list[float]) -> None:
    times = [(sample.time_s - start_s) / 60 for sample in process.samples]
    panel.plot(times, values, color=COLOURS[process.role], linewidth=0.9, alpha=0.8)

"""The time that reading samples adds to a step: in the computing thread, in one or two data workers, and from shards.

    python -m benchmarks data_reading --steps 60

One worker in this process trains a small model, shape 1x1, batches of 16 in 4 micro-batches. A sample takes 20 ms
without computing, like a file from a distant store. The result is the median step of the last third, when data workers
have long started, and its ratio to that with samples that take no time. All run one after the other.

Then one data worker reads the same samples from memory and from packed tar files (``--rounds`` runs of each, in turn).
The results are processor times per step: of the computing thread, of its calls to the loader, and of the data worker.

Last, managed runs of one worker on a local VM alternate between samples from memory without trackers, and samples from
shards with a tracker (TensorBoard, if it is installed) and a callback.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import io
import itertools
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import psutil
import torch
from torch import Tensor, nn

from benchmarks.harness import head, in_turns, machine, ratio, row, spread
from benchmarks.runs import Subject, play, specify, steady_vms, subject_of_job
from benchmarks.workers import plan_by_hand
from manager.controller.state.events import WorkerAnswered
from manager.engine.loop.driver import Observed
from manager.run_dir import JOURNAL
from manager.trackers.process import Watching
from manager.trackers.sinks import LIBRARIES
from manager.trackers.supervisor import Watchers
from morph import Job
from morph.contract.cluster import Policy
from morph.contract.messages import WorkerReady
from morph.data import MicroBatchLoader
from morph.data.streams import Stream, Tar
from morph.runtime.process.single import run_single

SAMPLE_S = 0.02
WIDTH, LENGTH, NUM_LAYERS = 512, 64, 4
NUM_SHARDS, SHARD_SIZE = 16, 32
WATCHES = "manager.trackers.process"
FOLDER = "MORPH_BENCHMARK_SHARDS"
"""The environment variable with the folder of the shards."""


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random rows, each of which takes a while."""

    def __init__(self, sample_s: float = SAMPLE_S) -> None:
        self._sample_s = sample_s

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self._sample_s)
        return {"x": torch.randn(LENGTH, WIDTH)}


def model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers)


def loss(built: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = (built(batch["x"]) - batch["x"]).square().mean()
    return found


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


none = Job(name="reading", model=model, loss=loss, dataset=Samples, optimizer=optimizer, batch_size=16, num_sections=2)
one, two = replace(none, data_workers=1), replace(none, data_workers=2)
compute = replace(none, dataset=lambda: Samples(0.0))


class InMemory(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The samples that are in the shards."""

    def __init__(self) -> None:
        self._rows = torch.randn(NUM_SHARDS * SHARD_SIZE, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self._rows[index]}


def write_shards(folder: Path) -> None:
    samples = InMemory()
    for shard in range(NUM_SHARDS):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for index in range(shard * SHARD_SIZE, (shard + 1) * SHARD_SIZE):
                content = samples[index]["x"].numpy().tobytes()
                member = tarfile.TarInfo(f"{index:06d}.floats")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        (folder / f"{shard:04d}.tar.gz").write_bytes(gzip.compress(packed.getvalue(), 1))


def decoded(parts: dict[str, Any]) -> dict[str, Tensor]:
    return {"x": torch.frombuffer(bytearray(parts["floats"]), dtype=torch.float32).view(LENGTH, WIDTH)}


in_memory = replace(one, dataset=InMemory)
in_shards = replace(one, dataset=lambda: Stream(Tar(os.environ[FOLDER]), decoded, window=4))


def run(name: str, num_steps: int, on_step: Callable[[], None]) -> str:
    """Train a job; returns a digest of the weights."""
    with tempfile.TemporaryDirectory() as directory:
        manifest = run_single(
            f"{Path(__file__).resolve()}:{name}",
            steps=num_steps,
            num_sections=2,
            micro_batch_size=4,
            checkpoint_url=directory,
            on_step=lambda _step, _loss: on_step(),
        )
    return "".join(unit.sha256 for unit in manifest.units)


def step_s(name: str, num_steps: int) -> tuple[float, str]:
    """Return the median step of the last third, and a digest of the weights."""
    ends_s: list[float] = []
    digest = run(name, num_steps, lambda: ends_s.append(time.perf_counter()))
    steps_s = [end - begin for begin, end in itertools.pairwise(ends_s)]
    return median(steps_s[-num_steps // 3 :]), digest


def step_processor_s(name: str, num_steps: int) -> tuple[float, float, float]:
    """Return processor seconds per step after a third of the run: of this thread, its loader, and the data worker."""
    taken: list[tuple[float, float, float]] = []
    getting_s = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*given: Any, **named: Any) -> Any:
            nonlocal getting_s
            begin_s = time.thread_time()
            try:
                return method(*given, **named)
            finally:
                getting_s += time.thread_time() - begin_s

        return call

    def on_step() -> None:
        others = [child.cpu_times() for child in psutil.Process().children()]
        taken.append((time.thread_time(), getting_s, sum(times.user + times.system for times in others)))

    load, expect = timed(MicroBatchLoader.load), timed(MicroBatchLoader.expect)
    with mock.patch.multiple(MicroBatchLoader, load=load, expect=expect):
        run(name, num_steps, on_step)
    counted = taken[num_steps // 3 :]
    own_s, samples_s, others_s = (
        (last - first) / (len(counted) - 1) for first, last in zip(counted[0], counted[-1], strict=True)
    )
    return own_s, samples_s, others_s


def compare_shards(num_steps: int, rounds: int) -> None:
    """Compare samples from memory with the same ones from shards."""
    with tempfile.TemporaryDirectory() as folder:
        kept = {FOLDER: f"{folder}/shards", "MORPH_CACHE_DIR": f"{folder}/cache"}
        with mock.patch.dict(os.environ, kept):
            Path(kept[FOLDER]).mkdir()
            write_shards(Path(kept[FOLDER]))
            ways = {name: functools.partial(step_processor_s, name, num_steps) for name in ("in_memory", "in_shards")}
            found = in_turns(ways, rounds)
    head("samples are read | the thread that computes | of that, to get samples | the data worker")
    middle: dict[str, list[float]] = {}
    for name, text in {"in_memory": "from memory", "in_shards": "from packed shards"}.items():
        columns = list(zip(*found[name], strict=True))
        middle[name] = [median(values) for values in columns]
        row(text, *(spread(values, "ms", 2, 1e3) for values in columns))
    more_s = middle["in_shards"][1] - middle["in_memory"][1]
    print(
        f"getting samples from shards adds {more_s / middle['in_memory'][0]:.2%} to a step of the thread that computes"
    )


class Told:
    """A callback that keeps the steps it receives."""

    def __init__(self) -> None:
        self._told: list[object] = []

    def on_step(self, done: object) -> None:
        self._told.append(done)


def watchers(run_dir: Path) -> Watchers:
    """Return a tracker and a callback for a run."""
    kinds: list[dict[str, str]] = [{"kind": "callback", "target": f"{Path(__file__).resolve()}:Told"}]
    if importlib.util.find_spec(LIBRARIES["tensorboard"]):
        kinds.append({"kind": "tensorboard"})
    common = {"run_dir": run_dir, "journal": run_dir / JOURNAL, "checkpoint_url": "", "job": "reading", "limit_s": 60.0}
    return Watchers(tuple(Watching.model_validate(common | one) for one in kinds), print)


class Meter:
    """Observes a managed run: the processor seconds of its participants at two of its steps."""

    def __init__(self, first: int, last: int) -> None:
        self._at, self._pid = (first, last), 0
        self.taken: dict[int, tuple[float, float, float]] = {}

    def __call__(self, observed: Observed) -> None:
        if isinstance(observed.event, WorkerAnswered) and isinstance(observed.event.answer, WorkerReady):
            self._pid = observed.event.answer.pid
        version = observed.decision.state.version
        if version in self._at and version not in self.taken:
            tasks = Path(f"/proc/{self._pid}/task").glob("*/schedstat")
            threads = [int(task.read_text().split()[0]) / 1e9 for task in tasks]
            others = [other for other in psutil.Process().children(recursive=True) if WATCHES in other.cmdline()]
            times = [other.cpu_times() for other in others]
            watching_s = sum(one.user + one.system for one in times)
            self.taken[version] = max(threads), time.process_time(), watching_s

    @property
    def step_s(self) -> tuple[float, float, float]:
        """Return the seconds per step of the computing thread, the manager, and trackers with callbacks."""
        first, last = (self.taken[version] for version in self._at)
        thread_s, manager_s, watching_s = (b - a for a, b in zip(first, last, strict=True))
        num = self._at[1] - self._at[0]
        return thread_s / num, manager_s / num, watching_s / num


def managed(
    subject: Subject, num_steps: int, variables: dict[str, str], *, watched: bool
) -> tuple[float, float, float]:
    """Return the processor seconds per step of a managed run, as measured by ``Meter``."""
    stages = plan_by_hand([0, subject.num_sections], 1, {4: ("FB" * 4,)}, num_micro_batches=4, m=subject.m)
    spec = specify(
        subject,
        {1: stages},
        Policy(checkpoint_every_steps=10 * num_steps),
        steady_vms(1),
        config={"num_steps": num_steps + 1},
        variables=variables,
    )
    meter = Meter(num_steps // 3, num_steps)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "run"

        def watch(observed: Observed) -> None:
            if watched and not meter.taken and not path.joinpath("trackers").exists():
                stack.enter_context(watchers(path))
            meter(observed)

        finish, _ = play(subject, spec, path, watch)
        stack.close()
    if finish.outcome != "finished":
        raise RuntimeError(finish.sentence)
    return meter.step_s


def compare_watched(num_steps: int, rounds: int) -> None:
    """Compare managed runs with shards, tracker and callback, and without them."""
    with tempfile.TemporaryDirectory() as folder:
        kept = {FOLDER: f"{folder}/shards", "MORPH_CACHE_DIR": f"{folder}/cache"}
        with mock.patch.dict(os.environ, kept):
            Path(kept[FOLDER]).mkdir()
            write_shards(Path(kept[FOLDER]))
            here = Path(__file__).resolve()
            off, on = (subject_of_job(f"{here}:{name}", 2, 4) for name in ("in_memory", "in_shards"))
            ways = {
                "off": functools.partial(managed, off, num_steps, kept, watched=False),
                "on": functools.partial(managed, on, num_steps, kept, watched=True),
            }
            found = in_turns(ways, rounds)
    head("trackers, callbacks, shards | the thread that computes | the manager | trackers and callbacks")
    columns = {way: list(zip(*found[way], strict=True)) for way in ways}
    for way, values in columns.items():
        row(way, *(spread(each, "ms", 2, 1e3) for each in values))
    names = ("the thread that computes", "the manager")
    ratios = [f"{name} {ratio(columns['on'][i], columns['off'][i]):.3f}" for i, name in enumerate(names)]
    print(f"on over off, median of the rounds' ratios: {', '.join(ratios)}")


def main(steps: int = 60, rounds: int = 5) -> None:
    names = {"compute": "at once", "none": "by the worker", "one": "by one data worker", "two": "by two"}
    found = {name: step_s(name, steps) for name in names}
    print(machine())
    head("samples are read | step | over compute")
    for name, text in names.items():
        row(text, f"{found[name][0] * 1e3:.0f} ms", f"{found[name][0] / found['compute'][0]:.2f}")
    print("weights are the same bytes" if len({digest for _, digest in found.values()}) == 1 else "weights DIFFER")
    compare_shards(steps, rounds)
    compare_watched(steps, rounds)

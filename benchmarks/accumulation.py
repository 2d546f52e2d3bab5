"""What exact accumulation costs: time and memory beside fast accumulation, in one run.

    python benchmarks/accumulation.py sums --millions 50
    python benchmarks/accumulation.py training --rounds 12 --steps 5

``sums``: gradients of so many parameters in the tensors of a GPT-2, without any training: one addition per
micro-batch, the reduction over two workers, and the end (mean gradients). ``training``: steps of
configs/jobs/gpt2_stdlib.py on one worker. Each kind has processes of its own, and they take turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from step_time.remote import Remote, call_all

from morph.contract.decided import Decided
from morph.contract.messages import Prepared, Reshaped, ReshapeOrder, Slot, Source, StepOrder, WorkerReady, WorkerSetup
from morph.cutting import cut, export_job
from morph.jobs.job import load_job
from morph.runtime.groups.channels import GroupSet, GroupSpec, connect_store
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.store import StoreHost
from morph.runtime.process.single import single_plan
from morph.runtime.process.worker import Worker
from morph.runtime.state.accumulators import Accumulator, ExactAccumulator, FastAccumulator
from morph.runtime.state.fixed_point import first_exponent
from morph.runtime.state.reducing import Reduction

LOOPBACK = "127.0.0.1"
AnswerT = TypeVar("AnswerT")
KINDS = ("exact", "fast")
GPT2_JOB = Path(__file__).resolve().parents[1] / "configs/jobs/gpt2_stdlib.py"
WIDTH = 1024
BLOCK_SHAPES = ((3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH))
SMALL_SHAPES = ((WIDTH,),) * 6


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Sums:
    """One of two workers that sum the same made-up gradients."""

    def __init__(self, kind: str, rank: int, millions: int, port: int) -> None:
        torch.set_num_threads(1)
        shapes: list[tuple[int, ...]] = []
        while sum(torch.Size(shape).numel() for shape in shapes) < millions * 1_000_000:
            shapes += [*BLOCK_SHAPES, *SMALL_SHAPES]
        generator = torch.Generator().manual_seed(rank)
        self._gradients = {str(i): torch.randn(s, generator=generator).mul_(1e-3) for i, s in enumerate(shapes)}
        self._kind = kind
        self._interrupt = Interrupt(1)
        self._groups = GroupSet(self._interrupt)
        spec = GroupSpec(kind, ("w0", "w1"))
        self._groups.form([spec], f"w{rank}", LOOPBACK, lambda: connect_store(LOOPBACK, port))
        self._before_bytes = peak_bytes()

    def shape(self) -> tuple[int, int]:
        """How many tensors and how many elements."""
        return len(self._gradients), sum(gradient.numel() for gradient in self._gradients.values())

    def turn(self, num_micro_batches: int) -> dict[str, float]:
        """One step's sums: seconds by part (an addition is of one micro-batch)."""
        begin_s = time.perf_counter()
        accumulator = self._accumulator(2 * num_micro_batches)
        marks_s = [begin_s, time.perf_counter()]
        for _ in range(num_micro_batches):
            for name, gradient in self._gradients.items():
                accumulator.add(name, gradient)
        marks_s.append(time.perf_counter())
        reduction = Reduction(self._interrupt, 2 * num_micro_batches)
        reduction.put(accumulator, self._groups.ring(self._kind))
        reduction.finish()
        marks_s.append(time.perf_counter())
        accumulator.finish(2 * num_micro_batches, 0)
        marks_s.append(time.perf_counter())
        make_s, add_s, reduce_s, finish_s = (b - a for a, b in itertools.pairwise(marks_s))
        return {"make": make_s, "add": add_s / num_micro_batches, "reduce": reduce_s, "finish": finish_s}

    def _accumulator(self, num: int) -> Accumulator:
        if self._kind == "fast":
            return FastAccumulator(self._gradients)
        return ExactAccumulator(self._gradients, dict.fromkeys(self._gradients, first_exponent(num)), num)

    def grown_bytes(self) -> int:
        """By how much the process's peak grew over what it held before the first turn."""
        return peak_bytes() - self._before_bytes


class Training:
    """One worker that trains gpt2_stdlib."""

    def __init__(self, kind: str, directory: str) -> None:
        torch.set_num_threads(1)
        job_path = _fast_job(directory) if kind == "fast" else f"{GPT2_JOB}:job"
        job = load_job(job_path)
        m = job.micro_batch_size
        assert m is not None
        model = cut(export_job(job), num_sections=job.num_sections, micro_batch_size=m)
        self._worker, self._units = Worker(), tuple(unit.id for unit in model.units)
        setup = WorkerSetup(
            worker="w0",
            job_path=job_path,
            fingerprint=model.fingerprint,
            num_sections=len(model.sections),
            micro_batch_size=m,
            checkpoint_url=directory,
            store_host=LOOPBACK,
            store_port=1,
            listen_host=LOOPBACK,
        )
        _expect(self._worker.setup(setup), WorkerReady)
        order = ReshapeOrder(
            generation=1,
            version=0,
            plan=single_plan(model.fingerprint, len(model.sections), m, job.batch_size // m),
            slots=(Slot(worker="w0", stage=0, replica=0),),
            sources=tuple(Source(worker="w0", unit=unit, kind="initial") for unit in self._units),
        )
        _expect(self._worker.reshape(order), Reshaped)
        self._num_parameters = sum(torch.Size(shape).numel() for shape, _ in model.parameter_specs.values())
        self._step = 0

    def num_parameters(self) -> int:
        return self._num_parameters

    def steps(self, count: int) -> list[float]:
        """Losses of so many steps."""
        losses = []
        for _ in range(count):
            for attempt in range(8):
                decided = Decided(version=self._step) if self._step else None
                order = StepOrder(generation=1, step=self._step, attempt=attempt, decided=decided)
                answer = _expect(self._worker.step(order), Prepared)
                if not answer.overflowed:
                    break
            losses.append(sum(entry.loss for entry in answer.losses) / len(answer.losses))
            self._step += 1
        return losses

    def peak_bytes(self) -> int:
        return peak_bytes()


def _fast_job(directory: str) -> str:
    """The same job with fast accumulation, as a file of its own."""
    path = Path(directory) / "fast_job.py"
    lines = (
        "from dataclasses import replace",
        "from morph.jobs.job import load_job",
        f"fast = replace(load_job({f'{GPT2_JOB}:job'!r}), accumulation='fast')",
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{path}:fast"


def _expect(answer: object, kind: type[AnswerT]) -> AnswerT:
    if not isinstance(answer, kind):
        raise RuntimeError(f"{answer} is no {kind.__name__}")
    return answer


def measure_sums(options: argparse.Namespace) -> None:
    store = StoreHost(LOOPBACK)
    pairs: dict[str, list[Remote]] = {}
    for kind in KINDS:
        made = [partial(Sums, kind, rank, options.millions, store.port()) for rank in range(2)]
        pairs[kind] = [Remote(make) for make in made]
    num_tensors, num_elements = pairs["exact"][0].call("shape")
    parts_s: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for round_index in range(options.rounds + 1):
        for kind in KINDS:
            both = call_all(pairs[kind], "turn", options.micro_batches)
            if round_index:  # the first one warms up
                parts_s[kind].append({part: max(one[part] for one in both) for part in both[0]})
    grown = {kind: max(call_all(pairs[kind], "grown_bytes")) for kind in KINDS}
    for pair in pairs.values():
        for remote in pair:
            remote.end()
    print(f"{num_elements / 1e6:.1f} M parameters in {num_tensors} tensors, two workers, {options.rounds} rounds")
    print("| | exact | fast | ratio |\n|---|---|---|---|")
    for part in ("make", "add", "reduce", "finish"):
        median = {kind: statistics.median(entry[part] for entry in parts_s[kind]) for kind in KINDS}
        ratio = statistics.median(e[part] / f[part] for e, f in zip(parts_s["exact"], parts_s["fast"], strict=True))
        print(f"| {part} | {median['exact'] * 1e3:.1f} ms | {median['fast'] * 1e3:.1f} ms | {ratio:.2f} |")
    for name, sizes in (("accumulator", {"exact": 8 * num_elements, "fast": 4 * num_elements}), ("peak", grown)):
        row = f"| {sizes['exact'] / 2**20:.0f} MiB | {sizes['fast'] / 2**20:.0f} MiB "
        print(f"| {name} memory {row}| {sizes['exact'] / sizes['fast']:.2f} |")


def measure_training(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        workers = {kind: Remote(partial(Training, kind, directory)) for kind in KINDS}
        losses = {kind: workers[kind].call("steps", 2) for kind in KINDS}
        step_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(options.rounds):
            for kind in KINDS:
                begin_s = time.perf_counter()
                losses[kind] += workers[kind].call("steps", options.steps)
                step_s[kind].append((time.perf_counter() - begin_s) / options.steps)
        peaks = {kind: workers[kind].call("peak_bytes") for kind in KINDS}
        num_parameters = workers["exact"].call("num_parameters")
        for worker in workers.values():
            worker.end()
    median = {kind: statistics.median(step_s[kind]) * 1e3 for kind in KINDS}
    ratio = statistics.median(a / b for a, b in zip(step_s["exact"], step_s["fast"], strict=True))
    print(f"gpt2_stdlib, {num_parameters / 1e6:.2f} M parameters, one worker, {options.rounds} x {options.steps} steps")
    print("| | exact | fast | ratio |\n|---|---|---|---|")
    print(f"| step | {median['exact']:.1f} ms | {median['fast']:.1f} ms | {ratio:.3f} |")
    print(f"| accumulator | {num_parameters * 8 / 2**20:.1f} MiB | {num_parameters * 4 / 2**20:.1f} MiB | 2.00 |")
    mib = {kind: peaks[kind] / 2**20 for kind in KINDS}
    print(
        f"| peak of the process | {mib['exact']:.0f} MiB | {mib['fast']:.0f} MiB | {mib['exact'] / mib['fast']:.3f} |"
    )
    apart = max(abs(a - b) for a, b in zip(losses["exact"], losses["fast"], strict=True))
    print(f"largest difference of a loss over {len(losses['fast'])} steps: {apart:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sums", "training"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--millions", type=int, default=50)
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    measures: dict[str, Callable[[argparse.Namespace], None]] = {"sums": measure_sums, "training": measure_training}
    measures[options.what](options)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

"""The cost of exact accumulation: its time and memory compared with fast accumulation, in one run.

    python -m benchmarks accumulation --millions 50

Gradients of so many parameters in the tensors of a GPT-2, without any training: one addition per micro-batch, the
reduction over two workers, and the end (mean gradients). Each kind has processes of its own, and they take turns.
``step_time.one_worker`` has whole steps of both kinds.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import time
from functools import partial

import torch

from benchmarks.harness import LOOPBACK, head, in_turns, load, machine, ratio, row
from benchmarks.remote import Remote, call, call_all, end_all
from morph.runtime.groups.channels import GroupSet, GroupSpec, connect_store
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.store import StoreHost
from morph.runtime.state.accumulators import Accumulator, ExactAccumulator, FastAccumulator
from morph.runtime.state.fixed_point import first_exponent
from morph.runtime.state.reduction import Reduction

KINDS = ("exact", "fast")
MIB = 2**20
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
        """Return the numbers of tensors and of elements."""
        return len(self._gradients), sum(gradient.numel() for gradient in self._gradients.values())

    def turn(self, num_micro_batches: int) -> dict[str, float]:
        """Sum one step; return the seconds by part (one addition per micro-batch)."""
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
        """Return how far the process's peak memory exceeds its memory before the first turn."""
        return peak_bytes() - self._before_bytes


def measure_sums(rounds: int, millions: int, micro_batches: int) -> None:
    store = StoreHost(LOOPBACK)
    pairs = {kind: [Remote(partial(Sums, kind, rank, millions, store.port())) for rank in range(2)] for kind in KINDS}
    num_tensors, num_elements = call(pairs["exact"][0], "shape")

    def turn(kind: str) -> dict[str, float]:
        both = call_all(pairs[kind], "turn", micro_batches)
        return {part: max(one[part] for one in both) for part in both[0]}

    parts_s = in_turns({kind: partial(turn, kind) for kind in KINDS}, rounds, warm_up=1)
    grown = [max(call_all(pairs[kind], "grown_bytes")) for kind in KINDS]
    for pair in pairs.values():
        end_all(pair)
    print(f"{num_elements / 1e6:.1f} M parameters in {num_tensors} tensors, two workers, {rounds} rounds")
    head("| exact | fast | ratio")
    for part in ("make", "add", "reduce", "finish"):
        exact, fast = ([entry[part] for entry in parts_s[kind]] for kind in KINDS)
        cells = (f"{1e3 * statistics.median(each):.1f} ms" for each in (exact, fast))
        row(part, *cells, f"{ratio(exact, fast):.2f}")
    row_of_memory("accumulator memory", 8 * num_elements, 4 * num_elements)
    row_of_memory("peak memory", *grown)


def row_of_memory(name: str, exact_bytes: int, fast_bytes: int) -> None:
    row(name, f"{exact_bytes / MIB:.1f} MiB", f"{fast_bytes / MIB:.1f} MiB", f"{exact_bytes / fast_bytes:.3f}")


def main(rounds: int = 12, millions: int = 50, micro_batches: int = 4) -> None:
    print(machine())
    measure_sums(rounds, millions, micro_batches)
    print(f"load at the end {load():.1f}")

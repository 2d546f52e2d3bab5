"""Speed of the simulator, compared with the same rules in a plain loop around heapq in the same run.

    python -m benchmarks simulator_speed

Prints milliseconds of CPU time, the best of several runs, after one run that compiles or loads the loops. The plain
loop, the reference engine and the compiled loop must agree on when the mini-batch ends, or the benchmark fails.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.harness import cpu_s, head, row
from morph.contract.profile import Profile
from simulator import plan, plan_table, simulate, synthetic_profile
from simulator.costs.stage_costs import SectionCosts, stage_costs
from simulator.engine import reference
from simulator.engine.execution import execute_orders, lane_times
from simulator.engine.pipeline import StageTimes, run_pipeline
from simulator.engine.schedules import stage_windows
from simulator.search.partition import partition_table

DEPTH, REPLICAS, MICRO_BATCHES = 36, 3, 683


def best_ms(action: Callable[[], object], repeats: int = 20) -> float:
    action()
    return min(cpu_s(action) for _ in range(repeats)) * 1e3


class HeapqPipeline:
    """The rules of ``simulator.engine`` in the most direct form: a heap of instants at which to decide."""

    def __init__(self, times: StageTimes, count: int) -> None:
        self.count, self.last = count, times.num_stages - 1
        self.forward, self.recompute, self.backward = (
            values.tolist() for values in (times.forward_ns, times.recompute_ns, times.backward_ns)
        )
        self.activation, self.gradient = times.activation_ns.tolist(), times.gradient_ns.tolist()
        self.activation_wire, self.gradient_wire = (wire.tolist() for wire in times.wires_ns)
        self.window, self.again = times.window.tolist(), times.recompute.tolist()
        stages = range(times.num_stages)
        self.activations: list[list[int]] = [[] for _ in stages]
        self.gradients: list[list[int]] = [[] for _ in stages]
        self.num_f, self.num_b, self.task = [0 for _ in stages], [0 for _ in stages], ["" for _ in stages]
        self.recomputed = [False for _ in stages]
        self.act_free, self.grad_free = [0 for _ in stages], [0 for _ in stages]
        self.heap: list[tuple[int, int, int]] = [(0, 1 + self.last, 0)]

    def play(self) -> int:
        """Return when the last backward ends."""
        end = 0
        while self.heap:
            now, rank, stage = heapq.heappop(self.heap)
            if rank == 0:
                if self.task[stage] == "B":
                    self.num_b[stage] += 1
                    self.recomputed[stage], end = False, now
                self.recomputed[stage] |= self.task[stage] == "R"
                self.task[stage] = ""
                heapq.heappush(self.heap, (now, 1 + self.last - stage, stage))
            elif not self.task[stage]:
                letter = self.choose(stage, now)
                if letter:
                    self.begin(stage, letter, now)
        return end

    def look_at(self, stage: int, instant: int) -> None:
        heapq.heappush(self.heap, (instant, 1 + self.last - stage, stage))

    def choose(self, stage: int, now: int) -> str:
        num_f, num_b, early = self.num_f[stage], self.num_b[stage], False
        if num_b < num_f:
            due = 0 if stage == self.last else None
            if stage < self.last and len(self.gradients[stage]) > num_b:
                due = self.gradients[stage][num_b]
            if self.recomputed[stage] or not self.again[stage]:
                if due is not None and due <= now:
                    return "B"
                if self.recomputed[stage]:
                    return ""
            elif due is not None and due <= now:
                return "R"
            elif due is not None:
                early = due - self.recompute[stage] <= now
        arrived = stage == 0 or (len(self.activations[stage]) > num_f and self.activations[stage][num_f] <= now)
        if arrived and num_f < self.count and num_f - num_b < self.window[stage]:
            return "F"
        return "R" if early else ""

    def begin(self, stage: int, letter: str, now: int) -> None:
        self.task[stage] = letter
        if letter == "R":
            end = now + self.recompute[stage]
        elif letter == "F":
            end = now + self.forward[stage]
            self.num_f[stage] += 1
            if stage < self.last:
                leaves = max(end, self.act_free[stage])
                self.act_free[stage] = leaves + self.activation_wire[stage]
                self.activations[stage + 1].append(leaves + self.activation[stage])
                self.look_at(stage + 1, leaves + self.activation[stage])
        else:
            end = now + self.backward[stage]
            if stage > 0:
                leaves = max(end, self.grad_free[stage])
                self.grad_free[stage] = leaves + self.gradient_wire[stage - 1]
                arrival = leaves + self.gradient[stage - 1]
                self.gradients[stage - 1].append(arrival)
                self.look_at(stage - 1, arrival)
                self.look_at(stage - 1, max(now, arrival - self.recompute[stage - 1]))
        heapq.heappush(self.heap, (end, 0, stage))


def profile(uneven: bool, num_sections: int = 72, batch_size: int = 8192) -> Profile:
    spread = np.random.default_rng(0).uniform(0.8, 1.2, num_sections)
    forward_s = [0.01 * float(factor) for factor in spread] if uneven else 0.01
    return synthetic_profile(num_sections=num_sections, batch_size=batch_size, micro_batch_size=4, forward_s=forward_s)


def stage_times(measured: Profile, slope: int) -> StageTimes:
    sections = SectionCosts(measured, 4)
    boundaries = partition_table(sections, "varuna", num_micro_batches=MICRO_BATCHES, slope=slope).boundaries(DEPTH)
    windows = stage_windows("varuna", DEPTH, MICRO_BATCHES, slope)
    return stage_costs(sections, boundaries, windows, "varuna").times


def one_configuration(uneven: bool, slope: int) -> None:
    times, counts = stage_times(profile(uneven), slope), (MICRO_BATCHES,) * REPLICAS
    planned = run_pipeline(times, counts, keep_orders=True)
    assert HeapqPipeline(times, MICRO_BATCHES).play() == planned.makespan_ns, "the loops disagree"
    skipping = best_ms(lambda: run_pipeline(times, counts))
    plain = best_ms(lambda: run_pipeline(times, counts, skip_periods=False))
    lanes = replace(lane_times(times, REPLICAS), share_links=True)
    shared = best_ms(lambda: execute_orders(lanes, planned.orders, times.window), 10)
    heap = best_ms(lambda: HeapqPipeline(times, MICRO_BATCHES).play(), 2)
    rate = MICRO_BATCHES * (3 * DEPTH - 1) / plain / 1e3
    name = f"{'uneven' if uneven else 'equal'} stages, slope {slope}"
    cells = (f"{value:.2f}" for value in (skipping, plain, rate, shared, heap))
    row(name, *cells, f"{heap / skipping:.0f}")


def one_answer(uneven: bool) -> None:
    """A shape as a user asks for it: windows chosen, links shared, with orders and explanation."""
    measured = profile(uneven)
    took_ms = best_ms(partial(simulate, measured, num_stages=DEPTH, num_replicas=REPLICAS))
    print(f"simulate() of {'uneven' if uneven else 'equal'} stages: {took_ms:.1f} ms")


def main() -> None:
    tasks = MICRO_BATCHES * (3 * DEPTH - 1)
    print(f"One configuration: P={DEPTH}, D={REPLICAS}, {MICRO_BATCHES} micro-batches per replica ({tasks} tasks each;")
    print("equal replicas are played once)")
    columns = "ms | without skipping periods | million tasks/s | orders executed over shared links"
    head(f"configuration | {columns} | plain heapq loop | times as long")
    for uneven in (False, True):
        for slope in (1, 2, 4):
            one_configuration(uneven, slope)
    for uneven in (False, True):
        one_answer(uneven)
    times = stage_times(profile(False), 1)
    one = (MICRO_BATCHES,)
    slow, fast = (play(times, one) for play in (reference.run_pipeline, run_pipeline))
    assert slow.makespan_ns == fast.makespan_ns, "the engines disagree"
    slow_ms = best_ms(lambda: reference.run_pipeline(times, one), repeats=1)
    print(f"reference engine, equal stages, slope 1: {slow_ms:.0f} ms ({tasks / slow_ms / 1e3:.2f} million tasks/s)")
    head("sweep over every P, m = 4 | best, ms | with five runners-up and their orders | table of 1 to so many GPUs")
    for gpus, batch_size, num_sections in ((128, 8192, 72), (10_000, 1_000_000, 96)):
        for uneven in (False, True):
            measured = profile(uneven, num_sections, batch_size)
            alone = best_ms(partial(plan, measured, num_gpus=gpus, num_runners_up=0), 5)
            ranked = best_ms(partial(plan, measured, num_gpus=gpus), 5)
            table = f"{best_ms(partial(plan_table, measured, gpus), 2):.0f}" if gpus == 128 else ""
            name = f"{gpus} GPUs, batch {batch_size}, {num_sections} {'uneven' if uneven else 'equal'} sections"
            row(name, f"{alone:.0f}", f"{ranked:.0f}", table)

"""Measures F_i(m), B_i(m) and memory of one section of each kind; in turns, so that caches are cold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil

from calibrate.computing.peak import held_bytes, peak_bytes
from calibrate.timing.bench import Bench
from calibrate.timing.clocks import Clock
from calibrate.timing.samples import Sampling, no_garbage_collection, timing
from morph.contract.base import Value
from morph.contract.profile import Timing

_WARM_UP = 2


class SectionMeasurement(Value):
    """The measurements of one kind of section at one m; bytes per sample are rounded up."""

    forward: Timing
    backward: Timing
    input_bytes_per_sample: int
    activation_bytes_per_sample: int
    peak_bytes: int


def measure_benches(
    benches: Sequence[Bench], micro_batch_size: int, clock: Clock, sampling: Sampling
) -> dict[str, SectionMeasurement]:
    """Measure benches of each kind, set up for this size on one device, in turns; return measurements by signature."""
    for bench in benches:
        bench.both()  # tensors that are made once and for all do not belong to a micro-batch
    counted = [_counted(bench) for bench in benches]
    held = [held_bytes(partial(bench.forward, 0), bench.device) for bench in counted]
    peaks = [peak_bytes(bench.both, bench.device) for bench in counted]
    forward_s, backward_s = _sample(benches, clock, sampling)
    return {
        bench.section.signature: SectionMeasurement(
            forward=timing(forward_s[place]),
            backward=timing(backward_s[place]),
            input_bytes_per_sample=ceil(bench.given_bytes() / micro_batch_size),
            activation_bytes_per_sample=ceil(held[place] / micro_batch_size),
            peak_bytes=peaks[place],
        )
        for place, bench in enumerate(benches)
    }


def _counted(bench: Bench) -> Bench:
    """Return the bench whose memory is counted: on a CPU the uncompiled section, whose operations show its tensors."""
    if bench.device.type == "cuda" or bench.section.finish is None:
        return bench
    return replace(bench, section=replace(bench.section, finish=None, _on_device={}))


def _sample(benches: Sequence[Bench], clock: Clock, sampling: Sampling) -> tuple[list[list[float]], list[list[float]]]:
    """Return the seconds of each forward and each backward, by bench."""
    forward_s: list[list[float]] = [[] for _ in benches]
    backward_s: list[list[float]] = [[] for _ in benches]
    for _ in range(_WARM_UP):
        for bench in benches:
            bench.both()
    with no_garbage_collection():
        begun_s = time.perf_counter()
        while sampling.wants_more([*forward_s, *backward_s], time.perf_counter() - begun_s):
            for place, bench in enumerate(benches):
                clock.settle()
                start = clock.mark()
                run = bench.forward(len(forward_s[place]))
                middle = clock.mark()
                bench.backward(run)
                end = clock.mark()
                clock.settle()
                forward_s[place].append(clock.between_s(start, middle))
                backward_s[place].append(clock.between_s(middle, end))
    return forward_s, backward_s

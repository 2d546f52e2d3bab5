"""Partial sums of workers when a step is given up, in a simulated spot cluster."""

from __future__ import annotations

import gc

from simulated_job import SIZES, UNITS
from test_jumping import EXACT, PLANS

from manager.controller.state.events import Event
from manager.controller.state.state import Decision
from manager.simulation.spot.cluster import SpotCluster, without_cycles
from manager.simulation.spot.job import SpotJob


def spared(aborted_s: float) -> int:
    """Return how many of a step's eight micro-batches need not be repeated after the loss of one of four VMs."""
    job = SpotJob(
        name="job",
        batch_size=8,
        plans=PLANS,
        units=UNITS,
        unit_bytes=SIZES,
        durations=EXACT.model_copy(update={"aborted_s": aborted_s}),
    )
    num: list[int] = []

    def watch(now_s: float, event: Event, decision: Decision) -> None:
        order = decision.state.reshape
        if order is not None and order.generation == 2 and not num:
            left = () if order.salvage is None else order.salvage.remaining
            num.append(8 - sum(end - first for first, end in left) if order.salvage is not None else 0)

    cluster = SpotCluster(job, num_steps=10**6, num_expected=4, watcher=watch)
    names = [cluster.vm_came() for _ in range(4)]
    cluster.play(60.0)
    assert cluster.workers.formed is not None
    begun_s = cluster.state.saving.save_times.ordered_s
    assert begun_s is not None
    cluster.after(begun_s + 1.0 - cluster.now_s, lambda: cluster.vm_taken(names[-1]))
    cluster.play(begun_s + 10.0)
    return num[0]


def test_work_done_until_a_worker_aborts_need_not_be_repeated() -> None:
    assert 0 < spared(aborted_s=0.0) < spared(aborted_s=0.5)


def test_decisions_form_no_cycles_of_objects() -> None:
    """Else each would keep the state before it until the collector runs, which a replay does without."""
    job = SpotJob(name="job", batch_size=8, plans=PLANS, units=UNITS, unit_bytes=SIZES)
    for first in (True, False):  # the first time, modules and compiled loops may be loaded, which leaves cycles
        cluster = SpotCluster(job, num_steps=10**6, num_expected=4)
        names = [cluster.vm_came() for _ in range(4)]
        with without_cycles():
            gc.collect()
            cluster.play(60.0)
            cluster.vm_taken(names[-1])
            cluster.play(120.0)
            assert cluster.num_decisions > 10
            assert gc.collect() < cluster.num_decisions or first

"""Plays Morph in place: the controller of real runs decides (manager.simulation.spot.cluster)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import simpy

from manager.accounting.account import TimeUse
from manager.controller.state.events import NodeFacts
from manager.simulation.policies.membership import ON_DEMAND, end_of, nothing_paid, usd_of
from manager.simulation.spot.cluster import SpotCluster, without_cycles
from manager.simulation.spot.job import SpotJob
from manager.simulation.spot.run_end import Moment, PolicyOutcome, SpotPrices, Until
from manager.simulation.spot.vms import Acting
from morph.contract.lives import Recorded, recorded
from morph.contract.trace import Trace, TraceEvent

MANY_STEPS = 10**12
LOOK_EVERY_S = 600.0
"""Seconds between two checks whether the dollars are spent, each with a report of progress."""


def play_morph(
    job: SpotJob,
    trace: Trace,
    *,
    until: Until,
    seed: int = 0,
    prices: SpotPrices | None = None,
    name: str = "",
    redundancy: str | None = None,
    show_share: Callable[[float], None] = lambda _share: None,
) -> PolicyOutcome:
    """Play the real controller's decisions on these VMs.

    VMs whose events' source is ``ON_DEMAND`` have the on-demand price. ``redundancy``: replaces the job's value.
    ``show_share``: called regularly with the share of the time, or of the steps, that is over.
    """
    if redundancy is not None:
        policy = job.policy.model_copy(update={"redundancy": redundancy})
        job = job.model_copy(update={"policy": policy})
    first_s = trace.events[0].time_s
    cluster = SpotCluster(
        job,
        num_steps=until.num_steps or MANY_STEPS,
        seed=seed,
        num_expected=job.gpus_per_vm * sum(event.time_s == first_s for event in trace.events),
    )

    def live(changes: list[tuple[Recorded, simpy.Timeout]]) -> Acting:
        """Play a VM's life: it comes, may get a notice, and is taken."""
        vm = ""
        for change, due in changes:
            yield due
            event = change.event
            match change.kind:
                case "came":
                    facts = NodeFacts(
                        provider="simulated",
                        size=event.instance_type,
                        zone=event.zone,
                        node_type=job.node_types.get(event.instance_type, ""),
                    )
                    vm = cluster.vm_came(facts, usd_of(event, trace, prices))
                case "warned":
                    cluster.vm_noticed(vm, change.taken_s - change.time_s)
                case "taken":
                    cluster.vm_taken(vm)

    lives: dict[str, list[tuple[Recorded, simpy.Timeout]]] = {}
    for change in recorded(trace):
        due = cluster.env.timeout(change.time_s)  # made now, so that changes of one instant keep the trace's order
        lives.setdefault(change.event.node_id, []).append((change, due))
    for of_one in lives.values():
        cluster.env.process(live(of_one))
    end_s, gave_up = end_of(until, trace), ""
    with without_cycles():
        _play(cluster, until, end_s, show_share)
    account, ended_s = cluster.account, cluster.now_s
    if cluster.finish is not None and cluster.finish.outcome != "finished":
        gave_up = f"gave up after {ended_s / 3600:.2g} of {end_s / 3600:.4g} hours: {cluster.finish.sentence}"
        cluster.moments.append(Moment(ended_s, 0, "", 0.0))
        ended_s = max(ended_s, end_s)
    changes = sum(before.shape != after.shape for before, after in pairwise(cluster.moments))
    return PolicyOutcome(
        policy="morph" if redundancy is None else f"morph-{redundancy}",
        trace=name,
        seed=seed,
        hours=ended_s / 3600,
        steps=cluster.state.version,
        examples=cluster.state.version * job.batch_size,
        lost_steps=cluster.lost_steps,
        num_losses=cluster.num_lost // job.gpus_per_vm,
        num_fatal=cluster.num_fatal,
        num_changes=changes,
        vm_s=account.total_s / job.gpus_per_vm,
        parts_s={part: account.part_s(part) / job.gpus_per_vm for part in TimeUse},
        usd=None if nothing_paid(trace, prices) is None else _usd(cluster),
        finished=cluster.finish is not None and cluster.finish.outcome == "finished",
        gave_up=gave_up,
        moments=tuple(cluster.moments),
    )


def play_mix(
    job: SpotJob,
    trace: Trace,
    *,
    until: Until,
    seed: int = 0,
    prices: SpotPrices | None = None,
    name: str = "",
    on_demand_share: float,
    show_share: Callable[[float], None] = lambda _share: None,
) -> PolicyOutcome:
    """Play Morph on as many VMs, of which this share is on demand and never taken; the others follow the trace."""
    num = round(on_demand_share * trace.max_nodes)
    kept: set[str] = set()
    first_s = trace.events[0].time_s
    events = [
        TraceEvent(time_s=first_s, event="add", node_id=f"{ON_DEMAND}-{place}", source=ON_DEMAND)
        for place in range(num)
    ]
    for event in trace.events:
        if event.event == "add" and len(kept) < trace.max_nodes - num:
            kept.add(event.node_id)
            events.append(event)
        elif event.event == "remove" and event.node_id in kept:
            kept.remove(event.node_id)
            events.append(event)
    mixed = trace.model_copy(update={"events": tuple(events)})
    outcome = play_morph(job, mixed, until=until, seed=seed, prices=prices, name=name, show_share=show_share)
    return replace(outcome, policy=f"mix-{round(100 * on_demand_share)}")


def _play(cluster: SpotCluster, until: Until, end_s: float, show_share: Callable[[float], None]) -> None:
    while cluster.finish is None and cluster.now_s < end_s:
        cluster.play(min(end_s, cluster.now_s + LOOK_EVERY_S))
        done = [cluster.now_s / end_s]
        if until.kind == "usd":
            done.append(_usd(cluster) / until.amount)
        elif until.num_steps:
            done.append(cluster.state.version / until.num_steps)
        show_share(min(1.0, max(done)))
        if until.kind == "usd" and done[-1] >= 1:
            break


def _usd(cluster: SpotCluster) -> float:
    bill = cluster.account.bill()
    return 0.0 if bill is None else bill.total_usd

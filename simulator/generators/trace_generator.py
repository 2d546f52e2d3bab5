"""Spot traces drawn from a seed: VMs revoked one at a time or several at once, and replaced after a while.

Revocations are a Poisson process over the whole cluster. A share of them takes two or more VMs at the
same instant, from one zone first, as published traces show (Bamboo, section 3: most pre-emptions come in
bulk and hit one zone). The provider keeps trying to bring the cluster to ``max_nodes``: each missing VM
arrives after an exponential delay.
"""

from __future__ import annotations

import heapq

import numpy as np

from morph.contract.errors import ConfigError
from morph.contract.trace import Trace, TraceEvent

_ARRIVAL, _REVOCATION = 0, 1


def generate_trace(
    seed: int,
    *,
    duration_s: float = 3600.0,
    initial: int = 6,
    min_nodes: int = 1,
    max_nodes: int = 8,
    mean_revocation_s: float = 300.0,
    bulk_share: float = 0.3,
    replacement_s: float = 120.0,
    zones: tuple[str, ...] = ("zone-a", "zone-b"),
    instance_type: str = "spot",
) -> Trace:
    """Draw one trace. The same arguments give the identical trace.

    Args:
        seed: Of the numpy Generator.
        duration_s: No event is later.
        initial: VMs present at time 0.
        min_nodes: Revocations leave at least this many VMs.
        max_nodes: Arrivals bring the cluster to at most this many VMs; ``initial`` when nothing is lost.
        mean_revocation_s: Mean time between two revocations of the whole cluster (each takes one or more VMs).
        bulk_share: Probability that a revocation takes two or more VMs at once (2 + a geometric number).
        replacement_s: Mean time until a missing VM is replaced.
        zones: VMs are dealt to them in turn.
        instance_type: Written into every event.

    Raises:
        ConfigError: naming the argument that is out of range.
    """
    _check(duration_s, initial, min_nodes, max_nodes, mean_revocation_s, bulk_share, replacement_s, zones)
    rng = np.random.default_rng(seed)
    alive: dict[str, str] = {}
    events: list[TraceEvent] = []
    agenda: list[tuple[float, int, int]] = []
    num_added = sequence = 0

    def record(time_s: float, event: str, node_id: str, zone: str) -> None:
        events.append(
            TraceEvent.model_validate(
                {
                    "time_s": float(f"{time_s:g}"),
                    "event": event,
                    "node_id": node_id,
                    "zone": zone,
                    "instance_type": instance_type,
                    "source": f"generated:seed={seed}",
                }
            )
        )

    def add(time_s: float) -> None:
        nonlocal num_added
        node_id, zone = f"vm{num_added}", zones[num_added % len(zones)]
        num_added += 1
        alive[node_id] = zone
        record(time_s, "add", node_id, zone)

    def schedule(after_s: float, kind: int, mean_s: float) -> None:
        nonlocal sequence
        sequence += 1
        heapq.heappush(agenda, (after_s + float(rng.exponential(mean_s)), sequence, kind))

    for _ in range(initial):
        add(0.0)
    for _ in range(max_nodes - initial):
        schedule(0.0, _ARRIVAL, replacement_s)
    schedule(0.0, _REVOCATION, mean_revocation_s)
    while agenda and agenda[0][0] <= duration_s:
        now_s, _, kind = heapq.heappop(agenda)
        if kind == _ARRIVAL:
            add(now_s)
            continue
        for node_id in _victims(rng, alive, min_nodes, bulk_share):
            record(now_s, "remove", node_id, alive.pop(node_id))
            schedule(now_s, _ARRIVAL, replacement_s)
        schedule(now_s, _REVOCATION, mean_revocation_s)
    return Trace(events=tuple(events))


def _victims(rng: np.random.Generator, alive: dict[str, str], min_nodes: int, bulk_share: float) -> list[str]:
    """Node ids that one revocation takes: the first victim's zone is emptied before others are touched."""
    wanted = 2 + int(rng.geometric(0.5)) - 1 if rng.random() < bulk_share else 1
    nodes = [str(node) for node in rng.permutation(sorted(alive))]
    if not nodes:
        return []
    zone = alive[nodes[0]]
    nodes.sort(key=lambda node: alive[node] != zone)
    return nodes[: max(0, min(wanted, len(nodes) - min_nodes))]


def _check(
    duration_s: float,
    initial: int,
    min_nodes: int,
    max_nodes: int,
    mean_revocation_s: float,
    bulk_share: float,
    replacement_s: float,
    zones: tuple[str, ...],
) -> None:
    rules: tuple[tuple[bool, str, object, str], ...] = (
        (duration_s > 0, "duration_s", duration_s, "more than 0"),
        (min_nodes >= 0, "min_nodes", min_nodes, "0 or more"),
        (initial >= max(1, min_nodes), "initial", initial, f"at least {max(1, min_nodes)} (min_nodes)"),
        (max_nodes >= initial, "max_nodes", max_nodes, f"at least {initial} (initial)"),
        (mean_revocation_s > 0, "mean_revocation_s", mean_revocation_s, "more than 0"),
        (0 <= bulk_share <= 1, "bulk_share", bulk_share, "0 to 1"),
        (replacement_s > 0, "replacement_s", replacement_s, "more than 0"),
        (len(zones) > 0, "zones", zones, "at least one zone"),
    )
    for holds, field, value, allowed in rules:
        if not holds:
            raise ConfigError("is out of range", source="generate_trace", field=field, value=value, allowed=allowed)

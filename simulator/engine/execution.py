"""Plays given task orders as an executor runs them: late inputs, slow workers, shared links and shared cores.

A worker runs the order of its plan and deviates from it as ``ScheduleCursor`` of ``morph.runtime.step`` does: a
backward whose gradient has arrived goes first; while the gradient for the due backward or recompute is missing, a ready
forward for which the window has room goes before it.

A message takes its channel's wire time, then a latency; a channel's messages leave one after the other and arrive in
order. Channels between nodes share the nodes' links: of n messages that leave one node, or enter one, each gets 1/n
of the bandwidth, at the fuller of its two ends. Latency is not shared. At one instant all ends of tasks and
transmissions come first, then stages decide, the last stage first and in it the lowest replica. With
``compute_slots`` at most that many tasks run at once, in the order in which they become ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from morph.contract.errors import PlanError
from simulator.engine.execution_loop import CHANNEL, SHARE_UNIT, STAGE_PROGRESS, execution_loop
from simulator.engine.times import Flags, Ints, Played, StageTimes

Letters = npt.NDArray[np.uint8]
_NEVER = 2**62
_TIMES = ("forward_ns", "recompute_ns", "backward_ns", "activation_ns", "gradient_ns")
_WIRES = ("activation_wire_ns", "gradient_wire_ns")
_REDUNDANT = ("redundant_forward_ns", "redundant_backward_ns")


@dataclass(frozen=True)
class ShapeTimes:
    """Times of every worker, stage s of replica d, in ns (int64).

    Tasks and latencies have shape [P, D, n]: n = 1 if all micro-batches are equal, else the replica's number of them;
    tasks are at least 1. Activation s goes from stage s to s + 1, gradient s from s + 1 to s; the last entry is unused.
    ``*_wire_ns`` [P, D] is the time for which a lone message occupies its wire, before its latency. ``node`` [P, D] is
    the node of each worker; with ``share_links`` messages between nodes share the nodes' links.
    ``redundant_forward_ns`` and ``redundant_backward_ns`` are the tasks of the next stage (on the last stage: of the
    first) that each worker runs in its waits; None: no such tasks. Redundant backwards require redundant forwards and
    at least two stages.
    """

    forward_ns: Ints
    recompute_ns: Ints
    backward_ns: Ints
    activation_ns: Ints
    gradient_ns: Ints
    activation_wire_ns: Ints
    gradient_wire_ns: Ints
    node: Ints
    recompute: Flags
    share_links: bool = False
    redundant_forward_ns: Ints | None = None
    redundant_backward_ns: Ints | None = None

    @property
    def num_stages(self) -> int:
        """P."""
        return len(self.node)

    @property
    def num_replicas(self) -> int:
        """D."""
        return int(self.node.shape[1])

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return (*_TIMES, *_WIRES, *(name for name in _REDUNDANT if getattr(self, name) is not None))

    @cached_property
    def _arrays(self) -> tuple[Ints, ...]:
        return tuple(getattr(self, name) for name in self._names)

    def of_replicas(self, replicas: Sequence[int]) -> ShapeTimes:
        """Return the times of some replicas only."""
        chosen = list(replicas)
        return replace(self, **{name: getattr(self, name)[:, chosen] for name in (*self._names, "node")})

    def companies(self) -> list[tuple[int, ...]]:
        """Return groups of replicas that share nodes, directly or through others; without shared links, single ones."""
        leader = list(range(self.num_replicas))

        def find(replica: int) -> int:
            while leader[replica] != replica:
                replica = leader[replica] = leader[leader[replica]]
            return replica

        if self.share_links:
            order = np.argsort(self.node, axis=None, kind="stable")
            nodes, owners = self.node.ravel()[order], order % self.num_replicas
            together = (nodes[1:] == nodes[:-1]) & (owners[1:] != owners[:-1])
            for owner, neighbour in zip(owners[1:][together].tolist(), owners[:-1][together].tolist(), strict=True):
                leader[find(owner)] = find(neighbour)
        members: dict[int, list[int]] = {}
        for replica in range(self.num_replicas):
            members.setdefault(find(replica), []).append(replica)
        return [tuple(company) for company in members.values()]

    def likeness(self, company: Sequence[int]) -> tuple[object, ...]:
        """Return a key that is equal for two groups of replicas with the same result for the same orders."""
        chosen, first = list(company), dict[int, int]()
        nodes = self.node[:, chosen].ravel().tolist() if self.share_links else []
        numbered = tuple(first.setdefault(node, len(first)) for node in nodes)
        times = tuple(array[:, chosen].tobytes() for array in self._arrays)
        return (numbered, *times)


def lane_times(times: StageTimes, num_replicas: int) -> ShapeTimes:
    """Return the times of equal replicas, with each worker on its own node and no shared links."""
    activation_wire, gradient_wire = times.wires_ns

    def spread(values: Ints) -> Ints:
        return np.repeat(np.asarray(values, np.int64)[:, None], num_replicas, axis=1)

    return ShapeTimes(
        forward_ns=spread(times.forward_ns)[:, :, None],
        recompute_ns=spread(times.recompute_ns)[:, :, None],
        backward_ns=spread(times.backward_ns)[:, :, None],
        activation_ns=spread(times.activation_ns - activation_wire)[:, :, None],
        gradient_ns=spread(times.gradient_ns - gradient_wire)[:, :, None],
        activation_wire_ns=spread(activation_wire),
        gradient_wire_ns=spread(gradient_wire),
        node=np.arange(times.num_stages * num_replicas).reshape(times.num_stages, num_replicas),
        recompute=times.recompute,
    )


def execute_orders(
    times: ShapeTimes,
    orders: Sequence[Sequence[str]],
    windows: Sequence[int] | Ints,
    *,
    strict: bool = False,
    compute_slots: int | None = None,
    keep_times: bool = False,
) -> Played:
    """Play one mini-batch. Raises PlanError if the orders deadlock.

    ``orders[d][s]``: strings over F, R and B. ``compute_slots``: tasks that can run at once on all workers together;
    None: no limit. ``keep_times``: also return the tasks that ran, and when; otherwise repeating periods are skipped,
    which is exact.
    """
    counts = tuple(replica[0].count("F") for replica in orders)
    everybody = tuple(range(times.num_replicas))
    companies = times.companies() if compute_slots is None else [everybody]
    if companies == [everybody]:
        return _execute_together(times, [(counts, orders)], windows, strict, compute_slots, keep_times)[0]
    alike: dict[tuple[object, ...], dict[tuple[int, ...], list[tuple[int, ...]]]] = {}
    for company in companies:
        of_company = tuple(counts[replica] for replica in company)
        alike.setdefault(times.likeness(company), {}).setdefault(of_company, []).append(company)
    shares: list[tuple[tuple[int, ...], Played]] = []
    for by_counts in alike.values():
        runs = [(some, [orders[replica] for replica in same[0]]) for some, same in sorted(by_counts.items())]
        chosen = times.of_replicas(by_counts[runs[0][0]][0])
        results = _execute_together(chosen, runs, windows, strict, None, keep_times)
        for (some, _), played in zip(runs, results, strict=True):
            shares += [(company, played) for company in by_counts[some]]
    return _merged(shares, times.num_stages, times.num_replicas)


def _merged(shares: Iterable[tuple[tuple[int, ...], Played]], num_stages: int, num_replicas: int) -> Played:
    ended, redone = np.zeros((2, num_stages, num_replicas), np.int64)
    by_replica: dict[str, dict[int, Any]] = {"orders": {}, "start_ns": {}, "redundant_ns": {}}
    eager = False
    for company, played in shares:
        ended[:, list(company)] = played.last_backward_ns
        if played.redone_ns is not None:
            redone[:, list(company)], eager = played.redone_ns, True
        for name, entries in by_replica.items():
            of_company = getattr(played, name)
            if of_company:  # otherwise it was not requested
                entries.update(zip(company, of_company, strict=True))
    kept = {name: tuple(entries[d] for d in sorted(entries)) for name, entries in by_replica.items()}
    return Played(ended, redone_ns=redone if eager else None, **kept)


def _by_lane(values: Ints) -> Ints:
    """Rearrange [P, D, ...] to [L, ...] in the order of lanes."""
    return np.ascontiguousarray(values[::-1].reshape(-1, *values.shape[2:]))


def _lanes(times: ShapeTimes, windows: Sequence[int] | Ints) -> npt.NDArray[np.void]:
    num_stages, num_replicas = times.num_stages, times.num_replicas
    stage = np.repeat(np.arange(num_stages)[::-1], num_replicas)
    lanes = np.zeros(num_stages * num_replicas, STAGE_PROGRESS)
    lanes["stage"], lanes["replica"] = stage, np.tile(np.arange(num_replicas), num_stages)
    lanes["window"], lanes["again"] = np.asarray(windows)[stage], times.recompute[stage]
    return lanes


def _channels(times: ShapeTimes) -> tuple[npt.NDArray[np.void], Ints, Ints, Ints, Ints]:
    """Return channels, latencies, wires, and by node the channels that leave and that enter it."""
    num_stages = times.num_stages
    copies = times.redundant_backward_ns is not None
    channels, shared, leaving, entering = _wiring(times.node.shape, times.node.tobytes(), copies, times.share_links)
    # gradient s leaves stage s + 1
    behind = (np.arange(num_stages) - 1) % num_stages
    longest = max(times.activation_ns.shape[2], times.gradient_ns.shape[2])
    far = int(num_stages > 2)  # with two stages, the last one is itself the predecessor of the first
    sent = (times.activation_ns, times.gradient_ns[behind], *[times.gradient_ns[behind] * far] * copies)
    on_wire = (
        times.activation_wire_ns,
        times.gradient_wire_ns[behind],
        *[times.gradient_wire_ns[behind] * far] * copies,
    )
    latencies = np.concatenate([_by_lane(_as_long(each, longest)) for each in sent])
    wires = np.concatenate([_by_lane(each) for each in on_wire])
    return channels.copy(), latencies, np.where(shared, np.maximum(1, wires), wires), leaving, entering


@lru_cache(maxsize=8)  # for thousands of GPUs each entry takes megabytes
def _wiring(
    shape: tuple[int, int], nodes: bytes, copies: bool, share_links: bool
) -> tuple[npt.NDArray[np.void], Flags, Ints, Ints]:
    """Return channels in their initial state, which of them share a link, and by node those that leave and enter it.

    Cached, because a search plays shapes with the same nodes thousands of times; the results must not be changed.
    ``nodes``: int64[P, D].
    """
    num_replicas = shape[1]
    num_lanes = shape[0] * num_replicas
    lane = np.arange(num_lanes)
    has_next, has_previous = lane >= num_replicas, lane < num_lanes - num_replicas
    used = np.concatenate([has_next, has_previous, *[has_previous] * copies])
    # a copy of a gradient goes to the receiver's predecessor; that of the first stage is the last one
    to_predecessor = (lane + 2 * num_replicas) % num_lanes
    receivers = [lane - num_replicas, lane + num_replicas, *[to_predecessor] * copies]
    channels = np.zeros(len(used), CHANNEL)
    channels["receiver"] = np.concatenate(receivers) * used
    _, node = np.unique(_by_lane(np.frombuffer(nodes, np.int64).reshape(shape)), return_inverse=True)
    node = node.ravel()
    out, into = np.tile(node, 2 + copies), node[channels["receiver"]]
    shared = used & (out != into) & share_links
    channels["out"], channels["into"] = np.where(shared, out, -1), np.where(shared, into, -1)
    num_nodes = int(node.max()) + 1
    return channels, shared, _listed(channels["out"], num_nodes), _listed(channels["into"], num_nodes)


def _as_long(values: Ints, longest: int) -> Ints:
    """Extend [P, D, 1 or longest] to [P, D, longest]."""
    return values if values.shape[2] == longest else np.broadcast_to(values, (*values.shape[:2], longest))


def _listed(nodes: Ints, num_nodes: int) -> Ints:
    """Return for each node the number of its channels, and which they are."""
    order = np.argsort(nodes, kind="stable")
    order = order[nodes[order] >= 0]
    counts = np.bincount(nodes[order], minlength=num_nodes)
    table = np.zeros((num_nodes, 1 + int(counts.max(initial=0))), np.int64)
    table[:, 0] = counts
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    table[nodes[order], 1 + np.arange(len(order)) - first[nodes[order]]] = order
    return table


@dataclass(frozen=True)
class _Progress:
    """What the loop changes while it plays: its arguments of the same names."""

    lanes: npt.NDArray[np.void]
    channels: npt.NDArray[np.void]
    extra: tuple[Ints, Ints, Ints] | None
    arrivals: Ints
    busy: Ints
    tree: Ints
    ended: Ints
    redone: Ints
    letters: Letters
    starts: Ints

    def copy(self) -> _Progress:
        """Return a copy, for a play that goes on otherwise from here."""
        arrays = {name: value.copy() for name, value in vars(self).items() if name != "extra"}
        extra = None if self.extra is None else (self.extra[0], self.extra[1].copy(), self.extra[2].copy())
        return _Progress(extra=extra, **arrays)

    def result(self, counts: Sequence[int], *, keep_times: bool) -> Played:
        num_stages, num_replicas = self.ended.shape
        redone_ns = None if self.extra is None else self.redone
        if not keep_times:
            return Played(self.ended, redone_ns=redone_ns)
        begun = self.lanes["begun"].reshape(num_stages, num_replicas)[::-1]
        return Played(
            self.ended,
            tuple(
                tuple(self.letters[s, d, : begun[s, d]].tobytes().decode("ascii") for s in range(num_stages))
                for d in range(num_replicas)
            ),
            tuple(tuple(self.starts[s, d, : begun[s, d]] for s in range(num_stages)) for d in range(num_replicas)),
            redone_ns,
            () if self.extra is None else _by_replica(self.extra, counts, num_stages),
        )


def _execute_together(
    times: ShapeTimes,
    runs: Sequence[tuple[tuple[int, ...], Sequence[Sequence[str]]]],
    windows: Sequence[int] | Ints,
    strict: bool,
    compute_slots: int | None,
    keep_times: bool,
) -> list[Played]:
    """Play replicas that interact, once for each (numbers of micro-batches, orders): fewer micro-batches first.

    What these runs have in common at the beginning is played only once.
    """
    num_stages, num_replicas, most = times.num_stages, times.num_replicas, max(max(counts) for counts, _ in runs)
    lanes = _lanes(times, windows)
    channels, latencies, wires, leaving, entering = _channels(times)
    tasks = _tasks(times.forward_ns, times.recompute_ns, times.backward_ns)
    extra = _extra(times, len(lanes), most if keep_times else 0)
    redundant_ns = np.zeros(0, np.int64) if extra is None else extra[0]
    copies = int(times.redundant_backward_ns is not None)
    reach = most if strict or copies else min(most, int(np.max(windows)))
    numbers = 1 << (len(lanes) + len(channels) - 1).bit_length()
    longest = max(int(tasks.max()), int(redundant_ns.max(initial=0)), int(latencies.max()), int(wires.max()))
    if longest > 1 << (60 - numbers.bit_length()) or int(wires.max()) * SHARE_UNIT * len(channels) >= _NEVER:
        raise _too_long(longest)
    shape = (num_stages, num_replicas, 3 * most if keep_times else 0)
    ended, redone = np.zeros((2, num_stages, num_replicas), np.int64)
    progress = _Progress(
        lanes,
        channels,
        extra,
        np.empty((2 + copies, len(lanes), 1 << reach.bit_length()), np.int64),
        np.zeros((2, len(leaving)), np.int64),
        np.full(2 * numbers, _NEVER, np.int64),
        ended,
        redone,
        np.zeros(shape, np.uint8),
        np.zeros(shape, np.int64),
    )
    scratch = tuple(np.empty_like(array) for array in (lanes, channels, progress.arrivals, progress.tree))
    queue = np.zeros((len(lanes), 2), np.int64)

    def play(of: _Progress, counts: Ints, letters: Letters, common: Ints) -> None:
        of.lanes["count"] = counts[lanes["replica"]]
        finished = execution_loop(
            of.lanes,
            of.channels,
            tasks,
            of.extra,
            latencies,
            wires,
            letters,
            common,
            of.arrivals,
            of.busy,
            leaving,
            entering,
            of.tree,
            queue,
            scratch,
            of.ended,
            of.redone,
            of.letters,
            of.starts,
            num_stages,
            len(lanes) if compute_slots is None else compute_slots,
            int(strict),
            numbers.bit_length() - 1,
        )
        if finished < 0:
            raise _too_long(longest)
        if not finished:
            raise PlanError("the task orders wait for each other forever", field="orders")

    packed = [_letters(orders, 3 * most) for _, orders in runs]
    num_micro_batches = np.array([counts for counts, _ in runs], np.int64)
    everything = np.full((len(lanes), 2), _NEVER, np.int64)
    results = []
    for number, (counts, _) in enumerate(runs):
        own = progress
        if number < len(runs) - 1:
            fewest = num_micro_batches[number:].min(axis=0)
            prefix = np.min([_num_common(packed[number], later) for later in packed[number + 1 :]], axis=0)
            play(progress, fewest, packed[number], np.stack([_by_lane(prefix), fewest[lanes["replica"]]], axis=1))
            own = progress.copy()
        play(own, num_micro_batches[number], packed[number], everything)
        results.append(own.result(counts, keep_times=keep_times))
    return results


def _num_common(first: Letters, second: Letters) -> Ints:
    """Return how many letters two orders have in common before they first differ: [P, D]."""
    differ = first != second
    num_common: Ints = np.where(differ.any(axis=2), differ.argmax(axis=2), first.shape[2])
    return num_common


def _tasks(*kinds: Ints) -> Ints:
    """Stack tasks of several kinds: [number of kinds, L, n]."""
    longest = max(kind.shape[2] for kind in kinds)
    return np.stack([_by_lane(_as_long(kind, longest)) for kind in kinds])


def _by_replica(extra: tuple[Ints, Ints, Ints], counts: Sequence[int], num_stages: int) -> tuple[tuple[Ints, ...], ...]:
    """Return begins and ends of redundant tasks, by replica and stage."""
    kinds, spans = len(extra[0]), extra[2].reshape(2, num_stages, len(counts), *extra[2].shape[2:])[:, ::-1]
    return tuple(tuple(spans[:kinds, s, d, :count] for s in range(num_stages)) for d, count in enumerate(counts))


def _extra(times: ShapeTimes, num_lanes: int, most: int) -> tuple[Ints, Ints, Ints] | None:
    """Return redundant tasks in the form for the loop; ``most``: number of tasks of a kind whose times are kept."""
    given = [kind for name in _REDUNDANT if (kind := getattr(times, name)) is not None]
    if not given:
        return None
    return _tasks(*given), np.zeros((3, num_lanes, 2), np.int64), np.zeros((2, num_lanes, most, 2), np.int64)


def _letters(orders: Sequence[Sequence[str]], longest: int) -> Letters:
    """Return orders as letters: [P, D, longest], padded with 0."""
    packed = np.zeros((len(orders[0]), len(orders), longest), np.uint8)
    known: dict[int, Sequence[str]] = {}
    for replica, stages in enumerate(orders):
        same = next((other for other, seen in known.items() if seen is stages), None)
        if same is not None:
            packed[:, replica] = packed[:, same]
            continue
        known[replica] = stages
        for stage, text in enumerate(stages):
            packed[stage, replica, : len(text)] = np.frombuffer(text.encode("ascii"), np.uint8)
    return packed


def _too_long(longest_ns: int) -> PlanError:
    return PlanError(
        f"a mini-batch with tasks and messages of up to {longest_ns / 1e9:.3g} s takes longer than can be simulated",
        field="batch_size",
        allowed="fewer samples, or shorter times",
    )

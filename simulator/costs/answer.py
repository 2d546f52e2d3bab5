"""One simulated shape as an answer: a plan with its expectation, a time breakdown and an explanation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from morph.contract.plan import Expectation, PipelineKind, Plan, StagePlan
from simulator.costs.bounds import lower_bound_ns, pipes_of, total_ns
from simulator.costs.finish import optimizer_ns, optimizer_steps_ns
from simulator.costs.outcome import ShapeOutcome, ShapeSimulator
from simulator.costs.redundant import mean_pause_ns, note, redundant_host_bytes, total_redundant_ns
from simulator.costs.stage_costs import StageCosts
from simulator.costs.worker_times import worker_times
from simulator.inputs.conditions import Conditions
from simulator.inputs.jitter import MeanJitter, Spread

if TYPE_CHECKING:
    import pandas as pd

_CAUSES = {
    "imbalance": "uneven stages or replicas: the slowest worker sets the pace",
    "fill_and_drain": "filling and draining the pipeline: {n} micro-batches per replica are few for {p} stages",
    "latency": "network latency and the in-flight windows",
    "bandwidth": "network bandwidth: messages between two stages take longer than these compute",
    "schedule": "waiting that the {schedule} schedule adds to the bound for these stages",
    "all_reduce": "the gradient all-reduce over {d} replicas",
    "commit_and_optimizer": "waiting for all workers at the end, and the optimizer step",
    "shared_cores": "the cores that the workers share",
    "shared_links": "messages that share the nodes' links",
    "redundant": "computing for the next stage too (redundant computation), as far as waits do not hide it",
    "messages": "messages, during which their workers compute nothing",
    "slow_workers": "slow workers, for whom everybody waits",
    "jitter": "task and message times that vary",
}
"""Causes of lost time. Advice is not part of them: it is simulated (:func:`simulator.search.planner.advice`)."""
TASKS = {"all_reduce": "all-reduce", "commit": "wait for all workers", "optimizer": "optimizer step"}
"""Parts of a mini-batch's time in words; the names of other parts are words already."""
_TIED = "summing the gradients of weights that several stages share"


def deal(num_micro_batches: int, num_replicas: int) -> tuple[int, ...]:
    """Return each replica's micro-batches; the first N mod D get one more; see ``Plan.micro_batches_per_replica``."""
    share, extra = divmod(num_micro_batches, num_replicas)
    return tuple(share + (replica < extra) for replica in range(num_replicas))


def bound_ns(costs: StageCosts, counts: Sequence[int], conditions: Conditions) -> int:
    """Return a lower bound of the whole mini-batch on these workers and links; where times are drawn, of its mean."""
    num_replicas = len(counts)
    pipes = pipes_of(costs, counts, conditions, _mean_jitter(costs, conditions))
    if conditions.jitter_seed is not None:
        pipes = [(pipe.less_one_ns(), count, number) for pipe, count, number in pipes]
    busiest = {id(pipe): (pipe, count) for pipe, count, _ in sorted(pipes, key=lambda entry: entry[1])}
    bound = max(lower_bound_ns(pipe, costs.times.window, count) for pipe, count in busiest.values())
    if conditions.compute_slots is not None:
        work = sum(int(total_ns(pipe.work_ns, count).sum()) * number for pipe, count, number in pipes)
        bound = max(bound, work // conditions.compute_slots)
    return bound + costs.sections.commit_ns + optimizer_ns(costs, num_replicas, conditions)


def _mean_jitter(costs: StageCosts, conditions: Conditions) -> MeanJitter | None:
    seed = conditions.jitter_seed
    return None if seed is None else costs.sections.mean_jitter(seed, conditions.num_draws)


@dataclass(frozen=True)
class SimulatedKind:
    """Equal pipelines of a plan, simulated; ``node_types``: the type of each stage's workers, or one for all stages."""

    outcome: ShapeOutcome
    shape_simulator: ShapeSimulator
    node_types: tuple[str, ...] = ("",)

    @property
    def type_of_stage(self) -> tuple[str, ...]:
        """The type of each stage's workers; empty: not known."""
        return self.node_types if len(self.node_types) > 1 else self.node_types * self.outcome.shape[0]


@dataclass(frozen=True)
class Simulation:
    """The answer for one shape. ``plan`` is complete: it can be written to a file and run.

    ``breakdown_s`` leads from pure work to the simulated mini-batch; its steps (seconds) add up to
    ``expected.mini_batch_s``. ``kinds`` of pipelines are in the order of the plan. ``jitter`` is the spread of the
    mini-batch where draws were requested; ``expected`` then has the mean.
    """

    plan: Plan
    explanation: str
    breakdown_s: dict[str, float]
    kinds: tuple[SimulatedKind, ...]
    jitter: Spread | None = None

    @property
    def costs(self) -> StageCosts:
        """Costs of the stages of the first kind of pipeline."""
        return self.kinds[0].outcome.costs

    @property
    def shape_simulator(self) -> ShapeSimulator:
        """The simulator that played the first kind of pipeline."""
        return self.kinds[0].shape_simulator

    @property
    def expected(self) -> Expectation:
        """The plan's expected time, rate, bound, memory and parts."""
        return self.plan.expected

    def with_note(self, sentence: str) -> Simulation:
        """Return this answer with a sentence added to its explanation."""
        return replace(self, explanation=f"{self.explanation} {sentence}") if sentence else self

    @property
    def compute_slots(self) -> int | None:
        """Number of tasks that can run at once on all workers together; None: one device per worker."""
        return self.shape_simulator.conditions.compute_slots

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """One row per task: replica, stage, task, micro_batch, start_s, end_s; without jitter.

        Tasks are forward, recompute, backward, all_reduce, commit and optimizer; the last three have micro_batch -1.
        Time 0 is when the first worker begins; a slower type of node begins, and ends its optimizer step, later.
        """
        import pandas as pd

        from simulator.costs.timeline import timeline_frame  # pandas is slow to import, and rarely needed

        frames, first_stage, first_replica = [], 0, 0
        for kind in self.kinds:
            outcome, simulator = kind.outcome, kind.shape_simulator
            played = simulator.played(outcome.costs, outcome.counts, keep_times=True)
            frame = timeline_frame(outcome.costs, outcome.counts, simulator.conditions, played, outcome.after)
            numbered = {"stage": frame["stage"] + first_stage, "replica": frame["replica"] + first_replica}
            begin_s = outcome.after.begin_ns / 1e9
            times_s = {} if not begin_s else {name: frame[name] + begin_s for name in ("start_s", "end_s")}
            frames.append(frame.assign(**numbered, **times_s))
            first_stage, first_replica = first_stage + outcome.shape[0], first_replica + outcome.shape[1]
        return frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)

    @cached_property
    def mean_pause_s(self) -> float:
        """Mean pause (seconds) until a lost worker's predecessor has recomputed that worker's results.

        The mean over workers and over the time of the loss in the mini-batch, without jitter and without the time to
        detect the loss (:mod:`simulator.costs.redundant`). Raises PlanError without redundant computation.
        """
        counts = self.plan.micro_batches_per_replica
        played = self.shape_simulator.played(self.costs, counts, keep_times=True)
        whole_ns = self.shape_simulator.finished(self.costs, counts, played).mini_batch_ns
        return mean_pause_ns(self.costs, counts, self.shape_simulator.conditions, played, whole_ns) / 1e9


def describe(outcome: ShapeOutcome, shape_simulator: ShapeSimulator) -> Simulation:
    """Return one simulated shape as a plan with its orders, expectation and explanation."""
    return describe_kinds((SimulatedKind(outcome, shape_simulator),))


def describe_kinds(kinds: Sequence[SimulatedKind]) -> Simulation:
    """Return pipelines of several kinds that were simulated together as a plan; see :func:`describe`."""
    first, conditions = kinds[0].outcome, kinds[0].shape_simulator.conditions
    sections = first.costs.sections
    placements = [placed for kind in kinds if (placed := kind.outcome.costs.layout.placement) is not None]
    total_s = max(kind.outcome.mini_batch_ns for kind in kinds) / 1e9
    fullest = max((kind.outcome.costs for kind in kinds), key=lambda costs: costs.peak_bytes)
    moment, memory_parts = fullest.memory_parts(int(fullest.memory_bytes.argmax()))
    shares = [kind.outcome.counts for kind in kinds]
    with_sums = [kind.outcome.costs.bytes_with_sums for kind in kinds]
    plan = Plan(
        fingerprint=sections.profile.job.fingerprint,
        schedule=first.costs.schedule,
        micro_batch_size=sections.micro_batch_size,
        num_micro_batches=sum(map(sum, shares)),
        num_replicas=sum(map(len, shares)),
        stages=tuple(stage for kind in kinds for stage in _stages(kind.outcome.costs, kind.type_of_stage)),
        kinds=tuple(PipelineKind(num_stages=kind.outcome.shape[0], micro_batches=kind.outcome.counts) for kind in kinds)
        if len(kinds) > 1
        else (),
        orders=_orders(kinds),
        expected=Expectation(
            mini_batch_s=total_s,
            examples_per_s=sections.profile.job.batch_size / total_s,
            lower_bound_s=max(_bound_ns(kind) for kind in kinds) / 1e9,
            peak_memory_bytes=fullest.peak_bytes,
            memory_moment=moment,
            followed_memory_bytes=first.costs.followed_bytes if first.costs.single and first.shape[0] > 1 else 0,
            memory_with_sums_bytes=max(device for device, _ in with_sums),
            host_with_sums_bytes=max(host for _, host in with_sums),
            memory_parts_bytes=memory_parts,
            host_memory_bytes=max(_host_bytes(kind.outcome) for kind in kinds),
            parts_s=_mean_parts_s(kinds),
        ),
        node_sizes=placements[0].node_sizes if placements else (),
        placement=tuple(row for placement in placements for row in placement.nodes),
    )
    last = max(kinds, key=_bound_ns).outcome if len(kinds) > 1 else first
    breakdown = _breakdown_s(kinds)
    explanation = explain(breakdown, last.shape[0], max(last.counts), plan)
    return Simulation(plan, explanation, breakdown, tuple(kinds), first.spread).with_note(note(first.costs, conditions))


def _stages(costs: StageCosts, node_types: Sequence[str]) -> list[StagePlan]:
    times, ends = costs.times, (*costs.boundaries[1:], costs.sections.num_sections)
    return [
        StagePlan(
            first_section=first,
            end_section=end,
            window=int(times.window[stage]),
            recompute=bool(times.recompute[stage]),
            live_sections=int(costs.live[stage]) or None,
            node_type=node_types[stage],
        )
        for stage, (first, end) in enumerate(zip(costs.boundaries, ends, strict=True))
    ]


def _orders(kinds: Sequence[SimulatedKind]) -> dict[int, tuple[str, ...]]:
    """Return the stages' orders by number of micro-batches; empty for stages of pipelines with another number."""
    known = [
        dict(
            zip(kind.outcome.counts, kind.shape_simulator.orders(kind.outcome.costs, kind.outcome.counts), strict=True)
        )
        for kind in kinds
    ]
    numbers = dict.fromkeys(number for orders in known for number in orders)
    empty = [("",) * kind.outcome.shape[0] for kind in kinds]
    return {
        number: tuple(
            order for orders, nothing in zip(known, empty, strict=True) for order in orders.get(number, nothing)
        )
        for number in numbers
    }


def _bound_ns(kind: SimulatedKind) -> int:
    return bound_ns(kind.outcome.costs, kind.outcome.counts, kind.shape_simulator.conditions)


def _host_bytes(outcome: ShapeOutcome) -> int:
    return int((outcome.costs.host_bytes + redundant_host_bytes(outcome.costs, max(outcome.counts))).max())


def _mean_parts_s(kinds: Sequence[SimulatedKind]) -> dict[str, float]:
    parts = [_parts_s(kind.outcome, kind.shape_simulator.conditions) for kind in kinds]
    if len(parts) == 1:
        return parts[0]
    workers = [kind.outcome.shape[0] * kind.outcome.shape[1] for kind in kinds]
    return {
        part: sum(of[part] * number for of, number in zip(parts, workers, strict=True)) / sum(workers)
        for part in parts[0]
    }


def _breakdown_s(kinds: Sequence[SimulatedKind]) -> dict[str, float]:
    """Of the pipelines that are through last; the work is that of all workers."""
    last = max(kinds, key=_bound_ns) if len(kinds) > 1 else kinds[0]
    steps = breakdown_s(last.outcome, last.shape_simulator.conditions)
    if len(kinds) > 1:
        parts = _mean_parts_s(kinds)
        work = min(steps["work"] + steps["imbalance"], parts["forward"] + parts["recompute"] + parts["backward"])
        steps |= {"work": work, "imbalance": steps["work"] + steps["imbalance"] - work}
    return steps


def _parts_s(outcome: ShapeOutcome, conditions: Conditions) -> dict[str, float]:
    """Return the seconds per worker, averaged over the P x D workers; the rest of the mini-batch is bubble."""
    costs, counts = outcome.costs, outcome.counts
    workers = len(counts) * costs.times.num_stages
    pipes = pipes_of(costs, counts, conditions, _mean_jitter(costs, conditions))

    def task_ns(kind: str) -> float:
        return sum(int(total_ns(getattr(pipe, kind), count).sum()) * number for pipe, count, number in pipes) / workers

    parts_ns = {kind: task_ns(f"{kind}_ns") for kind in ("forward", "recompute", "backward")}
    parts_ns |= {
        "all_reduce": float(outcome.after.exposed_ns.mean()),
        "optimizer": float(optimizer_steps_ns(costs, len(counts), conditions).mean()),
        "commit": float(costs.sections.commit_ns),
    }
    if conditions.eager:
        lanes = worker_times(costs, counts, conditions, _mean_jitter(costs, conditions))
        parts_ns["redundant"] = sum(total_redundant_ns(lanes, counts)) / workers
    parts_ns["bubble"] = max(0.0, outcome.mini_batch_ns - sum(parts_ns.values()))
    return {part: value / 1e9 for part, value in parts_ns.items()}


def breakdown_s(outcome: ShapeOutcome, conditions: Conditions) -> dict[str, float]:
    """Return steps in seconds that add up to the mini-batch.

    work: all work / workers; imbalance: up to n * max t_s; fill_and_drain: up to the bound without latency, windows,
    wires and all-reduce; latency: up to the bound with latency and windows; bandwidth: up to the bound with wires, too;
    schedule: up to the pipelines as planned; then the time that slow workers, redundant tasks, shared cores, shared
    links or messages without overlap add; all_reduce: its exposed part; commit_and_optimizer; jitter.
    """
    costs, counts = outcome.costs, outcome.counts
    quick = tuple(entry for entry in conditions.slow if entry[2] < 1)
    pipes = pipes_of(costs, counts, replace(conditions, slow=quick, overlap="full"))
    busiest = {id(pipe): (pipe, count) for pipe, count, _ in sorted(pipes, key=lambda entry: entry[1])}.values()
    work = [(total_ns(pipe.work_ns, count), number) for pipe, count, number in pipes]

    def bound(*, reduction: bool = False, **without: bool) -> int:
        return max(
            lower_bound_ns(pipe, costs.times.window, count, reduction=reduction, **without) for pipe, count in busiest
        )

    pipelines = bound()
    exposed = max(0, bound(reduction=True) - pipelines)
    levels: list[tuple[str, float]] = [
        ("work", sum(float(ns.mean()) * number for ns, number in work) / len(counts)),
        ("imbalance", float(max(ns.max() for ns, _ in work))),
        ("fill_and_drain", float(bound(latency=False, window=False))),
        ("latency", float(bound(bandwidth=False))),
        ("bandwidth", float(pipelines)),
        ("schedule", float(outcome.planned.prepared_ns - exposed)),
        (_hindrance(conditions), float(outcome.after.prepared_ns - exposed)),
        ("all_reduce", float(outcome.after.prepared_ns)),
        ("commit_and_optimizer", float(outcome.after.mini_batch_ns)),
        ("jitter", float(outcome.mini_batch_ns)),
    ]
    steps, reached = {}, 0.0
    for name, level in levels:
        steps[name] = max(0.0, min(level, outcome.mini_batch_ns) - reached) / 1e9
        reached = max(reached, min(level, outcome.mini_batch_ns))
    return steps


def _hindrance(conditions: Conditions) -> str:
    if conditions.slow:
        return "slow_workers"
    if conditions.eager:
        return "redundant"
    if not conditions.overlaps:
        return "messages"
    return "shared_links" if conditions.compute_slots is None else "shared_cores"


def explain(steps_s: dict[str, float], depth: int, most: int, plan: Plan) -> str:
    """Return one sentence: the share of work in the mini-batch, and the main cause of the rest.

    ``depth``, ``most``: stages and micro-batches of the pipeline that is through last.
    """
    total = sum(steps_s.values())
    name, lost = max(((key, value) for key, value in steps_s.items() if key != "work"), key=lambda item: item[1])
    share = steps_s["work"] / total
    if lost < 0.02 * total:
        return f"{share:.0%} of the mini-batch is work; nothing else takes more than 2 %."
    cause = _TIED if name == "all_reduce" and plan.num_replicas == 1 else _CAUSES[name]
    cause = cause.format(
        n=most,
        p=depth,
        d=plan.num_replicas,
        schedule=plan.schedule,
    )
    return f"{share:.0%} of the mini-batch is work; most of the rest ({lost / total:.0%}) is {cause}."

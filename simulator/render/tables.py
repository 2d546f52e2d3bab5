"""A simulated or planned shape as lines, tables and numbers with units."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise

from rich.table import Table

from morph.contract.plan import Plan
from morph.contract.profile import Profile
from morph.tables import table
from morph.words import count_text, counted, size_text, time_text
from simulator import PlanChoice, Simulation
from simulator.costs.answer import TASKS
from simulator.costs.memory import MOMENTS
from simulator.costs.redundant import redundant_host_bytes
from simulator.inputs.jitter import Spread
from simulator.inputs.stock import nodes_in_use, nodes_text
from simulator.search.preference import MEMORY_ERROR, Errors, room_left

_WORTH_PAYING = 10
"""A runner-up is named that is faster by at least this many times the share by which it is dearer."""
_LITTLE = 0.1
"""A roomier plan is named if it takes at most so much longer."""
_MOST_PARTS = 6
WIDTH = 110
_STEPS = {
    "work": "all work, evenly spread over the workers",
    "imbalance": "the slowest stage, the replica with most micro-batches",
    "fill_and_drain": "filling and draining the pipeline",
    "latency": "network latency and in-flight windows",
    "bandwidth": "messages that wait for their wire",
    "schedule": "waiting that the schedule adds",
    "shared_cores": "cores shared by the workers",
    "messages": "messages, during which their workers compute nothing",
    "shared_links": "node links shared by messages",
    "slow_workers": "slow workers",
    "redundant": "computing for the next stage too",
    "all_reduce": "all-reduce over replicas and tied weights, as far as exposed",
    "commit_and_optimizer": "waiting for all workers at the end, optimizer step",
    "jitter": "times that vary",
}


def shape_lines(profile: Profile, simulation: Simulation) -> list[str]:
    """Return a summary of one shape in a few lines."""
    plan, expected, whole_s = simulation.plan, simulation.expected, simulation.expected.mini_batch_s
    shares = _shares_text(plan.micro_batches_per_replica)
    micro_batches = counted(plan.num_micro_batches, "micro-batch", "micro-batches")
    parts = sorted(expected.parts_s.items(), key=lambda item: -item[1])
    spent = ", ".join(f"{TASKS.get(part, part)} {took_s / whole_s:.0%}" for part, took_s in parts if took_s)
    return [
        f"{profile.job.name}: {_spaced(plan)} (P x D), {counted(plan.num_workers, 'worker')}, {plan.schedule} schedule",
        f"batch {profile.job.batch_size} = {micro_batches} of {plan.micro_batch_size}, {shares} per replica",
        f"expected: {expected.examples_per_s:.4g} examples/s, {time_text(expected.mini_batch_s)} per "
        f"mini-batch (lower bound for these stages: {time_text(expected.lower_bound_s)})",
        *([_jitter_line(simulation.jitter)] if simulation.jitter else []),
        *(
            [
                f"{counted(kind.outcome.shape[1], 'pipeline')} of {counted(kind.outcome.shape[0], 'stage')}"
                f"{_types_text(kind.type_of_stage)}: {_shares_text(kind.outcome.counts)} micro-batches each"
                for kind in simulation.kinds
            ]
            if len(simulation.kinds) > 1 or len(set(simulation.kinds[0].type_of_stage)) > 1
            else []
        ),
        *([_node_line(plan)] if plan.placement else []),
        f"where a worker's time goes: {spent}",
        *([_groups_line(plan)] if any(stage.live_sections for stage in plan.stages) else []),
        simulation.explanation,
    ]


def _spaced(plan: Plan) -> str:
    return plan.shape.replace("x", " x ")


def _shares_text(counts: tuple[int, ...]) -> str:
    """Return the micro-batches of each pipeline: ``4``, ``4 or 5``, ``4 to 9``."""
    few, most = min(counts), max(counts)
    between = "or" if set(counts) == {few, most} else "to"
    return f"{few}" if few == most else f"{few} {between} {most}"


def _types_text(types: Sequence[str]) -> str:
    """Return where the stages of a pipeline are: `` on v100``, `` (3 on v100, then 3 on t4)``."""
    runs = [(name or "the profile's own type", len(list(of_type))) for name, of_type in groupby(types)]
    if len(runs) > 1:
        return f" ({', then '.join(f'{number} on {name}' for name, number in runs)})"
    return f" on {types[0]}" if types[0] else ""


def _jitter_line(spread: Spread) -> str:
    return (
        f"with jitter, {spread.num_draws} mini-batches drawn: mean {time_text(spread.mean_s)}, "
        f"5 % below {time_text(spread.p5_s)}, 5 % above {time_text(spread.p95_s)}"
    )


def _groups_line(plan: Plan) -> str:
    runs = [
        (size, [number for number, _ in stages])
        for size, stages in groupby(enumerate(plan.stages), lambda stage: stage[1].live_sections)
    ]
    texts = [
        f"{'stages' if len(numbers) > 1 else 'stage'} {_span(numbers[0], numbers[-1])} in groups of {size}"
        for size, numbers in runs
        if size
    ]
    return f"to fit in memory, sections are run again group by group: {', '.join(texts)}"


def _node_line(plan: Plan) -> str:
    crossings = [sum(a != b for a, b in pairwise(row)) for row in plan.placement]
    used = len({node for row in plan.placement for node in row})
    fewest, most = min(crossings), max(crossings)
    times = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return (
        f"on {used} of {counted(len(plan.node_sizes), 'node')}; a replica's messages cross between nodes at {times} of "
        f"its {counted(plan.pipeline_depth - 1, 'cut')}"
    )


def leftover_line(choice: PlanChoice) -> str:
    """Return the line about idle GPUs."""
    plan = choice.best
    if not choice.num_idle:
        return f"all {choice.num_gpus} GPUs at work" if choice.num_gpus > 1 else "the GPU is at work"
    idle = f"{counted(choice.num_idle, 'GPU')} idle"
    if not plan.placement:
        fuller = [
            (place, each) for place, each in enumerate(choice.runners_up, 1) if each.num_workers > plan.num_workers
        ]
        if not fuller:
            return f"{idle}: no better plan with {'it' if choice.num_idle == 1 else 'them'} was found"
        place, rival = max(fuller, key=lambda entry: (entry[1].num_workers, -entry[0]))
        other = f"{idle}: {_spaced(rival)} on {rival.num_workers} GPUs"
        if choice.objective == "usd_per_example":
            return f"{other} costs {choice.worse(place):.1%} more per example"
        return f"{other} takes {_longer(rival.expected.mini_batch_s / plan.expected.mini_batch_s - 1)}"
    busy = Counter(node for row in plan.placement for node in row)
    free = {node: size - busy[node] for node, size in enumerate(plan.node_sizes) if size > busy[node]}
    whole = Counter(plan.node_sizes[node] for node in free if not busy[node])
    parts = [f"{counted(number, 'whole node')} of {size}" for size, number in sorted(whole.items())]
    if sum(plan.node_sizes) < choice.num_gpus:
        parts.insert(0, f"{choice.num_gpus - sum(plan.node_sizes)} on nodes that are not bought")
    parts += [f"{left} on node {node}" for node, left in free.items() if busy[node]]
    shown = parts if len(parts) <= _MOST_PARTS else [*parts[:_MOST_PARTS], "..."]
    return f"{idle}: {', '.join(shown)}"


def price_lines(choice: PlanChoice) -> list[str]:
    """Return lines about data between zones and the price of the GPUs or nodes in use, where they are known."""
    lines = []
    if choice.zone_bytes:
        price = f", ${choice.zone_usd_per_h:.4g} an hour" * (choice.zone_usd_per_h > 0)
        lines.append(f"{choice.zone_bytes / 1e9:.3g} GB of each mini-batch go from one zone to another{price}")
    if choice.usd_per_h is not None:
        pool = choice.best.pool
        used = str(pool) if any(pool.types) else counted(choice.best.num_workers, "GPU")
        if choice.best.placement:
            used = nodes_text(nodes_in_use(choice.best))
        usd = (choice.usd_per_h + choice.zone_usd_per_h) / 3.6 / choice.best.expected.examples_per_s
        lines.append(f"{used} for ${choice.usd_per_h:.4g} an hour: ${usd:.3g} for 1,000 examples")
    if choice.objective == "usd_per_example":
        best = choice.best.expected.examples_per_s
        others = zip(choice.runners_up, choice.values[1:], strict=True)
        gains = [(plan.expected.examples_per_s / best - 1, usd / choice.values[0] - 1, plan) for plan, usd in others]
        faster, dearer, plan = max(gains, key=lambda each: each[0] - _WORTH_PAYING * each[1], default=(0, 0, None))
        if plan is not None and faster >= 0.01 and faster >= _WORTH_PAYING * dearer:
            lines.append(f"{_spaced(plan)} is {faster:.0%} faster for {dearer:.1%} more dollars per example")
    return lines


def stage_table(profile: Profile, simulation: Simulation) -> Table:
    """Return a table of stages with their sections, parameters, times, window and memory."""
    held = sum(section.parameter_bytes for section in profile.sections)
    workers = [
        (kind.outcome.costs, stage, node_type)
        for kind in simulation.kinds
        for stage, node_type in enumerate(kind.type_of_stage)
    ]
    typed = any(node_type for _, _, node_type in workers)
    unit_bytes = sum(unit.parameter_bytes for unit in profile.units) or held
    per_byte = profile.job.num_parameters / unit_bytes if unit_bytes else 0.0
    rows = [
        (
            number,
            _span(stage.first_section, stage.end_section - 1),
            count_text(sum(profile.sections[section].parameter_bytes for section in stage.sections) * per_byte),
            time_text(int(costs.times.forward_ns[own]) / 1e9),
            time_text(int(costs.times.recompute_ns[own]) / 1e9) if stage.recompute else "-",
            time_text(int(costs.times.backward_ns[own]) / 1e9),
            stage.window,
            size_text(int(costs.memory_bytes[own]), binary=True),
            *([node_type] if typed else []),
        )
        for number, (stage, (costs, own, node_type)) in enumerate(zip(simulation.plan.stages, workers, strict=True))
    ]
    names = ("stage", "sections", "parameters", "F", "R", "B", "window", "memory", *(["GPU"] if typed else []))
    return table("Stages", names, rows)


def memory_lines(simulation: Simulation) -> list[str]:
    """Return lines about the peak of the fullest device, and of the fullest host where that memory is separate."""
    firsts = itertools.accumulate((kind.outcome.shape[0] for kind in simulation.kinds), initial=0)
    every = [(kind.outcome.costs, first) for kind, first in zip(simulation.kinds, firsts, strict=False)]
    costs, first = max(every, key=lambda entry: entry[0].peak_bytes)
    stage = int(costs.memory_bytes.argmax())
    moment, parts = costs.memory_parts(stage)
    whole = size_text(int(costs.memory_bytes[stage]), binary=True)
    lines = [f"most memory: {whole} at stage {first + stage}, while {MOMENTS[moment]}: {_parts_text(parts)}"]
    if costs.memory.apart:
        costs, first = max(every, key=lambda entry: int(entry[0].host_bytes.max()))
        stage = int(costs.host_bytes.argmax())
        whole = size_text(int(costs.host_bytes[stage]), binary=True)
        lines.append(f"host memory: up to {whole} at stage {first + stage}: {_parts_text(costs.host_parts(stage))}")
    return lines


def gap_line(choice: PlanChoice) -> str:
    """Return the line about how much faster any plan can be; "" if nothing is proved."""
    if choice.gap is None:
        return ""
    return f"no plan trains more than {math.ceil(choice.gap * 1000) / 1000:.1%} faster"


def room_line(choice: PlanChoice, memory_bytes: int | None = None, margin: float = MEMORY_ERROR) -> str:
    """Return the line about the memory that a plan leaves, and a roomier plan where it leaves little; "" if unlimited.

    ``memory_bytes``: the requested limit of a device; None: the profile's. ``margin``: the share that is enough.
    """
    rooms = [room_left(simulation, memory_bytes) for simulation in choice.simulations]
    room, limit_bytes = rooms[0]
    if limit_bytes is None:
        return ""
    left = f"{room:.1%} of the fullest device's memory is left"
    if room >= margin:
        return f"{left}; the margin for errors of the forecast is {margin:.0%}"
    line = f"{left}, less than the margin of {margin:.0%} for errors of the forecast"
    for place, plan in enumerate(choice.runners_up, 1):
        longer = plan.expected.mini_batch_s / choice.best.expected.mini_batch_s - 1
        if rooms[place][0] >= margin and longer <= _LITTLE:
            return f"{line}; {_spaced(plan)} leaves {rooms[place][0]:.0%} and takes {_longer(longer)}"
    return f"{line}; --memory-gib {limit_bytes * (1 - margin) / 2**30:.3g} plans with that margin"


def _longer(share: float) -> str:
    """Return a difference of times in words: ``1.0% longer``, ``as long``."""
    if abs(share) < 0.0005:
        return "as long"
    return f"{share:.1%} longer" if share > 0 else f"{-share:.1%} less time"


def preference_line(choice: PlanChoice, errors: Errors, memory_bytes: int | None = None) -> str:
    """Return the line about the fastest plan where another was preferred, and why; "" if the best is the fastest."""
    place = min(range(len(choice.values)), key=choice.worse)
    if not place:
        return ""
    rival = choice.simulations[place]
    roomier = room_left(rival, memory_bytes)[0] < errors.memory <= room_left(choice.best_simulation, memory_bytes)[0]
    better = {"examples_per_s": "faster", "usd_per_example": "cheaper", "progress": "better"}[choice.objective]
    return (
        f"{_spaced(rival.plan)} would be {-choice.worse(place):.1%} {better}, which is within the error of the times "
        f"({errors.time:.1%}): the {'roomier' if roomier else 'simpler'} plan is chosen (not so with --tolerance 0)"
    )


def redundant_line(simulation: Simulation) -> str:
    """Return the line about the pause after a loss with redundant computation, and its host memory."""
    costs, counts = simulation.costs, simulation.plan.micro_batches_per_replica
    kept = size_text(int(redundant_host_bytes(costs, max(counts)).max()), binary=True)
    return (
        f"a lost worker pauses training for {time_text(simulation.mean_pause_s)} on average; for that, up to {kept} of "
        "messages and activations are kept in host memory until the mini-batch is over"
    )


def _parts_text(parts: dict[str, int]) -> str:
    return ", ".join(f"{part} {size_text(size, binary=True)}" for part, size in parts.items())


def _span(first: int, last: int) -> str:
    return str(last) if first == last else f"{first}-{last}"


def ranking(choice: PlanChoice, memory_bytes: int | None = None) -> Table:
    """Return a table of the best shape and the runners-up; ``memory_bytes``: as in :func:`room_line`."""
    rooms = [room_left(simulation, memory_bytes) for simulation in choice.simulations]
    limited = any(limit is not None for _, limit in rooms)
    column = {"examples_per_s": [], "usd_per_example": ["$/1000"], "progress": ["progress/s"]}[choice.objective]
    times = 1000 if choice.objective == "usd_per_example" else 1
    best = choice.best.expected.examples_per_s
    rows = [
        (
            _spaced(plan),
            plan.num_workers,
            f"{plan.expected.examples_per_s:.4g}",
            f"{plan.expected.examples_per_s / best:.1%}",
            time_text(plan.expected.mini_batch_s),
            time_text(plan.expected.lower_bound_s),
            size_text(plan.expected.peak_memory_bytes, binary=True),
            *([f"{room:.0%}"] if limited else []),
            *([f"{worth * times:.4g}"] if column else []),
        )
        for plan, worth, (room, _) in zip((choice.best, *choice.runners_up), choice.values, rooms, strict=True)
    ]
    names = ["P x D", "workers", "examples/s", "of best", "mini-batch", "lower bound", "memory"]
    names += ["left"] * limited + column
    return table(f"Best of {counted(choice.num_shapes, 'shape')} for {counted(choice.num_gpus, 'GPU')}", names, rows)


def ladder_table(simulation: Simulation) -> Table:
    """Return a table that leads from pure work to the mini-batch, step by step."""
    reached, rows = 0.0, []
    for step, seconds in simulation.breakdown_s.items():
        reached += seconds
        if seconds:
            rows.append((_STEPS[step], time_text(seconds), time_text(reached)))
    return table("From pure work to the expected mini-batch", ("what adds to it", "adds", "reaches"), rows, left=1)

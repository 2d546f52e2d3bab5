"""Pauses of morphs with 16 emulated workers: from the kill of VMs to the next committed step, and for joins.

    python -m benchmarks emulated_pause --shapes 4x4,8x2,2x8,16x1 --kills 100
    python -m benchmarks emulated_pause --shapes 8x1,4x2 --job configs/profiles/gpt2-2.5b.json --plain-steps 10
    python -m benchmarks emulated_pause --shapes 2x3 --job real --kills 24 --together 2

Workers are plain processes of this machine that sleep in place of computing, except for the real job; manager, journal,
groups, messages, reductions and state moves are real. In each shape, one, two or three VMs are repeatedly killed at
once at a random moment (seeded), the others continue in the planner's best shape, and new VMs join. Prints median, p95
and maximum, and where the time went: the pieces add up to the pause. ``--plain-steps`` first measures, without kills,
what followers add to each step, with the kinds of redundancy in turn.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from benchmarks.emulated_pause.job import Job, Shape, make_job, make_run
from benchmarks.emulated_pause.killer import DONE, Killer
from benchmarks.emulated_pause.pieces import PIECES, FormingWatch, Pause, pauses_of
from benchmarks.emulated_pause.plain import show_overhead
from benchmarks.harness import Seed, head, machine, option, row, words, worst_cases
from benchmarks.runs import play
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observer


def run_shape(
    job: Job, shape: Shape, kills: int, together: int, seed: int, directory: Path, redundancy: str
) -> list[Pause]:
    """Run one shape through its kills.

    Raises:
        SystemExit: the run did not come to its end.
    """
    subject, spec = make_run(job, shape, directory, redundancy)
    nodes = [event.node_id for event in spec.trace.events]
    watch = FormingWatch()
    killers: list[Killer] = []

    def attend(fleet: VmFleet) -> Observer:
        killers.append(Killer(fleet, nodes, kills, together, seed))
        return killers[0]

    finish, report = play(subject, spec, directory / "run", watch, attend)
    if killers[0].error or DONE not in finish.sentence:
        raise SystemExit(f"{shape}: {killers[0].error or finish.sentence} (journal: {directory / 'run'})")
    return pauses_of(report, watch.formed)


def show(title: str, pauses: Sequence[Pause]) -> None:
    """Print one table: the pause, without its step, and its pieces."""
    if not pauses:
        return
    redone = [pause.steps_redone for pause in pauses]
    print(f"\n{title}: {len(pauses)} pauses, steps lost {sum(redone)} (worst {max(redone)})")
    rows = {
        "pause": [pause.pause_s for pause in pauses],
        "without a plain step": [pause.without_step_s for pause in pauses],
        **{name: [pause.pieces[name] for pause in pauses] for name in PIECES},
    }
    head("ms | median | p95 | worst | mean")
    for name, values in rows.items():
        row(name, *(f"{value * 1e3:.0f}" for value in (*worst_cases(values), statistics.mean(values))))


def show_slowest(pauses: Sequence[Pause], count: int) -> None:
    """Print the slowest pauses, one a line."""
    for pause in sorted(pauses, key=lambda entry: -entry.pause_s)[:count]:
        parts = ", ".join(f"{name} {pause.pieces[name] * 1e3:.0f}" for name in PIECES)
        print(
            f"  {pause.pause_s * 1e3:6.0f} ms  {pause.from_shape} -> {pause.to_shape}, {pause.num_lost} lost, "
            f"{pause.num_generations} generations, {pause.steps_redone} steps redone: {parts}"
        )


def main(
    shapes: Annotated[str, option("PxD, all workers there")] = "4x4,8x2,2x8,16x1",
    kills: Annotated[int, option("in all")] = 100,
    together: Annotated[int, option("most VMs killed at once")] = 3,
    redundancy: Annotated[str, option("off, state, salvage or auto")] = "auto",
    job: Annotated[str, option("even, uneven, real or a profile's file")] = "even",
    slower: Annotated[float, option("tasks take so many times as long")] = 1.0,
    plain_steps: Annotated[int, option("so many of off, state and salvage, in two rounds")] = 0,
    seed: Seed = 0,
    slowest: Annotated[int, option("how many of the slowest to print one by one")] = 5,
    keep: Annotated[Path | None, option("keep the journals here")] = None,
) -> None:
    parsed = [Shape.parse(text) for text in words(shapes)]
    told, pauses = machine(), list[Pause]()
    with tempfile.TemporaryDirectory(prefix="morph-pause-") as temporary:
        for index, shape in enumerate(parsed):
            directory = (keep or Path(temporary)) / str(shape)
            directory.mkdir(parents=True)
            made = make_job(shape, job, slower)
            if plain_steps:
                show_overhead(made, shape, ["off", "state", "salvage"], plain_steps, 2, directory)
            if not kills:
                continue
            found = run_shape(made, shape, -(-kills // len(parsed)), together, seed + index, directory, redundancy)
            pauses += found
            step_ms = statistics.median(pause.plain_step_s for pause in found) * 1e3
            print(f"\n== {shape}, {shape.num_workers} workers, plain step {step_ms:.0f} ms")
            show("after kills", [pause for pause in found if not pause.planned])
            show("joins", [pause for pause in found if pause.planned])
    if not pauses:
        return
    forced, joins = ([pause for pause in pauses if pause.planned is planned] for planned in (False, True))
    print(f"\n== all shapes; redundancy {redundancy}, {told}, seed {seed}")
    show("after kills", forced)
    for count in range(1, together + 1):
        show(f"after kills of {count} at once", [pause for pause in forced if pause.num_lost == count])
    show("after kills, state from living workers", [pause for pause in forced if not pause.from_checkpoint])
    show("joins", joins)
    print("\nslowest after kills:")
    show_slowest(forced, slowest)
    print("slowest joins:")
    show_slowest(joins, slowest)

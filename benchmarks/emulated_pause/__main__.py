"""Pause of a morph with 16 emulated workers: from the kill of VMs to the next committed step, and of joins.

    python benchmarks/emulated_pause --shapes 4x4 8x2 2x8 16x1 --kills 100
    python benchmarks/emulated_pause --shapes 8x1 4x2 --job configs/profiles/gpt2-2.5b.json --plain-steps 10

Workers are plain processes of this machine that sleep in place of computing; manager, journal, groups, messages,
reductions and state moves are the real ones. In each shape, again and again, one, two or three VMs are killed at once
at a random moment (seeded), the rest trains on in the planner's best shape, and new VMs are taken in. Prints
median, p95 and worst, and where the time went: the pieces add up to the pause. With ``--plain-steps`` nobody is killed
at first: what second holders cost each step is measured, the kinds of redundancy in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from job import Job, Shape, make_job, make_run
from killer import DONE, Killer
from pieces import PIECES, FormingWatch, Pause, pauses_of, quantiles_ms
from plain import show_overhead

from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observer
from manager.engine.run.session import run_session
from manager.report.reading import read_report
from manager.run_dir import RunDir


def run_shape(
    job: Job, shape: Shape, kills: int, together: int, seed: int, directory: Path, redundancy: str
) -> list[Pause]:
    """Run one shape through its kills.

    Raises:
        SystemExit: the run did not come to its end.
    """
    spec, facts = make_run(job, shape, directory, redundancy)
    nodes = [event.node_id for event in spec.trace.events]
    watch = FormingWatch()
    killers: list[Killer] = []

    def attend(fleet: VmFleet) -> Observer:
        killers.append(Killer(fleet, nodes, kills, together, seed))
        return killers[0]

    with RunDir(directory / "run", facts) as run_dir:
        finish = run_session(spec, run_dir, watch, attend)
        report = read_report(run_dir.path)
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
    print(f"  {'ms':22} {'median':>8} {'p95':>8} {'worst':>8} {'mean':>8}")
    for name, values in rows.items():
        median, p95, worst = quantiles_ms(values)
        print(f"  {name:22} {median:8.0f} {p95:8.0f} {worst:8.0f} {statistics.mean(values) * 1e3:8.0f}")


def show_slowest(pauses: Sequence[Pause], count: int) -> None:
    """Print the slowest pauses, one a line."""
    for pause in sorted(pauses, key=lambda entry: -entry.pause_s)[:count]:
        parts = ", ".join(f"{name} {pause.pieces[name] * 1e3:.0f}" for name in PIECES)
        print(
            f"  {pause.pause_s * 1e3:6.0f} ms  {pause.from_shape} -> {pause.to_shape}, {pause.num_lost} lost, "
            f"{pause.num_generations} generations, {pause.steps_redone} steps redone: {parts}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["4x4", "8x2", "2x8", "16x1"], help="PxD, all workers there")
    parser.add_argument("--kills", type=int, default=100, help="in all")
    parser.add_argument("--together", type=int, default=3, help="most VMs killed at once")
    parser.add_argument("--redundancy", choices=["off", "state", "salvage", "auto"], default="auto")
    parser.add_argument("--job", default="even", help="even, uneven or a profile's file")
    parser.add_argument("--slower", type=float, default=1.0, help="tasks take so many times as long")
    parser.add_argument("--plain-steps", type=int, default=0, help="so many of off, state and salvage, in two rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slowest", type=int, default=5, help="how many of the slowest to print one by one")
    parser.add_argument("--out", type=Path, default=None, help="also write every pause as JSON")
    parser.add_argument("--keep", type=Path, default=None, help="keep the journals here")
    options = parser.parse_args()
    shapes = [Shape.parse(text) for text in options.shapes]
    kills = -(-options.kills // len(shapes))
    load = os.getloadavg()[0]
    pauses: list[Pause] = []
    with tempfile.TemporaryDirectory(prefix="morph-pause-") as temporary:
        for index, shape in enumerate(shapes):
            directory = (options.keep or Path(temporary)) / str(shape)
            directory.mkdir(parents=True)
            job = make_job(shape, options.job, options.slower)
            if options.plain_steps:
                show_overhead(job, shape, ["off", "state", "salvage"], options.plain_steps, 2, directory)
            if not kills:
                continue
            seed = options.seed + index
            found = run_shape(job, shape, kills, options.together, seed, directory, options.redundancy)
            pauses += found
            if options.out is not None:
                options.out.write_text(
                    json.dumps([asdict(pause) for pause in pauses], indent=1) + "\n", encoding="utf-8"
                )
            step_ms = statistics.median(pause.plain_step_s for pause in found) * 1e3
            print(f"\n== {shape}, {shape.num_workers} workers, plain step {step_ms:.0f} ms")
            show("after kills", [pause for pause in found if not pause.planned])
            show("joins", [pause for pause in found if pause.planned])
    if not pauses:
        return
    forced = [pause for pause in pauses if not pause.planned]
    machine = f"{os.cpu_count()} cores, load before {load:.1f}, seed {options.seed}"
    print(f"\n== all shapes; redundancy {options.redundancy}, {machine}")
    show("after kills", forced)
    for count in range(1, options.together + 1):
        show(f"after kills of {count} at once", [pause for pause in forced if pause.num_lost == count])
    show("after kills, state from living workers", [pause for pause in forced if not pause.from_checkpoint])
    show("joins", [pause for pause in pauses if pause.planned])
    print("\nslowest after kills:")
    show_slowest(forced, options.slowest)
    print("slowest joins:")
    show_slowest([pause for pause in pauses if pause.planned], options.slowest)


if __name__ == "__main__":
    main()

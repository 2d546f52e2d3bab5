"""Soak: play run after run under faults drawn from a seed; stop at the first failure or after the given minutes.

    python -m tests.chaos --minutes 60 --seed 1
    python -m tests.chaos --long 1000000 --seed 1 --folder out/soak --minutes 60

The second command is one run of that many cheap steps, with a fault every 500 to 5,000 steps. It prints how the
manager's memory, handles and threads and the run directory grew, and how long ``morph status`` takes at the end. With
``--folder`` it is stopped after ``--minutes``, and the same command plays the next piece; the last one compares.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from morph.contract.profile import load_profile
from morph.runtime.process.single import run_single
from tests.chaos.faults import FAULTS, HARD
from tests.chaos.playing import Bounds, Played, play
from tests.chaos.world import JOB, Setting
from tests.system.commands import morph

BOUNDS = Bounds(faults_s=300.0, stuck_s=400.0)
LONG = Bounds(faults_s=0.0, stuck_s=400.0, apart_steps=(500, 5000))
CHEAP = Path(__file__).with_name("cheap_job.py")


def main() -> int:
    """Return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--steps", type=int, default=1500, help="of each run")
    parser.add_argument("--long", type=int, default=0, metavar="STEPS", help="one run of so many cheap steps instead")
    parser.add_argument("--folder", type=Path, help="with --long: keep the run there, and play it in pieces")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="morph-soak-"))
    print(f"seed {options.seed}; {folder}", flush=True)
    if options.long:
        return _long(options.long, options.seed, folder, options.minutes * 60 if options.folder else None)
    profile = folder / "profile.json"
    morph("calibrate", f"{JOB}:job", "-o", profile, "--samples", 5, "-m", 2)
    setting = Setting(profile, options.steps)
    reference = _undisturbed(JOB, options.steps, profile, folder / "reference")
    total, until_s = Played(options.seed), time.monotonic() + options.minutes * 60
    while time.monotonic() < until_s:
        seed = options.seed + total.num_runs
        (folder / str(seed)).mkdir()
        played = play(seed, setting, lambda: reference, folder / str(seed), BOUNDS, (*FAULTS, *HARD))
        print("\n".join([f"seed {seed}: {played.told()}", *played.lines]), flush=True)
        if played.failures:
            print(
                f"did not hold: {'; '.join(played.failures)}\nagain: make soak SEED={seed}; kept: {folder / str(seed)}"
            )
            return 1
        total.add(played)
    print(f"{total.num_runs} runs, each as if undisturbed: {total.told()}")
    shutil.rmtree(folder)
    return 0


def _undisturbed(job: Path, steps: int, profile: Path, folder: Path) -> dict[str, str]:
    sections = load_profile(profile).num_sections
    alone = run_single(f"{job}:job", steps=steps, num_sections=sections, micro_batch_size=2, checkpoint_url=str(folder))
    return {unit.unit: unit.sha256 for unit in alone.units}


def _long(steps: int, seed: int, folder: Path, piece_s: float | None) -> int:
    """Play one run with faults far apart, or a piece of it; return 1 if it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    profile, log = folder / "profile.json", folder / "pieces.json"
    pieces = json.loads(log.read_text(encoding="utf-8")) if log.exists() else []
    if not pieces:
        morph("calibrate", f"{CHEAP}:job", "-o", profile, "--samples", 5, "-m", 2)
        (folder / "run").mkdir()
    setting = Setting(profile, steps, "processes", checkpoint_every=500, job=CHEAP)

    seed += len(pieces)
    undisturbed = partial(_undisturbed, CHEAP, steps, profile, folder / "alone")
    played = play(seed, setting, undisturbed, folder / "run", replace(LONG, piece_s=piece_s), FAULTS)
    pieces.append({"seed": seed, "steps": played.steps, "faults": dict(played.faults), "failures": played.failures})
    log.write_text(json.dumps(pieces, indent=2), encoding="utf-8")
    for number, piece in enumerate(pieces, 1):
        print(f"piece {number}: seed {piece['seed']}, to step {piece['steps']}, {sum(piece['faults'].values())} faults")
    print("\n".join([f"seed {seed}: {played.told()}", *played.lines]))
    for size in played.sizes[:: max(1, len(played.sizes) // 20)]:
        print(
            f"step {size.version:>8}: manager {size.rss_mib:.0f} MiB, {size.num_handles} handles, "
            f"{size.num_threads} threads; run directory {size.disk_mib:.1f} MiB"
        )
    print(f"morph status in the end: {played.status_cpu_s:.2f} s of processor time, imports included")
    if played.failures:
        print(f"did not hold: {'; '.join(played.failures)}; kept: {folder}")
        return 1
    if played.is_piece:
        print(f"{played.steps} of {steps} steps; the same command plays the next piece")
        return 0
    print(f"as if undisturbed, to the bit, after {steps} steps")
    if piece_s is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Soak: run after run under faults drawn from a seed, for as long as is asked; stops at the first that does not hold.

python -m tests.chaos --minutes 60 --seed 1
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from morph.contract.profile import load_profile
from tests.chaos.faults import FAULTS, HARD
from tests.chaos.playing import Bounds, Played, play
from tests.chaos.world import JOB, Setting
from tests.system.commands import morph
from tests.system.harness import uninterrupted

BOUNDS = Bounds(faults_s=300.0, stuck_s=400.0)


def main() -> int:
    """Return 1 where a run did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--steps", type=int, default=1500, help="of each run")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="morph-soak-"))
    print(f"seed {options.seed}; {folder}", flush=True)
    profile = folder / "profile.json"
    morph("calibrate", f"{JOB}:job", "-o", profile, "--samples", 5, "-m", 2)
    setting = Setting(profile, options.steps)
    reference = uninterrupted(options.steps, folder / "reference", load_profile(profile).num_sections)
    total, until_s = Played(options.seed), time.monotonic() + options.minutes * 60
    while time.monotonic() < until_s:
        seed = options.seed + total.num_runs
        (folder / str(seed)).mkdir()
        played = play(seed, setting, reference, folder / str(seed), BOUNDS, (*FAULTS, *HARD))
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


if __name__ == "__main__":
    sys.exit(main())

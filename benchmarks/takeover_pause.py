"""How long a run pauses when its manager is killed and the same command is started again at once.

    python -m benchmarks takeover_pause --kills 5 --workers 4

Runs `morph run` on local Ray nodes, ends the command with SIGKILL while it trains, and starts it again, several times.
The time is measured from the kill to the next decided step. Prints every take-over, its parts, and the median.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import TINY_JOB, machine, spread
from manager.controller.state.events import EVENT, ManagerResumed
from manager.journal.journal import Journal
from manager.journal.records import DecisionRecord
from manager.run_dir import JOURNAL

MORPH = (sys.executable, "-m", "morph.cli.main")
STEPS_BETWEEN = 10
BOUND_S = 120.0
POLL_S = 0.02


def decided(journal: Journal, after: int) -> list[tuple[float, int, int]]:
    """Return (time, version, line) of the decisions after a line that decided a new version."""
    found: list[tuple[float, int, int]] = []
    for entry in journal.read(after):
        if entry.kind == "decision":
            version = DecisionRecord.model_validate_json(entry.payload_json).version
            if not found or version > found[-1][1]:
                found.append((entry.time_s, version, entry.sequence))
    return found


def wait_for_version(path: Path, command: subprocess.Popen[bytes], version: int) -> int:
    """Wait until a version is decided; return the newest one."""
    until_s = time.monotonic() + BOUND_S
    while time.monotonic() < until_s and command.poll() is None:
        if path.exists():
            with Journal.open(path, read_only=True) as journal:
                last = [entry for entry in journal.read(max(0, _last(journal) - 50)) if entry.kind == "decision"]
            if last and (newest := DecisionRecord.model_validate_json(last[-1].payload_json).version) >= version:
                return newest
        time.sleep(POLL_S)
    raise SystemExit(f"version {version} was not reached")


def _last(journal: Journal) -> int:
    last = journal.last_moment()
    return last[0] if last else 0


def main(kills: int = 5, workers: int = 4) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        profile, cluster, run_dir = directory / "profile.json", directory / "cluster.yaml", directory / "run"
        cluster.write_text(f"vms: {{num_vms: {workers}}}\n", encoding="utf-8")
        subprocess.run([*MORPH, "calibrate", TINY_JOB, "-o", str(profile), "--samples", "5", "-m", "2"], check=True)
        arguments = ["run", TINY_JOB, "--profile", str(profile), "--cluster", str(cluster)]
        arguments += ["--steps", "1000000", "--run-dir", str(run_dir)]
        command = subprocess.Popen([*MORPH, *arguments], stdout=subprocess.DEVNULL)
        killed_s: list[tuple[float, int]] = []
        version = 0
        try:
            for _ in range(kills):
                version = wait_for_version(run_dir / JOURNAL, command, version + STEPS_BETWEEN)
                with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
                    command.kill()
                    killed_s.append((time.time(), 0))
                    command.wait()
                    killed_s[-1] = killed_s[-1][0], _last(journal)
                command = subprocess.Popen([*MORPH, *arguments], stdout=subprocess.DEVNULL)
            wait_for_version(run_dir / JOURNAL, command, version + STEPS_BETWEEN)
        finally:
            command.terminate()
            command.wait()
        pauses_s = []
        with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
            for time_s, line in killed_s:
                behind = journal.read(line)
                resumed_s = next(
                    entry.time_s
                    for entry in behind
                    if entry.kind == "event" and isinstance(EVENT.validate_json(entry.payload_json), ManagerResumed)
                )
                next_s = decided(journal, line)[1][0]
                pauses_s.append(next_s - time_s)
                found, step = resumed_s - time_s, next_s - resumed_s
                print(
                    f"{pauses_s[-1]:.2f} s: {found:.2f} s until the workers were reached, {step:.2f} s to the next step"
                )
    print(f"median {spread(pauses_s)}, {len(pauses_s)} take-overs")

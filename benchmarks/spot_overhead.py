"""Overhead of spot VMs for a script under ``morph spot-run``, by part: measured and simulated (as in Spotify).

    python -m benchmarks spot_overhead --steps 1200 --mttp-s 40 --notice-s 0

VMs of this machine are taken at exponential times (seeded) under the real launcher. The script trains by sleeping
--step-s; its checkpoint has --megabytes. Seconds by part:

    steps        those that count
    redone       steps of which no save was complete, and what was begun of one when its VM went
    saves        the script stands still to write and copy its checkpoint
    allocation   from the end of a VM to the start of the script on the next
    preparation  from that start to the script's first step: the interpreter, imports, the backup's download
    other        what is left

The simulated ones are of the same controller in virtual time, with the same VM lives, and the measured means of a
step, a save, an upload, an allocation and a preparation.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.harness import head, machine, option, row
from manager.spot.controller import (
    Came,
    Event,
    Gone,
    Noticed,
    Release,
    Save,
    Saved,
    SpotState,
    Start,
    Stepped,
    Tick,
    Uploaded,
    decide,
)
from manager.spot.factory import open_local
from manager.spot.spec import Preemptions, SpotJob, lives_of

PARTS = ("steps", "redone", "saves", "allocation", "preparation", "other")
SCRIPT = """
import json, sys, time
import torch
import morph.spot
num_steps, step_s, num_values = int(sys.argv[1]), float(sys.argv[2]), int(float(sys.argv[3]) * 250_000)
state, first = torch.zeros(num_values), 0
if (path := morph.spot.restore()) is not None:
    saved = torch.load(path, weights_only=True)
    state, first = saved["state"], saved["step"]
log = open(sys.argv[4], "a", buffering=1)
def tell(begin_s, **what):
    log.write(json.dumps({**what, "begin_s": begin_s, "end_s": time.time()}) + "\\n")
for step in range(first, num_steps):
    begin_s = time.time()
    with morph.spot.step():
        state += 1
        time.sleep(step_s)
    tell(begin_s, step=step)
    if morph.spot.should_save():
        begin_s = time.time()
        torch.save({"state": state, "step": step + 1}, "checkpoint.pt")
        morph.spot.backup("checkpoint.pt")
        tell(begin_s, saved=step + 1)
"""


@dataclass(frozen=True)
class Means:
    """Seconds."""

    step: float
    save: float
    upload: float
    allocation: float
    preparation: float


def taken_s(entries: list[dict[str, float]]) -> float:
    return sum(one["end_s"] - one["begin_s"] for one in entries)


def measured(
    num_steps: int, step_s: float, megabytes: float, given: Preemptions, folder: Path
) -> tuple[dict[str, float], int, Means]:
    """Return seconds by part, the VMs taken, and means."""
    code, log = folder / "code", folder / "log"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    job = SpotJob(storage=str(folder / "backups"), preemptions=given)
    command = [sys.executable, "train.py", *map(str, (num_steps, step_s, megabytes)), str(log)]
    begin_s = time.time()
    launcher = open_local(job, command, folder / "vms", code, lives_of(given))
    outcome = launcher.run()
    total_s = time.time() - begin_s
    if outcome.code:
        raise SystemExit(f"the script ended with {outcome.code}")
    told = [json.loads(line) for line in log.read_text().splitlines()]
    starts = [begin_s + at_s for at_s, why in outcome.reasons if why.startswith("the script begins on")]
    ends = [begin_s + at_s for at_s, why in outcome.reasons if why.startswith(("the VM is gone", "the script ended"))]
    parts, preparations, allocations = defaultdict[str, float](float), list[float](), [starts[0] - begin_s]
    for index, start_s in enumerate(starts):
        next_s = starts[index + 1] if index + 1 < len(starts) else float("inf")
        end_s = min([one for one in ends if one > start_s] + [next_s])
        mine = [one for one in told if start_s <= one["begin_s"] < end_s]
        steps = [one for one in mine if "step" in one]
        goes_on_at = next((one["step"] for one in told if one["begin_s"] > next_s and "step" in one), num_steps)
        preparations.append((steps[0]["begin_s"] if steps else end_s) - start_s)
        allocations += [next_s - end_s] if next_s < float("inf") else []
        parts["steps"] += taken_s([one for one in steps if one["step"] < goes_on_at])
        parts["redone"] += taken_s([one for one in steps if one["step"] >= goes_on_at])
        parts["saves"] += taken_s([one for one in mine if "saved" in one])
        if steps and next_s < float("inf"):
            parts["redone"] += max(0.0, end_s - mine[-1]["end_s"])
    parts["allocation"], parts["preparation"] = sum(allocations), sum(preparations)
    parts["other"] = total_s - sum(parts.values())
    by_kind = [[one["end_s"] - one["begin_s"] for one in told if kind in one] or [0.0] for kind in ("step", "saved")]
    mean_s, save_s, allocation_s, preparation_s = map(statistics.mean, (*by_kind, allocations, preparations))
    upload_s = launcher._state.upload_s or 0.0
    return parts, len(starts) - 1, Means(mean_s, save_s, upload_s, allocation_s, preparation_s)


class Simulated:
    """The controller in virtual time, a script that steps and saves, and VMs that are taken."""

    def __init__(self, means: Means, given: Preemptions, num_steps: int) -> None:
        self._means, self._given, self._num_steps = means, given, num_steps
        self._life_s, self._state, self._now_s = lives_of(given).life_s, SpotState(), 0.0
        self.parts, self.num_taken = defaultdict[str, float](float), -1
        self._stored = 0

    def run(self) -> None:
        """To the end."""
        self._decide(Tick())
        while self._stored < self._num_steps:
            self.num_taken += 1
            self._pass("allocation", self._means.allocation)
            if self._state.phase == "waiting":
                assert Start("vm") in self._decide(Came("vm"))
            first, step, stored = self._stored, *self._on_vm()
            self.parts["steps"] += (stored - first) * self._means.step
            self.parts["redone"] += (step - stored) * self._means.step
            self._stored = stored
            self._decide(Gone())

    def _on_vm(self) -> tuple[int, int]:
        """Return the steps that the script had done when its VM went, and those of them that are stored."""
        begin_s, step, stored = self._now_s, self._stored, self._stored
        end_s = begin_s + self._life_s(str(self.num_taken), 0)
        self._pass("preparation", min(self._means.preparation, end_s - begin_s))
        is_noticed, order, uploads = False, None, list[tuple[float, int, int]]()
        while step < self._num_steps:
            if self._now_s + self._means.step > end_s:
                self._pass("redone", max(0.0, end_s - self._now_s))
                return step, stored
            lead_s = max(0.0, end_s - self._now_s)
            if not is_noticed and self._given.notice_s > 0 and lead_s <= self._given.notice_s:
                is_noticed, order = True, self._order(Noticed(lead_s)) or order
                if self._state.is_requesting:
                    self._decide(Came("vm"))  # local VMs are there at once
            self._now_s += self._means.step
            step += 1
            order = self._order(Stepped(self._means.step)) or order
            if order is not None:
                self._pass("saves", self._means.save)
                self._decide(Saved(order, self._means.save))
                uploads.append((self._now_s + self._means.upload, order, step))
                order = None
            while uploads and uploads[0][0] <= self._now_s:
                _, number, stored = uploads.pop(0)
                if Release() in self._decide(Uploaded(number, self._means.upload)):
                    return step, stored
        return step, step

    def _pass(self, part: str, seconds: float) -> None:
        self.parts[part] += seconds
        self._now_s += seconds

    def _order(self, event: Event) -> int | None:
        return next((action.number for action in self._decide(event) if isinstance(action, Save)), None)

    def _decide(self, event: Event) -> tuple[object, ...]:
        self._state, actions, _ = decide(self._state, event, self._now_s)
        return actions


def main(
    steps: int = 1200,
    step_s: float = 0.1,
    megabytes: Annotated[float, option("of a checkpoint")] = 20.0,
    mttp_s: Annotated[float, option("mean time until a VM is taken")] = 40.0,
    notice_s: float = 0.0,
    seed: int = 1,
) -> None:
    told, given = machine(), Preemptions(mttp_s=mttp_s, notice_s=notice_s, seed=seed)
    with tempfile.TemporaryDirectory(prefix="spot-overhead-") as name:
        parts, num_taken, means = measured(steps, step_s, megabytes, given, Path(name))
    simulated = Simulated(means, given, steps)
    simulated.run()
    print(f"{steps} steps; a VM lasts {mttp_s:g} s on average, notice {notice_s:g} s; {told} before")
    print(f"means in seconds: {means}")
    head(f"| VMs taken | {' | '.join(PARTS)} | all, s | overhead")
    for label, found, count in (("measured", parts, num_taken), ("simulated", simulated.parts, simulated.num_taken)):
        total_s = sum(found.values())
        seconds = (f"{value:.1f}" for value in (*(found[part] for part in PARTS), total_s))
        row(label, count, *seconds, f"{total_s / found['steps'] - 1:.1%}")

"""Pause of a planned change with and without pre-copied units, on emulated devices with links of limited speed.

    python -m benchmarks planned_change --joins 3

Four emulated workers train a 2x2 shape; two more join again and again (2x3) and are taken away. The newcomers' state
takes as long as the profile's link needs for it. For each size of the state and each policy: the pause, which is the
time from the last step decided before the change to the first one after it, less a plain step of the new shape; and
for how long the newcomers stood by before the change, most of which is the step that was under way.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from benchmarks.harness import head, machine, numbers, option, row, words
from benchmarks.runs import play, specify, steady_vms, subject_of_profile
from manager.controller.state.state import Phase
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed, Observer
from manager.engine.machines.machines import Processes
from manager.rehearsal.device import EmulationOptions, emulated_device
from morph.contract.cluster import Policy
from morph.contract.messages import ReshapeOrder
from morph.contract.rules import PreCopyRules, Rules
from simulator import plan, synthetic_profile

NUM_SECTIONS, BATCH_SIZE, M = 4, 48, 4
LINK_BYTES_PER_S = 1.25e9
FORWARD_S = 0.003
SHAPES = {4: (2, 2), 6: (2, 3)}
STEPS_BETWEEN = 4
REAL_STATE_BYTES = 2_000_000
"""The share of all parameters that is really kept and sent."""


@dataclass
class Joiner:
    """Requests two VMs while four train, takes them away some steps after they joined, and records every step."""

    fleet: VmFleet
    joins: int
    steps: list[tuple[float, int]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    at: int = STEPS_BETWEEN
    asked: tuple[str, ...] = ()
    ready_s: float | None = None
    version: int = 0
    generation: int = 0

    def __call__(self, observed: Observed) -> None:
        state, time_s = observed.decision.state, observed.time_s
        if state.version > self.version:
            self.steps.append((time_s, state.version))
            self.version = state.version
        ready = [worker for worker in self.asked if worker in state.workers and state.workers[worker].ready]
        if self.asked and len(ready) == len(self.asked) and self.ready_s is None:
            self.ready_s = time_s
        if state.generation != self.generation:
            self.generation = state.generation
            if state.reshape is not None and len(state.slots) == max(SHAPES) and self.ready_s is not None:
                self.changes.append(Change(self.ready_s, time_s, state.version, state.reshape))
                self.at = state.version + STEPS_BETWEEN
        if state.phase is not Phase.TRAINING or state.version < self.at:
            return
        if len(state.slots) == max(SHAPES):
            self.fleet.revoke(*self.asked)
            self.asked, self.ready_s, self.at = (), None, state.version + STEPS_BETWEEN
        elif not self.asked:
            if len(self.changes) == self.joins:
                observed.request_stop("enough joins")
                return
            number = len(self.changes)
            self.asked = (f"new{number}a", f"new{number}b")
            for name in self.asked:
                self.fleet.request(name)


@dataclass(frozen=True)
class Change:
    """One join. ``ready_s``: when both newcomers were ready; ``formed_s``: when training stopped for it."""

    ready_s: float
    formed_s: float
    version: int
    order: ReshapeOrder

    def ahead_share(self, sizes: dict[str, int]) -> float:
        """Return the pre-copied share of the bytes that moved."""
        moved = [source for source in self.order.sources if source.kind in ("peer", "ahead")]
        ahead = sum(sizes[source.unit] for source in moved if source.kind == "ahead")
        return ahead / max(1, sum(sizes[source.unit] for source in moved))


def run(parameter_bytes: int, when: str, joins: int) -> dict[str, float]:
    """Run some joins with a policy that pre-copies units ``when``, and return their figures.

    Four equal sections have so many bytes of parameters together; Adam makes three times that of state.
    """
    profile = synthetic_profile(
        num_sections=NUM_SECTIONS,
        forward_s=FORWARD_S,
        batch_size=BATCH_SIZE,
        micro_batch_sizes=(1, 2, M),
        micro_batch_size=M,
        bandwidth_bytes_per_s=LINK_BYTES_PER_S,
        parameter_bytes=parameter_bytes // NUM_SECTIONS,
        accumulator_bytes_per_parameter=4,
    )
    plans = {
        count: plan(profile, num_gpus=count, pipeline_depth=depth, num_replicas=replicas, micro_batch_size=M).best
        for count, (depth, replicas) in SHAPES.items()
    }
    ahead = PreCopyRules.model_validate({"when": when, "bytes_per_s": LINK_BYTES_PER_S, "min_saved_s": 0.02})
    policy = Policy(
        checkpoint_every_steps=10**6, heartbeat_timeout_s=30.0, order_timeout_s=300.0, rules=Rules(ahead=ahead)
    )
    subject = subject_of_profile("emulated", profile, M)
    options = EmulationOptions(state_scale=min(1.0, REAL_STATE_BYTES / parameter_bytes))
    made: list[Joiner] = []

    def attend(fleet: VmFleet) -> Observer:
        made.append(Joiner(fleet, joins))
        return made[-1]

    with tempfile.TemporaryDirectory() as directory:
        spec = specify(
            subject,
            plans,
            policy,
            steady_vms(min(SHAPES)),
            emulation=emulated_device(profile, M, range(2, 7), options),
            machines=Processes(Path(directory) / "workers.log"),
        )
        play(subject, spec, Path(directory) / "run", attend=attend)
    return figures(made[0], dict(subject.unit_bytes))


def figures(joiner: Joiner, sizes: dict[str, int]) -> dict[str, float]:
    """Return medians over the joins."""
    at = {version: time_s for time_s, version in joiner.steps}
    pauses_s, put_off_s, plain_s = [], [], []
    for change in joiner.changes:
        after = [at[version] for version in range(change.version + 1, change.version + STEPS_BETWEEN)]
        plain_s.append(statistics.median(b - a for a, b in itertools.pairwise(after)))
        pauses_s.append(after[0] - at[change.version] - plain_s[-1])
        put_off_s.append(change.formed_s - change.ready_s)
    return {
        "pause_s": statistics.median(pauses_s),
        "put_off_s": statistics.median(put_off_s),
        "step_s": statistics.median(plain_s),
        "ahead_share": statistics.mean(change.ahead_share(sizes) for change in joiner.changes),
    }


def main(
    joins: int = 3,
    parameter_bytes: Annotated[str, option("of all sections")] = "50000000,200000000,400000000,800000000",
    policies: str = "never,if_worth,always",
) -> None:
    print(f"{machine()}; link {LINK_BYTES_PER_S / 1e9:g} GB/s")
    head("state of a newcomer | policy | pause | stood by before the change | step of 2x3 | pre-copied")
    for size in numbers(parameter_bytes):
        for when in words(policies):
            found = run(size, when, joins)
            times = (f"{found[name]:.2f} s" for name in ("pause_s", "put_off_s", "step_s"))
            row(f"{3 * size / 2 / 1e9:.2f} GB", when, *times, f"{found['ahead_share']:.0%}")

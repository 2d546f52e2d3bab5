"""Time to detect a lost worker, and time to the next committed step, by the way in which it is lost.

    python -m benchmarks loss_detection

Four emulated workers train (2x2, synthetic profile) under the real manager. Repeatedly, at a random moment (seeded) of
a step, one of them is killed, stopped, or cut off from the network; once the others train again, a new VM replaces it.
Workers are plain processes, whose orders and heartbeats go over TCP between network namespaces where that is permitted
(Linux, root), else over local sockets and without the case of a cut link; or, with ``--machines ray``, they are actors
on Ray nodes. Prints a table of medians and maxima for each heartbeat time-out.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from benchmarks.harness import Seed, head, machine, option, row, words
from benchmarks.runs import play, specify, steady_vms, subject_of_profile
from manager.controller.state.events import WorkerAnswered, WorkerLost
from manager.controller.state.state import Phase
from manager.engine.local_vms.namespaces import HostNetwork, check_permitted
from manager.engine.local_vms.vm_fleet import VmFleet, VmHost
from manager.engine.loop.driver import Observed, Observer
from manager.engine.machines.machines import Machines, Opening, OpenMachines, Processes
from manager.engine.machines.ray_machines import open_ray
from manager.engine.on_ray.ray_environment import prepare
from manager.rehearsal.device import EmulationOptions, emulated_device
from morph.contract.cluster import Policy
from morph.contract.errors import ConfigError
from morph.contract.messages import WorkerReady
from simulator import plan, synthetic_profile

M, NUM_VMS = 2, 4
SHAPES = {4: (2, 2), 3: (3, 1)}
STEPS_BETWEEN = 3
PROFILE = synthetic_profile(
    num_sections=6, forward_s=0.002, overhead_s=0.0, batch_size=16, micro_batch_size=M, parameter_bytes=400_000
)
KILLED, STOPPED, VM_STOPPED, CUT = "worker killed", "worker stopped", "VM stopped", "link cut"


@dataclass(frozen=True)
class Loss:
    """One loss, in seconds from its cause."""

    timeout_s: float
    kind: str
    cause: str
    to_lost_s: float
    to_step_s: float


class Breaker:
    """Loses one worker after the other in each of the requested ways, and observes the recovery."""

    def __init__(
        self,
        fleet: VmFleet,
        lose: Callable[[str, str, int], None],
        kinds: Sequence[str],
        timeout_s: float,
        seed: int,
    ) -> None:
        self._fleet, self._lose, self._left, self._timeout_s = fleet, lose, list(kinds), timeout_s
        self._random = random.Random(seed)
        self._pids: dict[str, int] = {}
        self._kind = self._victim = self._cause = ""
        self._begin_at: int | None = None
        self._caused_s = self._lost_s = 0.0
        self._version = 0
        self.losses: list[Loss] = []

    def __call__(self, observed: Observed) -> None:
        event, state = observed.event, observed.decision.state
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, WorkerReady):
            self._pids[event.worker] = event.answer.pid
        if isinstance(event, WorkerLost) and event.worker == self._victim and not self._lost_s:
            self._lost_s, self._cause = observed.time_s, event.cause
        if self._lost_s:
            if state.version > self._version and self._victim not in state.workers:
                self._went_on(observed.time_s)
        elif not self._kind and state.phase is Phase.TRAINING and len(state.slots) == NUM_VMS:
            self._begin(observed)
        if self._kind and not self._lost_s:
            self._version = state.version

    def _begin(self, observed: Observed) -> None:
        state = observed.decision.state
        if not self._left:
            if state.stop_reason is None:
                observed.request_stop("everything was lost once")
            return
        if self._begin_at is None:
            self._begin_at = state.version + STEPS_BETWEEN
        if state.version < self._begin_at:
            return
        self._begin_at, self._kind, self._version = None, self._left.pop(0), state.version
        self._victim = self._random.choice([slot.worker for slot in state.slots])
        step_s = state.plan.expected.mini_batch_s if state.plan else 0.0
        threading.Timer(self._random.uniform(0.0, step_s), self._break).start()

    def _break(self) -> None:
        self._caused_s = time.time()
        self._lose(self._kind, self._victim, self._pids[self._victim])

    def _went_on(self, now_s: float) -> None:
        to_lost_s, to_step_s = self._lost_s - self._caused_s, now_s - self._caused_s
        self.losses.append(Loss(self._timeout_s, self._kind, self._cause, to_lost_s, to_step_s))
        with suppress(ProcessLookupError):
            os.kill(self._pids[self._victim], signal.SIGCONT)  # a worker that was given up must be dead by now
        node = self._victim.partition(".")[0]
        self._fleet.revoke(node)
        self._fleet.request(node)
        self._kind = self._victim = ""
        self._lost_s = 0.0


@dataclass
class Cluster:
    """The machines of one run, and the ways in which they can be lost."""

    ray: bool
    network: HostNetwork | None

    def __post_init__(self) -> None:
        self._hosts: dict[str, int] = {}
        self._vms: VmHost | None = None

    def opening(self, log_path: Path) -> OpenMachines:
        """Return the function that starts the machines."""
        network = self.network
        found: OpenMachines = Processes(log_path, network=network, host_of=self._host_of)
        found = open_ray(prepare()) if self.ray else found

        def machines(opening: Opening) -> Machines:
            opened = found(opening)
            self._vms = opened.vms
            return opened

        return machines

    def _host_of(self, vm: str) -> int:
        return self._hosts.setdefault(vm, len(self._hosts))

    def lose(self, kind: str, vm: str, pid: int) -> None:
        """Lose a VM's worker in one of the ways."""
        if kind == CUT:
            assert self.network is not None
            self.network.cut(self._host_of(vm))
        elif kind == VM_STOPPED:
            from manager.engine.on_ray.ray_cluster import RayCluster  # imports Ray, which must come after `prepare`

            assert isinstance(self._vms, RayCluster)
            for each in self._vms.vm_pids(vm):
                os.kill(each, signal.SIGSTOP)
        else:
            os.kill(pid, signal.SIGKILL if kind == KILLED else signal.SIGSTOP)


def run(kinds: Sequence[str], timeout_s: float, seed: int, cluster: Cluster) -> list[Loss]:
    """Lose a worker in each of these ways, one after the other, in one run."""
    subject = subject_of_profile("emulated", PROFILE, M, state_copies=1)
    plans = {
        count: plan(PROFILE, num_gpus=count, pipeline_depth=deep, num_replicas=wide, micro_batch_size=M).best
        for count, (deep, wide) in SHAPES.items()
    }
    breakers: list[Breaker] = []

    def attend(fleet: VmFleet) -> Observer:
        breakers.append(Breaker(fleet, cluster.lose, kinds, timeout_s, seed))
        return breakers[0]

    with tempfile.TemporaryDirectory() as directory:
        spec = specify(
            subject,
            plans,
            Policy(checkpoint_every_steps=1_000_000, heartbeat_timeout_s=timeout_s),
            steady_vms(NUM_VMS),
            emulation=emulated_device(PROFILE, M, range(2, NUM_VMS + 1), EmulationOptions()),
            machines=cluster.opening(Path(directory) / "workers.log"),
        )
        finish, _ = play(subject, spec, Path(directory) / "run", attend=attend)
    if finish.outcome != "stopped":
        raise SystemExit(f"the run ended before its time: {finish.sentence}")
    return breakers[0].losses


def main(
    times: Annotated[int, option("losses of each kind, for each time-out")] = 3,
    timeouts: Annotated[str, option("heartbeat time-outs, s")] = "5,1",
    machines: Literal["processes", "ray"] = "processes",
    seed: Seed = 0,
) -> None:
    ray = machines == "ray"
    kinds = [KILLED, STOPPED, VM_STOPPED] if ray else [KILLED, STOPPED]
    network = None
    if not ray:
        try:
            check_permitted()
            kinds.append(CUT)
            network = HostNetwork(NUM_VMS + len(kinds) * times + 1, 1e9)
        except ConfigError as error:
            print(f"without the cut link: {error}", file=sys.stderr)
    print(f"{machine()}, {machines}", flush=True)
    losses: list[Loss] = []
    for timeout_s in map(float, words(timeouts)):
        losses += run(kinds * times, timeout_s, seed, Cluster(ray, network))
    head("time-out | lost by | losses | known, s: median (worst) | next step, s: median (worst) | found by")
    for timeout_s, kind in dict.fromkeys((loss.timeout_s, loss.kind) for loss in losses):
        same = [loss for loss in losses if (loss.timeout_s, loss.kind) == (timeout_s, kind)]
        causes = ", ".join(sorted({"silence" if "silent" in loss.cause else "connection" for loss in same}))
        known_s, step_s = [loss.to_lost_s for loss in same], [loss.to_step_s for loss in same]
        cells = (f"{statistics.median(each):.3f} ({max(each):.3f})" for each in (known_s, step_s))
        row(f"{timeout_s:g} s", kind, len(same), *cells, causes)

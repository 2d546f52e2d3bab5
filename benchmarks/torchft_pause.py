"""How long a data-parallel job under torchft 0.2 stands still after kills: N replicas of one worker each, gloo.

    python -m benchmarks torchft_pause --replicas 16 --kills 30              tuned time-outs
    python -m benchmarks torchft_pause --replicas 8 --kills 3 --defaults     torchft's own

torchft is not a dependency of Morph: install it beside the project, `pip install "torchft==0.2.*"`.

A worker sleeps for a step's compute, averages 128 KiB of gradients and commits. One, two or three workers are
killed at once at a random moment (seeded); new ones come when the rest has gone on, and heal from a peer. Prints the
time from the kill to the first step that a survivor commits without the dead, and until every survivor has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated

import torch
from torch._C._distributed_c10d import TCPStore

from benchmarks.harness import LOOPBACK, Seed, forked, head, kill, machine, option, row, worst_cases

NUM_VALUES = 32 * 1024


@dataclass(frozen=True)
class Setting:
    """Time-outs in seconds; None: torchft's own."""

    name: str
    heartbeat_timeout_s: float | None = None
    heartbeat_interval_s: float | None = None
    quorum_tick_s: float | None = None
    join_timeout_s: float | None = None
    timeout_s: float | None = None

    def lighthouse(self) -> dict[str, int]:
        """Arguments of the lighthouse."""
        given = {
            "heartbeat_timeout_ms": self.heartbeat_timeout_s,
            "quorum_tick_ms": self.quorum_tick_s,
            "join_timeout_ms": self.join_timeout_s,
        }
        return {name: round(value * 1e3) for name, value in given.items() if value is not None}

    def manager(self) -> dict[str, timedelta]:
        """Arguments of the manager."""
        given = {"timeout": self.timeout_s, "heartbeat_interval": self.heartbeat_interval_s}
        return {name: timedelta(seconds=value) for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Commit:
    """A step that a replica committed, with so many replicas taking part."""

    time_s: float
    step: int
    num_participants: int


def serve_lighthouse(setting: Setting, min_replicas: int, told: Connection, log: Path) -> None:
    """Run the lighthouse until the connection closes; tells its address first."""
    _write_errors_to(log)
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=f"{LOOPBACK}:0", min_replicas=min_replicas, **setting.lighthouse())
    told.send(server.address())
    with contextlib.suppress(EOFError):
        told.recv()
    os._exit(0)


def train(setting: Setting, name: str, lighthouse: str, step_s: float, told: Connection, log: Path) -> None:
    """Train until the connection closes: sleep for a step's compute, average 128 KiB of gradients, commit."""
    logging.basicConfig(filename=log, level=logging.WARNING, force=True)
    _write_errors_to(log)
    torch.set_num_threads(1)
    from torchft import Manager, ProcessGroupGloo

    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    weights = torch.zeros(NUM_VALUES)
    group = ProcessGroupGloo() if setting.timeout_s is None else ProcessGroupGloo(timedelta(seconds=setting.timeout_s))
    manager = Manager(
        pg=group,
        load_state_dict=lambda state: weights.copy_(state["weights"]),
        state_dict=lambda: {"weights": weights},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname=LOOPBACK,
        init_sync=False,
        **setting.manager(),
    )
    while not told.poll():  # what torchft raises ends the process, as in its own examples
        manager.start_quorum()
        time.sleep(step_s)
        gradient = torch.ones(NUM_VALUES)
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            weights -= gradient
            told.send(Commit(time.time(), manager.current_step(), manager.num_participants()))
    os._exit(0)


def _write_errors_to(log: Path) -> None:
    """Send standard output and error of this process, whatever writes there, to a file."""
    opened = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(opened, 1)
    os.dup2(opened, 2)


START_TIMEOUT_S = 60.0


@dataclass
class Replica:
    """A running replica and what it committed."""

    pid: int
    lane: Connection
    commits: list[Commit] = field(default_factory=list)


class Group:
    """A lighthouse and its replicas, all of them forks of this process."""

    def __init__(self, setting: Setting, num_replicas: int, step_s: float, directory: Path) -> None:
        self._setting, self._step_s, self._directory = setting, step_s, directory
        self.replicas: dict[int, Replica] = {}
        self._num_started = 0
        ours, theirs = Pipe()
        self._lighthouse_pid = forked(
            lambda: serve_lighthouse(setting, num_replicas // 2, theirs, directory / "lighthouse.log")
        )
        theirs.close()
        self._lighthouse = ours
        if not ours.poll(START_TIMEOUT_S):
            raise TimeoutError(f"the lighthouse did not start within {START_TIMEOUT_S:g} s")
        self.address: str = ours.recv()
        for index in range(num_replicas):
            self.start(index)

    def start(self, index: int) -> None:
        """Start replica ``index``, under a new name."""
        ours, theirs = Pipe()
        name, log = f"r{self._num_started}_{index}", self._directory / f"replica{index}.log"
        self._num_started += 1
        inherited = [self._lighthouse, ours, *(replica.lane for replica in self.replicas.values())]

        def body() -> None:
            for lane in inherited:
                lane.close()
            train(self._setting, name, self.address, self._step_s, theirs, log)

        pid = forked(body)
        theirs.close()
        self.replicas[index] = Replica(pid, ours)

    def kill(self, indices: list[int]) -> float:
        """End replicas with SIGKILL, all at once; returns when (wall-clock seconds)."""
        doomed = [self.replicas.pop(index) for index in indices]
        now_s = time.time()
        kill(replica.pid for replica in doomed)
        for replica in doomed:
            replica.lane.close()
        return now_s

    def watch(self, until: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Take commits in until a condition holds.

        Raises:
            TimeoutError: it did not within ``timeout_s``.
        """
        end_s = time.monotonic() + timeout_s
        while not until():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"waited {timeout_s:g} s for {what}")
            by_lane = {id(replica.lane): replica for replica in self.replicas.values()}
            for lane in wait([replica.lane for replica in self.replicas.values()], min(left_s, 0.5)):
                assert isinstance(lane, Connection)
                try:
                    by_lane[id(lane)].commits.append(lane.recv())
                except EOFError:
                    raise RuntimeError(f"a replica ended by itself: {self._last_words()}") from None

    def _last_words(self) -> str:
        """The end of the newest replica's log."""
        logs = sorted(self._directory.glob("replica*.log"), key=lambda path: path.stat().st_mtime)
        return logs[-1].read_text(errors="replace")[-600:] if logs else "nothing was logged"

    def close(self) -> None:
        """End every process."""
        kill([*(replica.pid for replica in self.replicas.values()), self._lighthouse_pid])
        self.replicas.clear()


TUNED = Setting(
    "tuned",
    heartbeat_timeout_s=0.3,
    heartbeat_interval_s=0.05,
    quorum_tick_s=0.01,
    join_timeout_s=0.1,
    timeout_s=1.0,
)
SETTLE_STEPS = (3, 8)
SETTLE_TIMEOUT_S = 120.0
PAUSE_TIMEOUT_S = 150.0


@dataclass(frozen=True)
class Loss:
    """One kill: seconds until the first survivor commits without the dead, and until every one has."""

    num_killed: int
    first_s: float
    all_s: float


def settle(group: Group, num_replicas: int, steps: int) -> None:
    """Wait until every replica has committed so many more steps with all the others."""
    since = {index: len(replica.commits) for index, replica in group.replicas.items()}

    def settled() -> bool:
        return all(
            len(new := replica.commits[since[index] :]) >= steps and new[-1].num_participants == num_replicas
            for index, replica in group.replicas.items()
        )

    group.watch(settled, SETTLE_TIMEOUT_S, f"{num_replicas} replicas to train")


def lose(group: Group, chooser: random.Random, count: int) -> Loss:
    """Kill some replicas now; the others go on."""
    victims = chooser.sample(sorted(group.replicas), count)
    left = len(group.replicas) - count
    killed_s = group.kill(victims)

    def resumed() -> list[float]:
        firsts = []
        for replica in group.replicas.values():
            after = [
                entry.time_s for entry in replica.commits if entry.time_s > killed_s and entry.num_participants <= left
            ]
            firsts += after[:1]
        return firsts

    group.watch(lambda: len(resumed()) == left, PAUSE_TIMEOUT_S, "every survivor to commit a step")
    loss = Loss(count, min(resumed()) - killed_s, max(resumed()) - killed_s)
    for victim in victims:
        group.start(victim)
    return loss


def main(
    replicas: int = 16,
    kills: int = 30,
    together: Annotated[int, option("most replicas killed at once")] = 3,
    seed: Seed = 0,
    step_s: Annotated[float, option("a step's compute")] = 0.05,
    defaults: Annotated[bool, option("torchft's own time-outs")] = False,
    heartbeat_timeout_s: Annotated[float | None, option("instead of the tuned one")] = None,
    join_timeout_s: Annotated[float | None, option("instead of the tuned one")] = None,
    timeout_s: Annotated[float | None, option("instead of the tuned one")] = None,
) -> None:
    if importlib.util.find_spec("torchft") is None:
        sys.exit('torchft is not installed: pip install "torchft==0.2.*" (it is not a dependency of Morph)')
    importlib.import_module("torchft")  # once, for all that are forked from here
    setting = Setting("defaults") if defaults else TUNED
    setting = replace(
        setting,
        heartbeat_timeout_s=heartbeat_timeout_s or setting.heartbeat_timeout_s,
        join_timeout_s=join_timeout_s or setting.join_timeout_s,
        timeout_s=timeout_s or setting.timeout_s,
    )
    told, chooser, losses = machine(), random.Random(seed), list[Loss]()
    with tempfile.TemporaryDirectory(prefix="torchft-pause-") as directory:
        group = Group(setting, replicas, step_s, Path(directory))
        try:
            for _ in range(kills):
                settle(group, replicas, chooser.randint(*SETTLE_STEPS))
                threading.Event().wait(chooser.uniform(0.0, 2 * step_s))
                losses.append(lose(group, chooser, chooser.randint(1, together)))
        except (TimeoutError, RuntimeError) as error:
            print(f"ended after {len(losses)} kills: {error}", file=sys.stderr)
        finally:
            group.close()
    print(f"torchft, {replicas} replicas, {setting}, {len(losses)} kills; {told}")
    if losses:
        head("until | median | p95 | worst")
        for name, values in (
            ("the first survivor has a step", [loss.first_s for loss in losses]),
            ("every survivor has one", [loss.all_s for loss in losses]),
        ):
            row(name, *(f"{value:.2f} s" for value in worst_cases(values)))
    sys.exit(0 if len(losses) == kills else 1)

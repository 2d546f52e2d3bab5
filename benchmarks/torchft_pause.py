"""How long a data-parallel job under torchft 0.2 pauses after kills: N replicas of one worker each, gloo.

    python -m benchmarks torchft_pause --replicas 16 --kills 30              tuned time-outs
    python -m benchmarks torchft_pause --replicas 8 --kills 3 --defaults     torchft's own

torchft is not a dependency of Morph: install it beside the project, `pip install "torchft==0.2.*"`.

A worker sleeps for a step's compute, averages 128 KiB of gradients and commits. One, two or three workers are
killed at once at a random moment (seeded); new ones come after the others have continued, and heal from a peer. Prints
the time from the kill until the first survivor, and until every survivor, has committed a step without the dead
workers.
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
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import torch
from torch._C._distributed_c10d import TCPStore

from benchmarks.elastic_ring import Forks, Told
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


def serve_lighthouse(setting: Setting, min_replicas: int, told: Connection, log: Path) -> None:
    """Run the lighthouse until the connection closes; tells its address first."""
    _write_errors_to(log)
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=f"{LOOPBACK}:0", min_replicas=min_replicas, **setting.lighthouse())
    told.send(server.address())
    with contextlib.suppress(EOFError):
        told.recv()
    os._exit(0)


def train(told: Connection, setting: Setting, name: str, lighthouse: str, step_s: float, log: Path) -> None:
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
    while not told.poll():  # an error of torchft ends the process, as in its own examples
        manager.start_quorum()
        time.sleep(step_s)
        gradient = torch.ones(NUM_VALUES)
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            weights -= gradient
            told.send(Told(time.time(), manager.current_step(), manager.num_participants()))
    os._exit(0)


def _write_errors_to(log: Path) -> None:
    """Redirect standard output and error of this process to a file, also for C code."""
    opened = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(opened, 1)
    os.dup2(opened, 2)


START_TIMEOUT_S = 60.0


class Group(Forks):
    """A lighthouse and its replicas."""

    def __init__(self, setting: Setting, num_replicas: int, step_s: float, directory: Path) -> None:
        super().__init__()
        self._setting, self._step_s, self._directory = setting, step_s, directory
        ours, theirs = Pipe()
        self._lighthouse_pid = forked(
            lambda: serve_lighthouse(setting, num_replicas // 2, theirs, directory / "lighthouse.log")
        )
        theirs.close()
        self._lighthouse = ours
        if not ours.poll(START_TIMEOUT_S):
            raise TimeoutError(f"the lighthouse did not start within {START_TIMEOUT_S:g} s")
        self._address: str = ours.recv()
        for _ in range(num_replicas):
            self.add()

    def add(self) -> None:
        """Start a replica, under a new name."""
        name = f"r{self.num_started}"
        log = self._directory / f"replica{name}.log"

        def body(lane: Connection) -> None:
            self._lighthouse.close()
            train(lane, self._setting, name, self._address, self._step_s, log)

        self.start(body)

    def last_words(self) -> str:
        """The end of the newest replica's log."""
        logs = sorted(self._directory.glob("replica*.log"), key=lambda path: path.stat().st_mtime)
        return logs[-1].read_text(errors="replace")[-600:] if logs else "nothing was logged"

    def close(self) -> None:
        """End every process."""
        super().close()
        kill([self._lighthouse_pid])


TUNED = Setting(
    "tuned",
    heartbeat_timeout_s=0.3,
    heartbeat_interval_s=0.05,
    quorum_tick_s=0.01,
    join_timeout_s=0.1,
    timeout_s=1.0,
)
SETTLE_STEPS = (3, 8)


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
    told, chooser, losses = machine(), random.Random(seed), list[list[float]]()
    with (
        tempfile.TemporaryDirectory(prefix="torchft-pause-") as directory,
        Group(setting, replicas, step_s, Path(directory)) as group,
    ):
        try:
            for _ in range(kills):
                group.settle(replicas, chooser.randint(*SETTLE_STEPS))
                threading.Event().wait(chooser.uniform(0.0, 2 * step_s))
                count = chooser.randint(1, together)
                killed_s, found = group.lose(count, chooser)
                losses.append([step.time_s - killed_s for step, _ in found])
                for _ in range(count):
                    group.add()
        except (TimeoutError, RuntimeError) as error:
            print(f"ended after {len(losses)} kills: {error}: {group.last_words()}", file=sys.stderr)
    print(f"torchft, {replicas} replicas, {setting}, {len(losses)} kills; {told}")
    if losses:
        head("until | median | p95 | worst")
        for name, values in (
            ("the first survivor has a step", [min(took_s) for took_s in losses]),
            ("every survivor has one", [max(took_s) for took_s in losses]),
        ):
            row(name, *(f"{value:.2f} s" for value in worst_cases(values)))
    sys.exit(0 if len(losses) == kills else 1)

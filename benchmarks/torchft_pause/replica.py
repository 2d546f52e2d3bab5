"""One torchft replica group of one worker, and the lighthouse: bodies of forked processes."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed import TCPStore

NUM_VALUES = 32 * 1024
LOOPBACK = "127.0.0.1"


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

"""Faults that are injected into a run from outside, by pid, file, socket and clock.

Each takes a world and a draw.
"""

from __future__ import annotations

import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from tests.chaos.processes import end_all, send
from tests.chaos.world import World
from tests.small_disk import may_mount, read_only
from tests.waiting import BOUND_S

HOUR_S = 3600


@dataclass(frozen=True)
class Fault:
    """``inflict`` injects the fault, and undoes a transient one; returns a description, or "" without a victim."""

    name: str
    inflict: Callable[[World, random.Random], str]
    possible: Callable[[], bool] = lambda: True


def _some(draw: random.Random, found: Iterable[psutil.Process]) -> psutil.Process | None:
    processes = sorted(found, key=lambda process: process.pid)
    return draw.choice(processes) if processes else None


@contextmanager
def _stopped(process: psutil.Process) -> Iterator[bool]:
    there = send(process, signal.SIGSTOP)
    try:
        yield there
    finally:
        send(process, signal.SIGCONT)


def _wait(world: World, seconds: float) -> None:
    """Let time pass while the run continues; record child processes that appear meanwhile."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        world.family.look()
        time.sleep(min(0.3, max(0.0, until_s - time.monotonic())))


def kill_worker(world: World, draw: random.Random) -> str:
    worker = _some(draw, world.workers())
    return f"worker {worker.pid}" if worker and send(worker, signal.SIGKILL) else ""


def stop_worker(world: World, draw: random.Random) -> str:
    """Stop a worker, either for less than its heartbeat time-out or for longer."""
    worker, seconds = _some(draw, world.workers()), draw.choice([1.5, 8.0])
    if worker is None:
        return ""
    with _stopped(worker):
        _wait(world, seconds)
    return f"worker {worker.pid} for {seconds:g} s"


def kill_vm(world: World, draw: random.Random) -> str:
    """Kill a VM's first process (Ray's raylet) and all of its descendants at once."""
    first = _some(draw, world.vms())
    if first is None:
        return ""
    try:
        whole = [first, *first.children(recursive=True)]
    except psutil.Error:
        return ""
    end_all(whole)
    return f"VM of process {first.pid}"


def kill_two_vms(world: World, draw: random.Random) -> str:
    return ", ".join(filter(None, (kill_vm(world, draw) for _ in range(2))))


def kill_manager(world: World, draw: random.Random) -> str:
    """Kill the manager, and start the same command again soon afterwards."""
    pid, pause_s = world.manager.pid, draw.choice([0.0, 1.0, 5.0])
    world.family.look()
    if not world.kill_manager():
        return ""
    _wait(world, pause_s)
    world.start()
    return f"manager {pid}, again after {pause_s:g} s"


def kill_manager_and_owner(world: World, draw: random.Random) -> str:
    """Kill the manager and the owner of the VMs, which die with it; then start the same command again."""
    del draw
    owners, manager = world.owners(), world.manager
    end_all([*owners, manager])
    if not world.kill_manager():
        return ""
    world.start()
    return f"manager {manager.pid}, {len(owners)} owners"


def stop_manager(world: World, draw: random.Random) -> str:
    seconds = draw.choice([1.0, 7.0])
    with _stopped(world.manager):
        _wait(world, seconds)
    return f"for {seconds:g} s"


def stop_owner(world: World, draw: random.Random) -> str:
    owner = _some(draw, world.owners())
    if owner is None:
        return ""
    with _stopped(owner):
        _wait(world, 2.0)
    return f"process {owner.pid} for 2 s"


def reset_connections(world: World, draw: random.Random) -> str:
    """Let the kernel reset all connections of one living worker."""
    worker = _some(draw, world.workers())
    if worker is None:
        return ""
    try:
        ports = [found.laddr.port for found in worker.net_connections("tcp") if found.status == "ESTABLISHED"]
    except psutil.Error:
        return ""
    for port in ports:
        subprocess.run(["ss", "-K", "-t", "src", "127.0.0.1", "sport", "=", f":{port}"], capture_output=True)
    return f"{len(ports)} of worker {worker.pid}" if ports else ""


def may_reset() -> bool:
    """Return whether this kernel and user may reset connections, after trying it on an own connection."""
    if shutil.which("ss") is None:
        return False
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        port = ours.getsockname()[1]
        subprocess.run(["ss", "-K", "-t", "src", "127.0.0.1", "sport", "=", f":{port}"], capture_output=True)
        ours.settimeout(0.1)
        try:
            ours.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


def kill_store(world: World, draw: random.Random) -> str:
    store = _some(draw, world.family.named("morph.runtime.groups.store"))
    return f"store {store.pid}" if store and send(store, signal.SIGKILL) else ""


def kill_head(world: World, draw: random.Random) -> str:
    """Kill a process of Ray's head node, and so every VM."""
    head = _some(draw, world.family.named("gcs_server"))
    return f"process {head.pid}" if head and send(head, signal.SIGKILL) else ""


def lock_journal(world: World, draw: random.Random) -> str:
    seconds = draw.choice([1.0, 8.0])
    connection = sqlite3.connect(world.run_dir / "journal.sqlite", isolation_level=None, timeout=BOUND_S)
    try:
        connection.execute("BEGIN IMMEDIATE")
        _wait(world, seconds)
        connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        return f"not got: {error}"
    finally:
        connection.close()
    return f"for {seconds:g} s"


def fill_disk(world: World, draw: random.Random) -> str:
    """Fill the disk, so that neither journal nor checkpoints can grow; a command that just starts would refuse it."""
    seconds = draw.choice([2.0, 6.0])
    if world.disk is None or not world.workers():
        return ""
    try:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            world.disk.fill()  # includes the space of files that the run deletes meanwhile
            _wait(world, 0.3)
    finally:
        world.disk.free()
    return f"for {seconds:g} s"


def make_read_only(world: World, draw: random.Random) -> str:
    """Make the folder of checkpoints read-only; the journal is already open."""
    seconds, folder = draw.choice([2.0, 6.0]), world.checkpoints()
    if not folder.is_dir():
        return ""
    with read_only(folder):
        _wait(world, seconds)
    return f"for {seconds:g} s"


def set_clock(world: World, draw: random.Random) -> str:
    moved_s = draw.choice([HOUR_S, -HOUR_S, 26 * HOUR_S, 0])
    world.set_clock(moved_s)
    return f"{moved_s / HOUR_S:+g} h"


def edit_job(world: World, draw: random.Random) -> str:
    """Change data and seed while a worker is replaced, and restore them, because the command may be repeated.

    A command that has not read the job yet would rightly refuse the change.
    """
    if not world.has_begun():
        return ""
    text = world.job.read_text(encoding="utf-8")
    edited = text.replace("seed=0,", "seed=1,").replace("index // 3", "index // 2")
    assert edited != text
    try:
        world.job.write_text(edited, encoding="utf-8")
        worker = kill_worker(world, draw)
        _wait(world, 6.0)
    finally:
        world.job.write_text(text, encoding="utf-8")
    return f"for 6 s, {worker} killed" if worker else ""


def half_written(world: World, draw: random.Random) -> str:
    """Make what a killed writer leaves: a version's directory without a manifest, and truncated and temporary files."""
    newest = max(world.checkpoints().glob("v*"), default=None)
    if newest is None:
        return ""
    folder = world.checkpoints() / f"v{int(newest.name[1:]) + 1:08d}"
    with suppress(OSError):  # the run may be deleting that version
        folder.mkdir(exist_ok=True)
        for file in list(newest.glob("*.safetensors"))[:2]:
            (folder / file.name).write_bytes(file.read_bytes()[: draw.randrange(1, 64)])
        (folder / ".0123.tmp").write_bytes(b"half")
    return folder.name


def delete_older(world: World, draw: random.Random) -> str:
    """Delete all but the newest complete checkpoint."""
    del draw
    complete = sorted(path.parent for path in world.checkpoints().glob("v*/manifest.json"))
    for folder in complete[:-1]:
        shutil.rmtree(folder, ignore_errors=True)
    return ", ".join(folder.name for folder in complete[:-1])


FAULTS = (
    Fault("worker killed", kill_worker),
    Fault("worker stopped", stop_worker),
    Fault("VM killed", kill_vm),
    Fault("two VMs killed", kill_two_vms),
    Fault("manager killed", kill_manager),
    Fault("manager and VMs' owner killed", kill_manager_and_owner),
    Fault("manager stopped", stop_manager),
    Fault("VMs' owner stopped", stop_owner),
    Fault("journal locked", lock_journal),
    Fault("disk full", fill_disk, may_mount),
    Fault("checkpoints read-only", make_read_only, may_mount),
    Fault("clock set", set_clock, lambda: shutil.which("gcc") is not None),
    Fault("job's file edited", edit_job),
    Fault("half-written checkpoint", half_written),
    Fault("older checkpoint deleted", delete_older),
)
HARD = (
    Fault("connections reset", reset_connections, may_reset),
    Fault("store killed", kill_store),
    Fault("head node killed", kill_head),
)
"""Faults for `make soak`, which take more time than CI has."""

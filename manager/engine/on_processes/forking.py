"""The work of the process from which workers are forked; ``process_host`` starts it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import sys
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from manager.engine.local_vms.control_socket import ControlSocket, hear, tell
from manager.engine.local_vms.namespaces import enter, remove_all
from manager.engine.on_processes import HOST
from morph.contract.errors import JobError
from morph.jobs.files import imported_once
from morph.jobs.job import load_job
from morph.link.home import Home
from morph.runtime.emulation.workload import EmulatedWorkload
from morph.runtime.groups.store import StoreHost
from morph.runtime.process.serving import serve, until_ended
from morph.runtime.process.worker import set_up
from morph.runtime.state.fixed_point import prepare
from morph.runtime.state.optimizer_state import prepare_torch
from morph.runtime.workloads.job_workload import JobWorkload

MAX_DESCRIPTORS = 1
PRELOADED = (EmulatedWorkload, JobWorkload)
"""Modules that are imported here so that the children need not import them."""


@dataclass
class _Children:
    """Forked processes, each with a socket that tells it when this process ends."""

    control_socket: ControlSocket
    calls: socket.socket
    lanes: dict[int, socket.socket] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)
    store: int = 0

    def living(self) -> dict[str, int]:
        """Return the running workers. A dead worker is not reaped, so that no other process can get its number."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return {name: pid for name, pid in self.workers.items() if os.waitid(os.P_PID, pid, flags) is None}

    def fork(self, manager: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
        if "store" in request:
            self.end_store()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            self.control_socket.close()
            self.calls.close()
            for foreign in (manager, ours, *self.lanes.values()):  # if left open, they would hide the parent's end
                foreign.close()
            _child(request, descriptors, theirs)
        theirs.close()
        self.lanes[pid] = ours
        if "worker" in request:
            self.workers[request["worker"]] = pid
        else:
            self.store = pid
        return pid

    def end_store(self) -> None:
        """Kill the store, if there is one, so that another can have its port."""
        if self.store:
            os.kill(self.store, signal.SIGKILL)
            os.waitpid(self.store, 0)
            self.lanes.pop(self.store).close()
            self.store = 0

    def end(self) -> None:
        for pid in self.lanes:
            os.kill(pid, signal.SIGKILL)
        for pid in self.lanes:
            os.waitpid(pid, 0)


def _child(request: dict[str, Any], descriptors: list[int], host: socket.socket) -> None:
    """The body of a forked process; does not return, and ends with its parent."""
    try:
        enter(request["namespace"])
        if "worker" in request:
            until_ended(lambda: host.recv(1))
            serve(Home.model_validate_json(request["home"]), set_up)
        else:
            store = StoreHost(request["store"], request["port"])
            Connection(descriptors[0]).send_bytes(str(store.port()).encode())
            host.recv(1)
    finally:
        sys.stderr.flush()
        os._exit(0)


def _attend(manager: socket.socket, children: _Children) -> bool:
    """Serve one manager until it disconnects; returns whether it requested the end."""
    with manager, contextlib.suppress(OSError):
        tell(manager, children.calls.fileno(), host=os.getpid(), store=children.store, vms=children.living())
        while True:
            request, descriptors = hear(manager, MAX_DESCRIPTORS)
            if request is None or "end" in request:
                return request is not None
            if "settled" in request:
                children.control_socket.settle()
                continue
            try:
                answer: dict[str, object] = {"pid": children.fork(manager, request, descriptors)}
            except (OSError, KeyError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            for descriptor in descriptors:
                os.close(descriptor)
            tell(manager, **answer)
    return False


def _ordered() -> dict[str, str] | None:
    """Read the first manager's order, and write to the log from then on; None: the manager has ended."""
    with open(0, "rb", closefd=False) as stdin:
        line = stdin.readline()
    if not line:
        return None
    order: dict[str, str] = json.loads(line)
    with Path(order["log"]).open("ab") as log, Path(os.devnull).open("rb") as nothing:
        for number, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), number)
    return order


def _begin_anew(order: dict[str, str]) -> NoReturn:
    """Run as a new process, which reads this order."""
    read, write = os.pipe()
    os.write(write, json.dumps(order).encode() + b"\n")
    os.dup2(read, 0)
    os.execv(sys.executable, [sys.executable, "-m", HOST, *sys.argv[1:]])


def imported_for_forks(job_path: str) -> bool:
    """Import the job; return whether this process can still be forked: it has no threads, and children may use CUDA.

    An error is ignored: a worker that cannot load the job reports it.
    """
    # torch.cuda.is_available() then asks NVML, not the driver, so that children may still use CUDA
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with imported_once(job_path), contextlib.suppress(JobError, SystemExit):
        load_job(job_path)
    has_cuda = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call] # torch ships no types
    return not has_threads() and (not has_cuda or _child_may_use_cuda())


def _child_may_use_cuda() -> bool:
    """Try CUDA in a child: even ``torch.cuda.device_count()`` may prevent it, which ``is_initialized()`` hides."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call] # torch ships no types
            code = 0
        except (RuntimeError, AssertionError) as error:
            code = int("fork" in str(error))  # workers report a missing device or a broken driver themselves
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return status == 0


def has_threads() -> bool:
    """Whether this process has more than one thread; Linux only."""
    return len(os.listdir("/proc/self/task")) > 1  # noqa: PTH208


def main() -> None:
    """Serve managers until one requests the end, or none comes in time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    first_manager, directories = os.getppid(), sys.argv[4:]
    prepare()
    prepare_torch()
    order = _ordered()
    if order is None:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
        return
    if order["job"] and not imported_for_forks(order["job"]):
        _begin_anew({**order, "job": ""})
    control_socket = ControlSocket(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]))
    calls = socket.socket(fileno=int(sys.argv[3]))
    calls.set_inheritable(False)
    children = _Children(control_socket, calls)
    asked_to_end = False
    assert not has_threads(), "a process with threads cannot be forked safely"
    gc.collect()
    gc.freeze()  # share the imported modules with the children for good
    gc.enable()
    try:
        while not asked_to_end and (manager := control_socket.next()) is not None:
            asked_to_end = _attend(manager, children)
    finally:
        control_socket.close()
        calls.close()
        children.end()
        if not asked_to_end:
            remove_all(first_manager)
            for directory in directories:
                shutil.rmtree(directory, ignore_errors=True)

"""The process from which local workers are forked: ``python -m manager.engine.process_host FD [DIRECTORY]``.

It has imported everything that a worker needs, once, and has no thread and no device of its own: a fork of it is a
worker in milliseconds, where a fresh process would need seconds for its imports. Requests come over the socket FD, each
as JSON with the file descriptors that the new process is to have:

``{"worker": "vm0", "namespace": null}`` with the worker's order and control connections,
``{"store": "127.0.0.1", "namespace": null}`` with one connection, on which the store tells its port.

Answers: ``{"ready": true}`` once, then ``{"pid": ..}`` or ``{"error": ".."}``. At ``{"end": true}``, or when the socket
closes, every child is killed. When it closes without that request, the manager was killed: then DIRECTORY and the
manager's network namespaces are removed too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

from manager.engine.namespaces import enter, remove_all
from morph.runtime.emulation.unit import warm_up
from morph.runtime.emulation.workload import EmulatedWorkload
from morph.runtime.serving import serve
from morph.runtime.store import StoreHost

MESSAGE_BYTES = 65536
MAX_DESCRIPTORS = 4
PRELOADED = (EmulatedWorkload,)
"""Imported for the children's sake."""


def _child(request: dict[str, Any], descriptors: list[int]) -> None:
    """Body of a forked process; does not return."""
    try:
        enter(request["namespace"])
        connections = [Connection(descriptor) for descriptor in descriptors]
        if "worker" in request:
            serve(*connections)
        else:
            store = StoreHost(request["store"])
            connections[0].send_bytes(str(store.port()).encode())
            with contextlib.suppress(EOFError, OSError):
                connections[0].recv_bytes()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _fork(requests: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        requests.close()
        _child(request, descriptors)
    return pid


def _serve(requests: socket.socket, children: list[int]) -> bool:
    """Fork what is asked for until the end; returns whether the manager asked for that too."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, MAX_DESCRIPTORS)
        request = json.loads(message) if message else {}
        if not message or "end" in request:
            return "end" in request
        try:
            children.append(_fork(requests, request, descriptors))
            answer: dict[str, object] = {"pid": children[-1]}
        except OSError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(json.dumps(answer).encode())


def main() -> None:
    """Serve requests until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    manager = os.getppid()
    requests = socket.socket(fileno=int(sys.argv[1]))
    warm_up()
    children: list[int] = []
    asked_to_end = False
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"  # noqa: PTH208
    gc.collect()
    gc.freeze()  # what was imported is shared with the children for good
    try:
        requests.send(json.dumps({"ready": True}).encode())
        with contextlib.suppress(OSError):
            asked_to_end = _serve(requests, children)
    finally:
        for pid in children:  # not waited for before, so that no other process can have the number
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
        if not asked_to_end:
            remove_all(manager)
            for directory in sys.argv[2:]:
                shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()

"""A manager's connection to the process that owns its VMs."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil

from manager.engine.local_vms.control_socket import PACKET_BYTES
from manager.host.folders import holding
from manager.host.processes import patience_s
from morph.contract.errors import ClusterError

log = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 20.0
END_TIMEOUT_S = 15.0


class HostLine:
    """Sends requests and receives answers, one JSON object per packet, in one thread at a time; any may call ``end``.

    ``log_path``: the host's log, which errors name. ``process``: the host, if this manager started it. ``workers``: the
    socket that workers call, which the host keeps; None: the host sends it.
    """

    def __init__(
        self,
        connection: socket.socket,
        log_path: Path,
        process: subprocess.Popen[bytes] | None = None,
        workers: socket.socket | None = None,
    ) -> None:
        self._connection = connection
        self._log_path = log_path
        self._process = process
        self._pid = process.pid if process else 0
        self._hears = process is None
        self._workers = workers

    @classmethod
    def start(
        cls,
        module: str,
        control_socket: Path,
        patience_s: float,
        log_path: Path,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        workers: socket.socket | None = None,
        stdin: int | None = None,
    ) -> HostLine:
        """Start a host: ``python -m MODULE FD PATIENCE_S ARGUMENTS``, FD being the socket at which it listens.

        ``workers``: the listening socket that workers call, which one of the arguments names. The host keeps it without
        accepting, so that each manager listens where the last one did, and no other process can listen there in
        between. ``stdin``: the file from which the host reads further orders before it opens the log itself; until then
        it writes to this process's standard error.
        """
        output = log_path.open("ab") if stdin is None else nullcontext(sys.__stderr__)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, output as errors:
            listener.bind(str(control_socket))
            listener.listen(1)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(str(control_socket))
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(listener.fileno()), str(patience_s), *arguments],
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=errors,
                stderr=errors,
                pass_fds=[listener.fileno(), *([workers.fileno()] if workers else ()), *holding(control_socket)],
                env=env,
                start_new_session=True,  # Ctrl-C in the terminal is only for the manager
            )
        return cls(connection, log_path, process, workers)

    @classmethod
    def attach(cls, control_socket: Path, log_path: Path) -> tuple[HostLine, dict[str, Any]]:
        """Connect to a killed manager's host; returns its greeting too. ClusterError after ``GREETING_TIMEOUT_S``."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(GREETING_TIMEOUT_S)
            connection.connect(str(control_socket))
        except OSError as error:
            connection.close()
            raise ClusterError("the process that owned its VMs is gone") from error
        line = cls(connection, log_path)
        try:
            return line, line.greeting(GREETING_TIMEOUT_S)
        except ClusterError:
            connection.close()
            raise

    @property
    def pid(self) -> int:
        """The host's process."""
        return self._pid

    @property
    def workers(self) -> socket.socket:
        """The socket that workers call, once the host has greeted; ClusterError if the host did not send it."""
        if self._workers is None:
            raise ClusterError("the process that owned its VMs does not say where workers call")
        return self._workers

    def greeting(self, timeout_s: float) -> dict[str, Any]:
        """Return the first packet, which lists the host's processes; ClusterError if none comes."""
        greeting = self.receive("the process that owns the VMs to start", timeout_s)
        self._pid = greeting.get("host", self._pid)
        self._hears = True
        return greeting

    def send(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a request; ClusterError if the host is gone."""
        try:
            if descriptors:
                socket.send_fds(self._connection, [json.dumps(request).encode()], list(descriptors))
            else:
                self._connection.sendall(json.dumps(request).encode())
        except OSError as error:
            raise ClusterError(f"the process that owns the VMs is gone ({error}); see {self._log_path}") from error

    def receive(self, what: str, timeout_s: float) -> dict[str, Any]:
        """Return the next answer.

        ClusterError: none comes within ``timeout_s``, or longer on a busy machine; the host is gone; or it answers with
        an error.
        """
        timeout_s = patience_s(timeout_s)
        try:
            self._connection.settimeout(timeout_s)
            message, descriptors, _, _ = socket.recv_fds(self._connection, PACKET_BYTES, 1)
        except TimeoutError as error:
            raise ClusterError(f"waited {timeout_s:.3g} s for {what}; see {self._log_path}") from error
        except OSError:
            message, descriptors = b"", []
        for descriptor in descriptors:
            if self._workers is None:
                self._workers = socket.socket(fileno=descriptor)
            else:
                os.close(descriptor)
        if not message:
            raise ClusterError(f"the process that owns the VMs ended; see {self._log_path}")
        answer: dict[str, Any] = json.loads(message)
        if "error" in answer:
            raise ClusterError(str(answer["error"]))
        return answer

    def listen(self, handle: Callable[[dict[str, Any]], None]) -> None:
        """Pass every further packet to ``handle`` in a thread, last of all ``{}``; never ``receive`` after this."""
        self._connection.settimeout(None)

        def run() -> None:
            with suppress(OSError):
                while message := self._connection.recv(PACKET_BYTES):
                    handle(json.loads(message))
            handle({})

        threading.Thread(target=run, name="morph-vm-host", daemon=True).start()

    def settle(self) -> None:
        """Tell the host that a successor of this manager could find it."""
        self.send({"settled": True})

    def end(self) -> bool:
        """Ask for the end of everything, unless the host still starts; return whether it ended in ``END_TIMEOUT_S``."""
        if not self._hears:
            self._connection.close()
            return False
        with suppress(ClusterError):
            self.send({"end": True})
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if self._gone(END_TIMEOUT_S):
            return True
        log.warning("the process that owns the VMs did not end within %g s", END_TIMEOUT_S)
        return False

    def close(self) -> None:
        """Disconnect, and leave the host running."""
        self._connection.close()
        if self._workers is not None:
            self._workers.close()

    def kill(self) -> None:
        """Send SIGKILL to the host's process."""
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self._pid).kill()
        self._gone(END_TIMEOUT_S)

    def _gone(self, timeout_s: float) -> bool:
        try:
            if self._process is not None:
                self._process.wait(timeout_s)
            elif self._pid:
                psutil.Process(self._pid).wait(timeout_s)
        except psutil.NoSuchProcess:
            pass
        except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
            return False
        return True

"""The worker's end of the connection whose closing tells the manager that this process is gone.

A connection that breaks is made anew: it says nothing about the process. The manager's going means nothing to the
worker either: another may come, with a lifeline of its own.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from morph.contract.messages import Lifeline
from morph.contract.proof import proof

CONNECT_TIMEOUT_S = 10.0
AGAIN_S = 0.1
NONCE_BYTES = 64


def hold_lifeline(lifeline: Lifeline, worker: str) -> socket.socket:
    """Open the connection and say who this is; the caller keeps the socket for life.

    The manager sends a nonce, and the answer is a proof for it: the secret itself does not travel.

    Raises:
        OSError: when the manager cannot be reached within ``CONNECT_TIMEOUT_S``, or does not speak like this.
    """
    connection = socket.create_connection((lifeline.host, lifeline.port), timeout=CONNECT_TIMEOUT_S)
    try:
        nonce = connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
        if len(nonce) < NONCE_BYTES:
            raise ConnectionError("the manager hung up")
        given = proof(lifeline.secret, "lifeline", nonce.decode("ascii", errors="replace"), worker)
        connection.sendall(f"{given} {worker}\n".encode("ascii"))
    except BaseException:
        connection.close()
        raise
    return connection


class KeptLifeline:
    """Holds a lifeline until ``close``, in as many connections as it takes; a thread waits for their ends.

    Raises:
        OSError: as ``hold_lifeline``.
    """

    def __init__(self, lifeline: Lifeline, worker: str) -> None:
        self._lifeline, self._worker = lifeline, worker
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._connection = hold_lifeline(lifeline, worker)
        threading.Thread(target=self._keep, name="morph-lifeline", daemon=True).start()

    def close(self) -> None:
        """Let go of it."""
        with self._lock:
            self._over.set()
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()

    def _keep(self) -> None:
        while not self._over.is_set():
            with suppress(OSError):
                self._connection.settimeout(None)
                self._connection.recv(1)  # nothing ever comes: it returns when the connection is gone
            while not self._over.wait(AGAIN_S):
                try:
                    connection = hold_lifeline(self._lifeline, self._worker)
                except OSError:  # the manager is gone, or out of reach: it, or its successor, is waited for
                    continue
                self._replace(connection)
                break

    def _replace(self, connection: socket.socket) -> None:
        with self._lock:
            if self._over.is_set():
                connection.close()
            else:
                self._connection.close()
                self._connection = connection

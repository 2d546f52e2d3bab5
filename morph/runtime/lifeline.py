"""The worker's end of the connection whose closing tells the manager that this process is gone.

The manager's going means nothing to the worker: another may come, with a lifeline of its own.
"""

from __future__ import annotations

import socket

from morph.contract.messages import Lifeline
from morph.contract.proof import proof

CONNECT_TIMEOUT_S = 10.0
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

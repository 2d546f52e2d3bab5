"""Asking the manager of a living run to take VMs, from another process of its machine.

Its socket lies beside the one at which a successor would find the VMs, and it answers nobody but its own user and root.
"""

from __future__ import annotations

import socket
from pathlib import Path

from manager.engine.local_vms.control_socket import hear, process_of, tell
from manager.engine.machines.attachment import Attachment
from manager.engine.machines.preempting import SOCKET_NAME, Answered, Asked
from manager.run_dir import ATTACHMENT, living_holder_of, others_process
from morph.contract.base import read_json
from morph.contract.errors import RunDirError

ANSWER_TIMEOUT_S = 120.0
"""Longer than a provider takes for a call."""


def ask(run_dir: Path, asked: Asked) -> Answered | None:
    """Ask, and wait for the answer for at most ``ANSWER_TIMEOUT_S``; None: the manager hears nobody now.

    It does not while it starts, and while the run goes on from a checkpoint.

    Raises:
        NotRunning: nobody manages the run.
        RunDirError: it is not this user's to ask.
    """
    holder = living_holder_of(run_dir)
    path = run_dir / ATTACHMENT
    try:
        address = read_json(path, Attachment, RunDirError).control_socket.with_name(SOCKET_NAME)
    except RunDirError:
        if not path.exists():
            return None
        raise
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(address))
            if process_of(connection) != holder:
                return None  # not the manager's: what one that was killed left
            tell(connection, **asked.model_dump())
            answer, _ = hear(connection)
        except PermissionError as error:
            raise others_process(holder, run_dir) from error
        except OSError:
            return None
    return None if answer is None else Answered.model_validate(answer)

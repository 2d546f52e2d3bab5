"""The injector: preempts VMs of a running run according to a model of lives, until the run ends.

It runs in another process on the manager's machine, and sends requests to a socket of the manager, which answers only
the manager's user and root. This socket is beside the one at which another manager would find the VMs.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from manager.engine.local_vms.control_socket import hear, process_of, tell
from manager.engine.machines.attachment import Attachment
from manager.engine.machines.preemption import SOCKET_NAME, PreemptionAnswer, PreemptionRequest
from manager.run_dir import ATTACHMENT, NotRunning, living_holder_of, others_process
from morph.contract.base import read_json
from morph.contract.errors import RunDirError
from morph.contract.lives import Change, Lives
from morph.words import moment_text

POLL_S = 0.25
ANSWER_TIMEOUT_S = 120.0
"""The time-out of an answer in seconds, longer than a provider needs for a call."""


@dataclass(frozen=True)
class Injection:
    """How VMs are preempted. ``count``: the largest number; None: as many as the model says."""

    lead_s: float
    min_vms: int
    why: str
    count: int | None = None

    def taking(self, *vms: str) -> PreemptionRequest:
        """Return the request to the manager."""
        return PreemptionRequest(vms=vms, lead_s=self.lead_s, min_vms=self.min_vms, why=self.why)


def ask(run_dir: Path, requested: PreemptionRequest) -> PreemptionAnswer | None:
    """Send a request, and wait at most ``ANSWER_TIMEOUT_S`` for the answer; None: the manager does not answer now.

    It does not answer while it starts, or while the run resumes from a checkpoint. NotRunning if the run has no
    manager, RunDirError if it belongs to another user.
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
                return None  # the socket is not the manager's, but was left by a killed one
            tell(connection, **requested.model_dump())
            answer, _ = hear(connection)
        except PermissionError as error:
            raise others_process(holder, run_dir) from error
        except OSError:
            return None
    return None if answer is None else PreemptionAnswer.model_validate(answer)


def first_answer(run_dir: Path, requested: PreemptionRequest, say: Callable[[str], None]) -> PreemptionAnswer:
    """Send a request once the manager answers; blocks while the run starts or pauses. Errors: see ``ask``."""
    waits = False
    while (answer := ask(run_dir, requested)) is None:
        if not waits:
            say("the run does not answer now because it starts or is about to end: waiting for it")
        waits = True
        time.sleep(POLL_S)
    return answer


def inject(
    run_dir: Path, injection: Injection, make_lives: Callable[[float], Lives], say: Callable[[str], None]
) -> str:
    """Preempt VMs; blocks until the run or the model is over, or ``count`` VMs were taken. Return which, as a sentence.

    If this is interrupted, the manager still finishes preemptions that it has begun. ``make_lives``: makes the model of
    when VMs are taken, given the time on the run's clock at which it begins. ``say``: called with a line for each VM
    that is taken or spared. Errors: see ``ask``.
    """
    answer = first_answer(run_dir, PreemptionRequest(), say)
    say(f"VMs that may be taken now: {len(answer.vms)}; {injection.why}")
    lives, before_s, num_taken = make_lives(answer.now_s), answer.now_s, 0
    while True:
        for due in lives.between(answer.vms, before_s, answer.now_s):
            wanted = due.vms if injection.count is None else due.vms[: injection.count - num_taken]
            try:
                done = first_answer(run_dir, injection.taking(*wanted), say)
            except NotRunning:
                return _over(run_dir)
            for line in lines_of(done, injection):
                say(line)
            num_taken += len(done.taken)
            if num_taken == injection.count:
                return f"{num_taken} VM{'s were' if num_taken > 1 else ' was'} taken"
        before_s = answer.now_s
        if before_s >= lives.end_s:
            return "the trace is over"
        time.sleep(POLL_S)
        try:
            answer = first_answer(run_dir, PreemptionRequest(), say)
        except NotRunning:
            return _over(run_dir)


def lines_of(answer: PreemptionAnswer, injection: Injection) -> list[str]:
    """Report which VMs are taken, and which are not."""
    notice = f"taken, with a notice of {injection.lead_s:g} s" if injection.lead_s else "taken, without a notice"
    taken = [f"{moment_text(answer.now_s)}  {vm}  {notice}" for vm in answer.taken]
    return taken + [f"{moment_text(answer.now_s)}  {vm}  spared: {why}" for vm, why in answer.left.items()]


def planned_line(taken: Change, now_s: float) -> str:
    """Report which VMs would be taken, and when."""
    return f"{moment_text(taken.time_s)}  {', '.join(taken.vms)}  in {taken.time_s - now_s:.1f} s"


def _over(run_dir: Path) -> str:
    """Return why a run has no manager; if the file for a successor still exists, the manager was killed."""
    if (run_dir / ATTACHMENT).exists():
        return "the run's manager was killed: once another manager continues the run, repeat this command"
    return "the run has ended"

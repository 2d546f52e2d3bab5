"""The injector: takes VMs of a living run as a schedule says, until the run ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from manager.engine.machines.preempting import Answered, Asked
from manager.injection.asking import ask
from manager.injection.schedule import Schedule, Taking
from manager.run_dir import ATTACHMENT, NotRunning

POLL_S = 0.25


@dataclass(frozen=True)
class Injection:
    """How VMs are taken. ``count``: so many at most; None: as many as the schedule says."""

    lead_s: float
    min_vms: int
    why: str
    count: int | None = None

    def taking(self, *vms: str) -> Asked:
        """Return what the manager is asked for."""
        return Asked(vms=vms, lead_s=self.lead_s, min_vms=self.min_vms, why=self.why)


def first_answer(run_dir: Path, asked: Asked, told: Callable[[str], None]) -> Answered:
    """Ask as soon as the manager hears it; blocks for as long as the run starts, or pauses.

    Raises:
        NotRunning: nobody manages the run.
        RunDirError: it is not this user's to ask.
    """
    waits = False
    while (answer := ask(run_dir, asked)) is None:
        if not waits:
            told("the run does not answer now, for it starts, or is about to end: waiting for it")
        waits = True
        time.sleep(POLL_S)
    return answer


def inject(
    run_dir: Path, injection: Injection, make_schedule: Callable[[float], Schedule], told: Callable[[str], None]
) -> str:
    """Take VMs; blocks until the run or the schedule is over, or enough were taken. Returns which, as a sentence.

    What the manager has begun it carries out, also when this is interrupted.

    Args:
        run_dir: Of a living run.
        injection: How.
        make_schedule: Makes the schedule, given its first moment by the run's clock.
        told: Hears a line for each VM that is taken, or spared.

    Raises:
        NotRunning: nobody manages the run to begin with.
        RunDirError: it is not this user's to ask.
    """
    answer = first_answer(run_dir, Asked(), told)
    told(f"VMs that may be taken now: {len(answer.vms)}; {injection.why}")
    schedule, before_s, num_taken = make_schedule(answer.now_s), answer.now_s, 0
    while True:
        for taking in schedule.between(answer.vms, before_s, answer.now_s):
            wanted = taking.vms if injection.count is None else taking.vms[: injection.count - num_taken]
            try:
                done = first_answer(run_dir, injection.taking(*wanted), told)
            except NotRunning:
                return _over(run_dir)
            for line in lines_of(done, injection):
                told(line)
            num_taken += len(done.taken)
            if num_taken == injection.count:
                return f"{num_taken} VM{'s were' if num_taken > 1 else ' was'} taken"
        before_s = answer.now_s
        if before_s >= schedule.end_s:
            return "the trace is over"
        time.sleep(POLL_S)
        try:
            answer = first_answer(run_dir, Asked(), told)
        except NotRunning:
            return _over(run_dir)


def lines_of(answer: Answered, injection: Injection) -> list[str]:
    """Say which VMs are taken, and which are not."""
    notice = f"taken, with a notice of {injection.lead_s:g} s" if injection.lead_s else "taken, without a notice"
    taken = [f"{_clock(answer.now_s)}  {vm}  {notice}" for vm in answer.taken]
    return taken + [f"{_clock(answer.now_s)}  {vm}  spared: {why}" for vm, why in answer.left.items()]


def planned_line(taking: Taking, now_s: float) -> str:
    """Say which VMs would be taken, and when."""
    return f"{_clock(taking.time_s)}  {', '.join(taking.vms)}  in {taking.time_s - now_s:.1f} s"


def _over(run_dir: Path) -> str:
    """Say why nobody manages a run any more; what a successor needs is there where its manager could not end it."""
    if (run_dir / ATTACHMENT).exists():
        return "the run's manager was killed: once another goes on with the run, this command can be given again"
    return "the run has ended"


def _clock(time_s: float) -> str:
    """As ``morph events`` has it: UTC."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")

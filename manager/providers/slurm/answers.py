"""Parses answers of Slurm's programs. An unreadable one is an error, and never means that there are no jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ValidationError

from manager.providers.interface.provider import (
    MESSAGE_CHARACTERS,
    CapacityShort,
    Misconfigured,
    ProviderError,
    QuotaExceeded,
    Transient,
)
from morph.contract.base import Value

QUEUE_FORMAT = "%i|%T|%P|%S|%e|%N|%r|%j|%k"
QUEUE_HEADER = "JOBID|STATE|PARTITION|START_TIME|END_TIME|NODELIST|REASON|NAME|COMMENT"
"""The header that proves that squeue answered: output without it says nothing about jobs."""
TIME_FORMAT = "%s"
"""Value for ``SLURM_TIME_FORMAT``: seconds since 1970, in every time zone."""
JSON_SINCE = (23, 2)
"""The first version whose ``squeue --json`` honours filters; earlier ones list the jobs of all users, 10 kB each."""
MARK = "morph "
NEVER = frozenset(
    {
        "AccountNotAllowed", "AssocMaxWallDurationPerJobLimit", "BadConstraints", "DependencyNeverSatisfied",
        "InvalidAccount", "InvalidQOS", "PartitionNodeLimit", "PartitionTimeLimit", "QOSMaxWallDurationPerJobLimit",
        "QOSNotAllowed", "QOSTimeLimit",
    }
)  # fmt: skip
"""Reasons with which a pending job never starts, unless the user corrects the cloud file."""
ORDINARY = frozenset({"", "BeginTime", "Cleaning", "None", "Priority", "Prolog", "Resources"})
"""Reasons of pending jobs that only wait their turn. With any other reason, a job may start or not."""
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
OVER = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL",
        "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
"""States of jobs that are over. A job in any other state, even an unknown one, exists."""
_KINDS: Sequence[tuple[type[ProviderError], str]] = (
    (QuotaExceeded, r"QOS\w*Limit|Assoc\w*Limit|policy \(job submit limit|violates accounting/QOS|MaxSubmit"),
    (CapacityShort, r"partition not available|node not available|nodes are DOWN|Requested nodes are busy"),
    (
        Misconfigured,
        r"[Ii]nvalid (partition|account|qos|generic resource|--?\w|time|wckey|constraint|feature|job array|user|"
        r"qos specification)|[Pp]ermission denied|not permitted|unrecognized option|[Rr]equested node configuration"
        r"|[Rr]equested time limit|[Ii]nvalid (node name|reservation)|can ?not be satisfied|More processors requested"
        r"|[Mm]emory (specification|required)|Batch script|invalid option|not available to",
    ),
)
"""The error that a refusal means, by a pattern in its text. Any other is ``Transient``: the next try may succeed."""
_UNCONFIGURED = re.compile(r"configuration source|fetch_config|DNS SRV lookup", re.IGNORECASE)
"""Without a slurm.conf, Slurm's programs fetch it from slurmctld, so they print this also while slurmctld is down."""


class Mark(Value):
    """The run and node of a job, which Slurm keeps in the job's comment."""

    run: str
    job: str
    request: str
    devices: int

    @property
    def text(self) -> str:
        """The text of the comment."""
        return MARK + self.model_dump_json()


class Job(Value):
    """A job that Slurm knows. ``number``: the job id for scancel; ``mark``: None for jobs that Morph did not submit."""

    number: str
    name: str
    states: frozenset[str]
    partition: str = ""
    nodes: str = ""
    reason: str = ""
    starts_s: float | None = None
    ends_s: float | None = None
    mark: Mark | None = None

    @property
    def phase(self) -> Literal["waiting", "running", "over"]:
        """Whether the job waits, runs or is over, whichever of Slurm's states it has."""
        if self.states & OVER:
            return "over"
        return "waiting" if self.states & WAITING else "running"


def jobs_in_text(text: str) -> tuple[Job, ...]:
    """Parse ``squeue --format=QUEUE_FORMAT``, with its header. Transient: the output has another form."""
    header, *lines = text.splitlines() or [""]
    if header.strip() != QUEUE_HEADER:
        raise Transient(f"squeue: the answer is not a list of jobs: {header[:80]!r}")
    return tuple(_job_of_line(line) for line in lines if line.strip())


def _job_of_line(line: str) -> Job:
    fields = line.split("|", QUEUE_FORMAT.count("|"))
    if len(fields) <= QUEUE_FORMAT.count("|"):
        raise Transient(f"squeue: a line is not that of a job: {line[:80]!r}")
    number, state, partition, starts, ends, nodes, reason, name, comment = fields
    return Job(
        number=number,
        name=name,
        states=frozenset({state}),
        partition=partition,
        nodes=nodes,
        reason=reason,
        starts_s=_seconds(starts),
        ends_s=_seconds(ends),
        mark=mark_in(comment),
    )


def jobs_in_json(text: str, uid: int) -> tuple[Job, ...]:
    """Parse a user's jobs from ``squeue --json``, of any version. Transient: it has another form, or errors."""
    try:
        answer = json.loads(text)
        if answer.get("errors"):
            raise Transient(f"squeue: {json.dumps(answer['errors'])[:200]}")
        return tuple(_job_of_object(job) for job in answer["jobs"] if _owner(job) == uid)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Transient(f"squeue: the answer is not a list of jobs: {type(error).__name__}: {error}") from error


def _owner(job: dict[str, Any]) -> float:
    owner = _number(job["user_id"])
    if owner is None:
        raise ValueError("a job without a user")
    return owner


def _job_of_object(job: dict[str, Any]) -> Job:
    states, comment = job["job_state"], "" if job.get("comment") is None else job["comment"]
    number = _number(job["job_id"])
    if number is None or not states or not isinstance(comment, str):
        raise ValueError("a job without a number or a state, or with a comment that is not a text")
    return Job(
        number=str(int(number)),
        name=str(job["name"]),
        states=frozenset([states] if isinstance(states, str) else map(str, states)),
        partition=str(job.get("partition") or ""),
        nodes=str(job.get("nodes") or ""),
        reason=str(job.get("state_reason") or ""),
        starts_s=_number(job.get("start_time")) or None,
        ends_s=_number(job.get("end_time")) or None,
        mark=mark_in(comment),
    )


def mark_in(comment: str) -> Mark | None:
    """Return the mark in a job's comment; None: Morph did not submit the job."""
    if not comment.startswith(MARK):
        return None
    try:
        return Mark.model_validate_json(comment.removeprefix(MARK))
    except ValidationError:
        return None


def _number(value: Any) -> float | None:
    """Parse a number: plain, or as ``{"set": true, "infinite": false, "number": 1}``."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    if value is None or isinstance(value, bool):
        return None
    return float(value)


def _seconds(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+", text) else None


def version_in(text: str) -> tuple[int, ...]:
    """Return the version in the output of ``--version``; empty: there is none."""
    match = re.search(r"\b(\d+)\.(\d+)", text)
    return () if match is None else (int(match[1]), int(match[2]))


def job_number_in(text: str) -> str:
    """Return the job number that ``sbatch --parsable`` shows. Transient: there is none; the job may exist."""
    number = (text.strip().splitlines() or [""])[-1].partition(";")[0]
    if not re.fullmatch(r"\d+", number):
        raise Transient(f"sbatch: the answer is not a job's number: {text.strip()[:80]!r}")
    return number


def setting_in(text: str, name: str) -> float | None:
    """Return a number of seconds in the output of ``scontrol show``: ``GraceTime=8`` or ``KillWait = 30 sec``."""
    match = re.search(rf"\b{name}\s*=\s*(\d+)\b", text)
    return None if match is None else float(match[1])


def why_over(text: str) -> str:
    """Return how a job ended, from ``sacct --parsable2 --noheader --format=State,ExitCode``; empty: not known."""
    state, _, code = (text.strip().splitlines() or [""])[0].partition("|")
    return f"{state}, exit code {code}" if re.fullmatch(r"[A-Z_]+( by \d+)?", state) else ""


def error_of(program: str, said: str) -> ProviderError:
    """Return the error that the output of a failed sbatch, squeue or scancel means."""
    if _UNCONFIGURED.search(said):
        return Transient(
            f"{program} finds no configuration of Slurm: this machine has no slurm.conf (SLURM_CONF names another "
            "place), and no controller answers that would send one"
        )
    text = " ".join(said.replace(f"{program}: error:", "").split())[:MESSAGE_CHARACTERS] or "it says nothing"
    kind = next((kind for kind, words in _KINDS if re.search(words, said)), Transient)
    return kind(f"{program}: {text}")

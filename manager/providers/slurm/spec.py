"""The cloud file for Slurm, and the commands and scripts of its jobs: pure, nothing is run here."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from manager.providers.boot.cloud_init import NodeStart
from manager.providers.hosts.static_node import secret_of, static_node
from manager.providers.interface.provider import vm_name
from manager.providers.slurm.answers import QUEUE_FORMAT, TIME_FORMAT, Mark
from morph.contract.base import Value
from morph.contract.cluster import UsdPerHour
from morph.contract.vm_names import MAX_DEVICES

WORD = r"^[A-Za-z0-9_.,:+-]+$"
TIME = r"^(\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2})$"
OURS = (
    "array", "clusters", "comment", "cpus-per-task", "error", "export", "job-name", "nodes", "no-requeue", "ntasks",
    "output", "parsable", "partition", "requeue", "signal", "test-only", "time", "uid", "wait", "wrap",
)  # fmt: skip
"""Options of sbatch that Morph sets, or that would keep it from finding its jobs again."""

JOB_NAME_CHARACTERS = 128
"""The number of characters of a job's name that a comment has room for, with the other names and JSON's escapes.

Slurm refuses comments of more than 1024 bytes: ``_test_job_desc_fields`` in its ``src/slurmctld/job_mgr.c``.
"""
LOGIN_S = 300
"""Seconds that the login shell of a node may take before its first line."""


class SlurmSpec(Value):
    """The cloud file for Slurm. A job has one Slurm node or a part of it, and a worker on each of its devices."""

    partition: str = Field(pattern=WORD, description="partition of the jobs; usually one whose jobs may be preempted")
    account: str | None = Field(default=None, pattern=WORD)
    qos: str | None = Field(default=None, pattern=WORD)
    gres: str | None = Field(default=None, pattern=WORD, description="as for sbatch, such as gpu:a100:4; absent: none")
    num_gpus: int = Field(
        default=1, ge=0, le=MAX_DEVICES, description="devices of a job that Morph uses; 0: the processor, as one"
    )
    cpus: int = Field(default=1, ge=1, le=1024, description="processor cores of a job")
    memory: str | None = Field(default=None, pattern=r"^\d+[KMGT]?$", description="memory of a job, as for --mem")
    time_limit: str | None = Field(
        default=None, pattern=TIME, description="time limit of a job, as for sbatch --time; absent: the partition's"
    )
    successor_s: float = Field(
        default=900.0,
        ge=0,
        le=86400,
        description="time before a job's time limit at which its workers are left out, and another job is requested",
    )
    signal_s: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="sbatch --signal=USR2@this, for clusters that send it when they preempt (send_user_signal)",
    )
    grace_s: float | None = Field(
        default=None,
        ge=0,
        le=86400,
        description="from the signal to the end of a job that is preempted; absent: the partition's GraceTime, or "
        "KillWait where it has none",
    )
    container_image: str | None = Field(
        default=None, min_length=1, pattern=r"^\S+$", description="for srun --container-image (pyxis); absent: none"
    )
    sbatch_options: tuple[str, ...] = Field(default=(), description="further options, such as --constraint=a100")
    srun_options: tuple[str, ...] = Field(default=(), description="further options, such as --container-mounts=/data")
    max_jobs: int | None = Field(default=None, ge=1, le=100_000, description="most jobs of a run, waiting ones too")
    logs: str = Field(
        default=".morph-slurm",
        min_length=1,
        description="folder for the jobs' output, on a file system that they share",
    )
    usd_per_h: UsdPerHour | None = Field(default=None, description="price of a job per hour; absent: not known")

    @field_validator("sbatch_options", "srun_options")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not re.fullmatch(r"--[a-z][a-z-]*(=[^\r\n]*)?", option):
                raise ValueError(f"{option!r} is not --name or --name=value")
        return options

    @model_validator(mode="after")
    def _not_ours(self) -> Self:
        for option in self.sbatch_options:
            name = option.removeprefix("--").partition("=")[0]
            if known := next((known for known in OURS if known.startswith(name)), None):  # sbatch accepts abbreviations
                raise ValueError(f"sbatch_options: {option!r} is not yours to set: --{known} belongs to Morph")
        return self

    @property
    def num_devices(self) -> int:
        """The number of devices of a job, each of which has a worker."""
        return max(1, self.num_gpus)

    @property
    def size(self) -> str:
        """The name of the kind of job in reports and in the history."""
        return self.partition if self.gres is None else f"{self.partition}/{self.gres}"


def sbatch_command(spec: SlurmSpec, node: str, mark: Mark, logs: Path) -> list[str]:
    """Return the command that submits a node's job, with the script on standard input; ``logs``: for its output."""
    log = f"{logs}/".replace("%", "%%") + f"{node}-%j.log"
    given = {
        "partition": spec.partition, "account": spec.account, "qos": spec.qos, "gres": spec.gres,
        "mem": spec.memory, "time": spec.time_limit,
        "signal": None if spec.signal_s is None else f"USR2@{spec.signal_s}",
    }  # fmt: skip
    return [
        "sbatch", "--parsable", "--no-requeue", "--nodes=1", "--ntasks=1", f"--cpus-per-task={spec.cpus}",
        f"--job-name={node}", f"--comment={mark.text}", f"--output={log}",
        *(f"--{name}={value}" for name, value in given.items() if value is not None), *spec.sbatch_options,
    ]  # fmt: skip


def planned(
    spec: SlurmSpec,
    logs: Path,
    run: str,
    job: str,
    request: str,
    count: int,
    script: Callable[[str, int], Any] = lambda _node, _num_devices: "(the job script; it holds secrets)",
) -> list[dict[str, Any]]:
    """Return what a request for ``count`` devices would submit, in order; for the user, without secrets."""
    mark = Mark(run=run, job=job, request=request, devices=spec.num_devices)
    num_jobs = min(-(-count // spec.num_devices), spec.max_jobs or count)
    nodes = [vm_name(request, index) for index in range(num_jobs)]
    commands = [shlex.join(sbatch_command(spec, node, mark, logs)) for node in nodes]
    return [
        {"command": command, "standard input": script(node, spec.num_devices)}
        for node, command in zip(nodes, commands, strict=True)
    ]


def squeue_command(uid: int, *, as_json: bool) -> list[str]:
    """Return the command that lists a user's jobs, including recently ended jobs and jobs in hidden partitions."""
    form = ["--json"] if as_json else [f"--format={QUEUE_FORMAT}"]
    return ["squeue", f"--user={uid}", "--states=all", "--all", *form]


def job_script(start: NodeStart, spec: SlurmSpec, node: str, grace_s: float) -> str:
    """Return the script of a node's job: a job step, because only steps of a preempted job get SIGTERM.

    Its secret is on standard input, in no command line. Without a job's end time, Slurm is asked for it.
    """
    step = ["srun", "--ntasks=1", f"--cpus-per-task={spec.cpus}", "--export=ALL"]
    step += [f"--container-image={spec.container_image}"] if spec.container_image else []
    step += [*spec.srun_options, "sh", "-c", _leader(start, spec, node, grace_s)]
    ask = f'SLURM_TIME_FORMAT={TIME_FORMAT} squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e'
    lines = [
        "#!/bin/sh",
        f'SLURM_JOB_END_TIME="${{SLURM_JOB_END_TIME:-$({ask} 2>/dev/null)}}"; export SLURM_JOB_END_TIME',
        f"exec {shlex.join(step)} <<'END-OF-SECRET'",
        secret_of(start).rstrip("\n"),
        "END-OF-SECRET",
    ]
    return "\n".join(lines) + "\n"


def _leader(start: NodeStart, spec: SlurmSpec, node: str, grace_s: float) -> str:
    """Return the shell script of the step: only it gets Slurm's signals, which it records for the node's agent.

    Some clusters signal all descendants of the step's process, so the node runs in its own session, with a guard that
    ends it when this shell, which holds a pipe to the guard, is gone for any reason.
    """
    limits = json.dumps({"grace_s": grace_s, "ahead_s": spec.successor_s}).replace("}", ', "ends_s": %s}')
    known = {"{node}": node, "{address}": "", "{devices}": str(spec.num_devices)}
    _, _, script = static_node(start, "slurm")
    for name, value in known.items():
        script = script.replace(name, value)
    guard = (
        "(trap '' TERM; cat <&8 >/dev/null; kill -s TERM 0; i=0; "
        "while [ -e /proc/$$/exe ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done; "
        'tail -c 20000 "$d/log" >&7; t=$(cat "$d/elsewhere" 2>/dev/null); rm -rf "$d" ${t:+"$t"}; kill -s KILL 0) &'
    )
    in_session = f'd=$(dirname "$MORPH_SECRET_FILE")\n{guard}\necho $! $$ >"$d/pids"; exec 8<&- 7>&-\n{script}'
    named = 'echo $$ >"$0/session"; exec "$@"'
    lines = [
        "umask 077",
        f'd=$(mktemp -d "${{TMPDIR:-/tmp}}/morph-{node}-XXXXXX") || exit 1; cat >"$d/secret"; mkfifo "$d/alive"',
        'case "$SLURM_JOB_END_TIME" in ""|*[!0-9]*) ends=null ;; *) ends=$SLURM_JOB_END_TIME ;; esac',
        f'printf \'{limits}\' "$ends" >"$d/limits"',
        'end=; trap \'[ -e "$d/notice" ] || date +%s >"$d/notice"\' TERM USR2; trap end=1 USR1',
        's=$(command -v bash || command -v sh); MORPH_SECRET_FILE="$d/secret"; export MORPH_SECRET_FILE',
        'exec 9<>"$d/alive"',
        f'(setsid sh -c {shlex.quote(named)} "$d" "$s" -lc {shlex.quote(in_session)} '
        '7>&1 8<"$d/alive" 9>&- >"$d/log" 2>&1 </dev/null &)',
        f'i=0; until [ -s "$d/pids" ] || [ -n "$end" ] || [ $i -ge {LOGIN_S * 10} ]; do sleep 0.1; i=$((i+1)); done',
        'if [ ! -s "$d/pids" ]; then tail -c 20000 "$d/log"; echo "the login shell of this node did not begin"; '
        'i=0; until [ -s "$d/session" ] || [ $i -ge 600 ]; do sleep 0.1; i=$((i+1)); done; '
        'kill -s KILL -- -"$(cat "$d/session")"; rm -rf "$d"; exit 1; fi',
        'read -r guard node <"$d/pids"',
        'while [ -z "$end" ] && [ ! -e "$d/left" ] && [ -e "/proc/$node/exe" ]; do sleep 1 & wait $!; done',
        "exec 9>&-",
        'i=0; while [ -e "/proc/$guard/exe" ] && [ $i -lt 150 ]; do sleep 0.1; i=$((i+1)); done',
    ]
    return "\n".join(lines)

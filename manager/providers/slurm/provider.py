"""Jobs of Slurm: they are submitted by name, found again by their comments, and ended by their numbers.

Slurm's programs get only a small part of this process's environment, because Slurm stores it.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from manager.providers.interface.cloud import outcome
from manager.providers.interface.provider import (
    BOOT_LOG_CHARACTERS,
    ENDED,
    Capabilities,
    Misconfigured,
    Price,
    ProviderError,
    QuotaExceeded,
    RunName,
    Transient,
    Vm,
    not_ended,
    vm_name,
)
from manager.providers.slurm.answers import (
    JSON_SINCE,
    NEVER,
    ORDINARY,
    TIME_FORMAT,
    Job,
    Mark,
    error_of,
    job_number_in,
    jobs_in_json,
    jobs_in_text,
    setting_in,
    version_in,
    why_over,
)
from manager.providers.slurm.spec import SlurmSpec, sbatch_command, squeue_command
from morph.contract.waits import Backoff

PROGRAMS = ("sbatch", "squeue", "scancel")
CALL_TIMEOUT_S = 60.0
LOOKS = Backoff(0.5, 5.0)
"""Pauses (seconds) between checks whether jobs have ended; they grow, because all users share the queue."""
KEPT_VARIABLES = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "SLURM_CONF", "USER")
"""The part of this process's environment that Slurm's programs, and so the jobs, get."""
SIGNAL_ENDS = "USR1"
"""The signal that ends a node at once; see ``spec.py``."""


@dataclass(frozen=True)
class Said:
    """The exit code and output of a program."""

    code: int
    out: str
    err: str


def run_program(command: Sequence[str], given: str = "", timeout_s: float = CALL_TIMEOUT_S) -> Said:
    """Run one of Slurm's programs, for a bounded time. Ctrl-C does not reach it: it may be submitting a job.

    Transient: it did not end in time, and may have had its effect. Misconfigured: it cannot be run.
    """
    known = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    try:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            process_group=0,
            env={**known, "SLURM_TIME_FORMAT": TIME_FORMAT} if command[0] != "sbatch" else known,
        )
    except subprocess.TimeoutExpired as error:
        raise Transient(f"{command[0]} did not end within {timeout_s:g} s") from error
    except OSError as error:
        raise Misconfigured(f"{command[0]} cannot be run: {error.strerror}") from error
    return Said(done.returncode, done.stdout, done.stderr)


class SlurmProvider:
    """The ``Provider`` of Slurm jobs: a VM is a job, which exists from its submission on and waits in the queue first.

    ``script``: makes the script of a node's job, given the seconds from Slurm's signal to the kill.
    """

    def __init__(
        self,
        spec: SlurmSpec,
        name: RunName,
        script: Callable[[str, float], str],
        logs: Path,
        run: Callable[..., Said] = run_program,
        *,
        ending: str = "",
        delete_s: float = 180.0,
        uid: int | None = None,
    ) -> None:
        self._spec, self._name, self._script, self._logs, self._run = spec, name, script, logs, run
        self._ending, self._delete_s = ending, delete_s
        self._uid = os.getuid() if uid is None else uid
        self._stopped = threading.Event()
        self._version: tuple[int, ...] | None = None
        self._grace_s: float | None = spec.grace_s

    def request(
        self,
        request: str,
        count: int,
        max_vms: int | None = None,
        *,
        node_type: str = "",  # noqa: ARG002 (the jobs of a run are alike)
    ) -> tuple[Vm, ...]:
        """See ``Provider``. All jobs are submitted at once; Slurm decides when each begins."""
        most = count if max_vms is None else max_vms
        jobs = self._one_each(self._jobs())
        known = {job.name for job in jobs}
        there = [job for job in jobs if job.phase != "over" and _mark(job).request == request]
        missing = min(-(-count // self._spec.num_devices), most) - len(there)
        if self._spec.max_jobs is not None:
            missing = min(missing, room := self._spec.max_jobs - sum(job.phase != "over" for job in jobs))
            if room <= 0 and not there:
                raise QuotaExceeded(f"{request}: the run has its max_jobs ({self._spec.max_jobs}) jobs")
        refused: ProviderError | None = None
        free = (name for index in itertools.count() if (name := vm_name(request, index)) not in known)
        submitted: list[str] = []
        for node in itertools.islice(free, max(0, missing)):
            if self._stopped.is_set():
                break
            try:
                submitted.append(self._submit(node, request))
            except ProviderError as error:  # the others would be answered in the same way
                refused = error
                break
        if submitted:
            there = [job for job in self._seen(submitted) if job.phase != "over" and _mark(job).request == request]
        vms = sorted((self._vm(job) for job in there), key=lambda vm: int(vm.name.rpartition("-")[2]))
        return outcome(request, vms, {} if refused is None else {request: refused})

    def list(self) -> tuple[Vm, ...]:
        return tuple(self._vm(job) for job in self._one_each(self._jobs()) if job.phase != "over")

    def delete(self, names: Sequence[str]) -> None:
        """See ``Provider``: a node gets a signal to end, which is faster than scancel; scancel follows."""
        ours = {job.number: job for job in self._jobs() if job.phase != "over" and job.name in names}
        if not ours:
            return
        if running := [number for number, job in ours.items() if job.phase == "running"]:
            self._run(["scancel", f"--signal={SIGNAL_ENDS}", *running])
        wrong: ProviderError | None = None
        until_s, pauses = time.monotonic() + self._delete_s, LOOKS.pauses()
        while left := {job.number: job for job in self._jobs() if job.number in ours and job.phase != "over"}:
            said = self._run(["scancel", *left])
            if said.code:
                wrong = error_of("scancel", said.err)
            if time.monotonic() >= until_s:
                error = wrong or Transient(f"Slurm did not end it within {self._delete_s:g} s")
                raise not_ended({job.name: error for job in left.values()})
            time.sleep(next(pauses))

    def evict(self, name: str) -> bool:
        """See ``Provider``: ends a job as Slurm does, by SIGTERM, and by SIGKILL after KillWait."""
        job = next((job for job in self._jobs() if job.name == name and job.phase != "over"), None)
        if job is None:
            raise Misconfigured(f"job {name} is not there, or is not of this run: it is left alone")
        said = self._run(["scancel", job.number])
        if said.code:
            raise error_of("scancel", said.err)
        return True

    def boot_log(self, name: str) -> str:
        """See ``Provider``: how the node's job ended, and the end of its output."""
        text = ""
        with suppress(ProviderError, OSError):
            job = max((job for job in self._jobs() if job.name == name), key=lambda job: int(job.number), default=None)
            if job is not None:
                done = ["sacct", "--parsable2", "--noheader", "--allocations", "--format=State,ExitCode"]
                why = why_over(self._run([*done, f"--jobs={job.number}"]).out) or "+".join(sorted(job.states))
                text = f"{ENDED if job.phase == 'over' else ''}job {job.number} of Slurm: {why}\n"
                log = self._logs / f"{name}-{job.number}.log"
                text += log.read_text(encoding="utf-8", errors="replace")[-BOOT_LOG_CHARACTERS + len(text) :]
        return text

    def stop(self) -> None:
        """See ``Provider``: no job is submitted after the present one."""
        self._stopped.set()

    def dismantle(self) -> tuple[str, ...]:
        """See ``Provider``: there is nothing to end but the jobs."""
        self.delete([vm.name for vm in self.list()])
        return ()

    def price(self, node_type: str = "") -> Price | None:  # noqa: ARG002 (each costs the same)
        usd_per_h = self._spec.usd_per_h
        return None if usd_per_h is None else Price(usd_per_h=usd_per_h, source="the cloud file")

    def capabilities(self) -> Capabilities:
        return Capabilities(spot=True, max_vms=self._spec.max_jobs, notices="slurm", ending=self._ending)

    def runs(self) -> Mapping[str, str]:
        """Return the runs that have Slurm jobs, with the names of their (Morph) jobs."""
        return {mark.run: mark.job for job in self._all() if (mark := job.mark) is not None and job.phase != "over"}

    def _submit(self, node: str, request: str) -> str:
        mark = Mark(run=self._name.run, job=self._name.job, request=request, devices=self._spec.num_devices)
        try:
            self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Misconfigured(f"{self._logs}: the folder for logs cannot be made: {error.strerror}") from error
        command = sbatch_command(self._spec, node, mark, self._logs)
        said = self._run(command, self._script(node, self._grace()))
        if said.code:
            raise error_of("sbatch", said.err or said.out)
        return job_number_in(said.out)

    def _seen(self, submitted: Sequence[str]) -> tuple[Job, ...]:
        """Return the run's jobs. Misconfigured: jobs just submitted are not listed; they are ended, not lost."""
        jobs = self._all()
        if bare := [job.number for job in jobs if job.number in submitted and job.mark is None]:
            self._run(["scancel", *bare])
            raise Misconfigured("the cluster replaces the comments of jobs, by which Morph knows them: they are ended")
        if unseen := sorted({*submitted} - {job.number for job in jobs}, key=int):
            self._run(["scancel", *unseen])
            raise Misconfigured(f"squeue does not list jobs that were submitted ({', '.join(unseen)}): they are ended")
        return tuple(job for job in jobs if self._is_ours(job))

    def _grace(self) -> float:
        """Return the seconds from Slurm's signal to the end of a preempted job; 0 if Slurm does not report it."""
        if self._grace_s is None:
            grace_s = setting_in(self._shown("partition", self._spec.partition), "GraceTime")
            self._grace_s = grace_s or setting_in(self._shown("config"), "KillWait")
        return self._grace_s or 0.0

    def _shown(self, *what: str) -> str:
        with suppress(ProviderError):
            return self._run(["scontrol", "show", *what]).out
        return ""

    def _jobs(self) -> tuple[Job, ...]:
        return tuple(job for job in self._all() if self._is_ours(job))

    def _one_each(self, jobs: Sequence[Job]) -> tuple[Job, ...]:
        """Cancel the later of two jobs with one name: Slurm accepted the first after sbatch had timed out."""
        first: dict[str, Job] = {}
        for job in sorted(jobs, key=lambda job: (job.phase != "running", int(job.number))):
            if job.phase != "over":
                first.setdefault(job.name, job)
        later = {job.number for job in jobs if job.phase != "over" and first[job.name] is not job}
        if later:
            self._run(["scancel", *sorted(later, key=int)])
        return tuple(job for job in jobs if job.number not in later)

    def _is_ours(self, job: Job) -> bool:
        return job.mark is not None and (job.mark.run, job.mark.job) == (self._name.run, self._name.job)

    def _all(self) -> tuple[Job, ...]:
        """Return every job of this user that Slurm knows. Transient: Slurm does not answer."""
        if self._version is None:
            self._version = version_in(self._run(["squeue", "--version"]).out)
        if self._version >= JSON_SINCE:
            said = self._run(squeue_command(self._uid, as_json=True))
            with suppress(Transient):  # an unknown form of JSON: the text has the same form in all versions
                if not said.code:
                    return jobs_in_json(said.out, self._uid)
        said = self._run(squeue_command(self._uid, as_json=False))
        if said.code:
            error = error_of("squeue", said.err or said.out)
            raise error if isinstance(error, Misconfigured) else Transient(str(error))
        return jobs_in_text(said.out)

    def _vm(self, job: Job) -> Vm:
        mark = _mark(job)
        runs = job.phase == "running"
        return Vm(
            name=job.name,
            request=mark.request,
            provider="slurm",
            zone=job.nodes if runs and job.nodes else "unknown",
            size=self._spec.size,
            usd_per_h=self._spec.usd_per_h,
            paid_since_s=job.starts_s if runs else None,
            num_devices=mark.devices,
            waits=job.phase == "waiting",
            waits_for="" if job.reason in ORDINARY or job.phase != "waiting" else job.reason,
            never_begins=job.reason in NEVER and job.phase == "waiting",
        )


def _mark(job: Job) -> Mark:
    assert job.mark is not None, "asked only of the run's own jobs"
    return job.mark

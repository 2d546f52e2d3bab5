"""A Slurm in memory that answers the command lines of its programs in the forms of 22.05.8 or newer ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from manager.providers.interface.provider import RunName, Transient
from manager.providers.slurm.answers import QUEUE_HEADER
from manager.providers.slurm.provider import Said, SlurmProvider
from manager.providers.slurm.spec import SlurmSpec

UID = 1000
NOW_S = 1_795_761_970
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
LIMIT = (
    "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
    "accounting/QOS policy (job submit limit, user's size and/or time limits)"
)


@dataclass
class FakeJob:
    number: str
    name: str
    comment: str
    state: str = "PENDING"
    node: str = ""
    script: str = ""
    ends_s: int = NOW_S + 600
    reason: str = "None"
    command: tuple[str, ...] = ()


class FakeSlurm:
    """Room for some running jobs at once; others wait. ``submits``: further jobs are refused by the user's QOS."""

    def __init__(self, room: int = 1000, submits: int = 1000, version: str = "22.05.8", nodes: int = 1000) -> None:
        self.room, self.submits, self.version, self.nodes = room, submits, version, nodes
        self.jobs: dict[str, FakeJob] = {}
        self.calls: list[tuple[str, ...]] = []
        self.is_down = self.loses_answers = False
        self.refusal = ""
        self.unlisted: set[str] = set()
        self._number = 0

    def active(self) -> list[FakeJob]:
        return [job for job in self.jobs.values() if job.state in ("PENDING", "RUNNING")]

    def run(self, command: Sequence[str], given: str = "") -> Said:
        self.calls.append(tuple(command))
        program, *options = command
        if options == ["--version"]:
            return Said(0, f"slurm-wlm {self.version}\n", "")
        if self.is_down:
            return Said(1, "", DOWN.replace("slurm_load_jobs error", f"{program}: error"))
        said: Said = getattr(self, f"_{program}")(options, given)
        if program == "sbatch" and self.loses_answers:
            raise Transient("sbatch did not end within 60 s")
        return said

    def begin(self) -> None:
        """Begin waiting jobs as long as there is room."""
        running = sum(job.state == "RUNNING" for job in self.jobs.values())
        for job in self.jobs.values():
            if job.state == "PENDING" and running < self.room:
                job.state, job.node, running = "RUNNING", f"n{running % self.nodes}", running + 1

    def _sbatch(self, options: list[str], given: str) -> Said:
        if self.refusal:
            return Said(1, "", self.refusal)
        if len(self.active()) >= self.submits:
            return Said(1, "", LIMIT)
        self._number += 1
        known = dict(option.removeprefix("--").partition("=")[::2] for option in options)
        number = str(self._number)
        job = FakeJob(number, known["job-name"], known["comment"], script=given, command=tuple(options))
        self.jobs[number] = job
        self.begin()
        return Said(0, f"{number}\n", "")

    def _scancel(self, options: list[str], _given: str) -> Said:
        if options[0].startswith("--signal"):
            return Said(0, "", "")
        for number in options:
            if number in self.jobs and self.jobs[number].state in ("PENDING", "RUNNING"):
                self.jobs[number].state = "CANCELLED"
        self.begin()
        return Said(0, "", "")

    def _squeue(self, options: list[str], _given: str) -> Said:
        assert f"--user={UID}" in options
        assert {"--states=all", "--all"} <= {*options}, "without --all there are no jobs of hidden partitions"
        if "--json" in options:
            return Said(0, json.dumps({"errors": [], "jobs": [self._object(job) for job in self.jobs.values()]}), "")
        lines = [
            "|".join(
                (
                    job.number,
                    job.state,
                    "spot",
                    str(NOW_S),
                    str(job.ends_s),
                    job.node,
                    job.reason,
                    job.name,
                    job.comment,
                )
            )
            for job in self.jobs.values()
            if job.number not in self.unlisted
        ]
        return Said(0, "\n".join([QUEUE_HEADER, *lines, ""]), "")

    def _object(self, job: FakeJob) -> dict[str, object]:
        moments = {"start_time": NOW_S, "end_time": job.ends_s}
        return {
            "job_id": int(job.number),
            "name": job.name,
            "job_state": [job.state],
            "user_id": UID,
            "comment": job.comment,
            "partition": "spot",
            "nodes": job.node,
            "state_reason": job.reason,
            **{name: {"set": True, "infinite": False, "number": value} for name, value in moments.items()},
        }

    def _scontrol(self, options: list[str], _given: str) -> Said:
        if options == ["show", "config"]:
            return Said(0, "KillWait                = 30 sec\nMinJobAge               = 300 sec\n", "")
        return Said(0, "PartitionName=spot\n   DefaultTime=NONE GraceTime=8 Hidden=NO\n", "")

    def _sacct(self, _options: list[str], _given: str) -> Said:
        return Said(1, "", "Slurm accounting storage is disabled\n")


SPEC = SlurmSpec(partition="spot", usd_per_h=0.25)


def provider(slurm: FakeSlurm, logs: object, run: str = "tiny-1", spec: SlurmSpec = SPEC) -> SlurmProvider:
    return SlurmProvider(
        spec,
        RunName(run=run, job="tiny"),
        lambda node, grace_s: f"#!/bin/sh\nexec sleep {grace_s:g} # {node}\n",
        logs,  # type: ignore[arg-type]
        slurm.run,
        ending=f"morph cloud reconcile slurm.yaml --run {run} --job tiny",
        delete_s=5.0,
        uid=UID,
    )

"""A real Slurm on this machine: one node with more processors than exist, and a partition whose owner preempts.

It lives in one folder and on ports of its own. Jobs are ended first, then its daemons by their pid files.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from manager.host.processes import wait_gone
from tests.waiting import BOUND_S, poll_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
NODE = socket.gethostname().partition(".")[0]
CPUS = 16
GRACE_S = 12
CONF = """\
ClusterName=morph
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={d_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=20000 State=UNKNOWN
PartitionName=spot Nodes={node} Default=YES PriorityTier=1 PreemptMode=CANCEL GraceTime={grace_s} MaxTime=60
PartitionName=owner Nodes={node} PriorityTier=10 PreemptMode=OFF MaxTime=60
"""


def why_none() -> str:
    """Return why no Slurm can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "a Slurm of its own needs root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"{missing[0]} is not installed: `make test-slurm` installs it" if missing else ""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class RealSlurm:
    """A Slurm that ``start`` starts and ``close`` ends; clients find it by ``environment``."""

    def __init__(self, folder: Path, grace_s: int = GRACE_S) -> None:
        self.folder = folder
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        folder.chmod(0o755)  # munged requires that all users can reach its socket, but not change it
        ports = {"ctld_port": _free_port(), "d_port": _free_port()}
        known = {"folder": folder, "node": NODE, "cpus": CPUS, "grace_s": grace_s}
        (folder / "slurm.conf").write_text(CONF.format(**ports, **known), encoding="utf-8")
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        files = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self.call("munged", "--force", *munge)
        self.start_controller()
        self.call("slurmd", "-N", NODE)
        poll_until(lambda: self.answers("idle"), f"an idle node of the Slurm in {self.folder}")

    def answers(self, state: str) -> bool:
        try:
            return state in self.call("sinfo", "--noheader", "--format=%T")
        except AssertionError:  # it does not listen yet
            return False

    def start_controller(self) -> None:
        self.call("slurmctld")

    def stop_controller(self) -> None:
        self._end("slurmctld")

    def call(self, *command: str, given: str = "") -> str:
        with tempfile.TemporaryFile("w+") as out:  # a daemon keeps its output open, so that a pipe would never end
            known = {**os.environ, **self.environment}
            done = subprocess.run(command, env=known, input=given, stdout=out, stderr=out, text=True, timeout=BOUND_S)
            out.seek(0)
            said = out.read()
        assert done.returncode == 0, (command, said)
        return said

    def owner(self, cpus: int) -> str:
        """Submit an owner's job, for which others are preempted; return its number."""
        options = ["--parsable", "--partition=owner", f"--cpus-per-task={cpus}", "--output=/dev/null"]
        return self.call("sbatch", *options, given="#!/bin/sh\nexec sleep 3600\n").strip()

    def states(self) -> dict[str, str]:
        """Return the state of each job in the queue, by name."""
        lines = self.call("squeue", "--noheader", "--format=%j %T").splitlines()
        return dict(line.rsplit(" ", 1) for line in lines)

    def clear(self) -> None:
        """Cancel every job, and wait until none is left."""
        self.call("scancel", "--user=root")
        poll_until(lambda: not self.states(), "an empty queue")

    def close(self) -> None:
        with suppress(Exception):
            self.clear()
        for name in ("slurmd", "slurmctld", "munge"):
            self._end(name)
        steps = list(self._processes())  # a job that has left the queue may still have processes that are ending
        for step in steps:
            with suppress(psutil.NoSuchProcess):
                step.kill()
        wait_gone(steps, BOUND_S)

    def _processes(self) -> Iterator[psutil.Process]:
        conf = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # psutil cannot read the environment of a process with a title
                known = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if process.name() == "slurmstepd" and conf in known:
                    yield from (process, *process.children(recursive=True))

    def _end(self, name: str) -> None:
        try:
            process = psutil.Process(int((self.folder / f"{name}.pid").read_text()))
        except (OSError, ValueError, psutil.NoSuchProcess):
            return
        with suppress(psutil.NoSuchProcess):
            process.terminate()
        for left in wait_gone([process], BOUND_S):
            left.kill()

"""A whole run on the virtual Azure, with VMs that are taken, until nothing is left; and checks of its bill."""

from __future__ import annotations

import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from manager.report.journal_reader import read_report
from manager.report.values import RunReport
from morph.checkpoint.manifest import complete_versions, read_manifest
from tests.cloud.hosts import ROOT
from tests.cloud.image import bare_python
from tests.cloud.virtual_azure import CLOUD_FILE, VirtualAzure
from tests.system.exposure import RECORDED
from tests.system.held import HeldJob
from tests.waiting import PATIENCE, START_S

JOB = ROOT / "configs" / "jobs" / "tiny_gpt.py"
LINE_BOUND_S = 400.0 * PATIENCE
END_BOUND_S = 400.0 * PATIENCE
STOPPED = 130
READY, ALL_READY = re.compile(r"(\S+) is ready"), re.compile(r"(all \d+ workers are|the one worker is) ready")
GONE = re.compile(r"(?<=is left on )\S+(?=: it may go)|\S+(?= was lost)")


@dataclass(frozen=True)
class Taking:
    """A VM that is taken once this many steps are decided and all VMs train.

    ``notice_s``: the notice; None for none. ``injected``: ``morph inject`` takes the VM, beside the run on the
    manager's host; otherwise Azure does.
    """

    step: int
    notice_s: float | None
    injected: bool = False


@dataclass
class Taken:
    vm: str
    taking: Taking
    version: int


@dataclass
class Life:
    """One run.

    ``directory``: an existing folder on storage that every host sees. ``steps_after``: the run is stopped, as by
    Ctrl-C, this many steps after the end of the last VM was reported or, with ``whole``, after the VM was replaced;
    None: the run continues to its last step. ``on_line``: called with each line of the run's output. ``secrets_path``:
    a file for the run's secrets. ``step_s``: the least time of a step, most of it asleep, because VMs take time to come
    and to go. ``code``: a folder for the job's code, in which other jobs may have been before. ``uid``: the user who
    runs the manager and, on VMs, the job; root by default. ``vms``: further settings.
    """

    azure: VirtualAzure
    directory: Path
    profile: Path
    steps: int
    keep: int
    takings: Sequence[Taking]
    seed: int = 0
    checkpoint_every: int = 20
    uid: int = 0
    step_s: float = 0.0
    code: Path | None = None
    steps_after: int | None = None
    whole: bool = True
    secrets_path: Path | None = None
    vms: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    on_line: Callable[[dict[str, Any]], None] = lambda _line: None
    taken: list[Taken] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    output: list[str] = field(default_factory=list)
    exit_code: int | None = None

    def __post_init__(self) -> None:
        self._chooser = random.Random(self.seed)
        self._stop_at: int | None = None

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def write_files(self) -> Path:
        """Write the job file and the cloud file; return the path of the job file."""
        (self.directory / "azure.yaml").write_text(json.dumps(CLOUD_FILE))  # JSON is YAML
        job = f"{JOB}:job"
        if self.step_s:
            code = self.code or self.directory / "code"
            job = HeldJob(code, self.directory / "gate", self.steps, step_s=self.step_s, code=code).path
        document = {
            "job": {"code": job, "profile": str(self.profile), "steps": self.steps, "run_dir": "run"},
            "vms": {
                "kind": "azure",
                "cloud": "azure.yaml",
                "keep": self.keep,
                "memory_bytes": 2_000_000_000,
                "device": "cpu",
                "address": self.azure.manager_address,
                "shared_storage": True,
                **({"job_uid": self.uid} if self.uid else {}),
                "environment": {"python": bare_python(self.directory / "image")},
                **self.vms,
            },
            "policy": {
                "checkpoint_every_steps": self.checkpoint_every,
                "start_patience_s": START_S,
                "heartbeat_timeout_s": 5.0 * PATIENCE,
            },
        }
        path = self.directory / "job.yaml"
        path.write_text(json.dumps(document, indent=1))
        return path

    def live(self) -> RunReport:
        """Run to the end; raise an error if there is no output for ``LINE_BOUND_S``."""
        waiting = deque(self.takings)
        self._manage(["run", str(self.write_files())], waiting)
        assert self.exit_code == (0 if self._stop_at is None else STOPPED), self.told()
        assert not waiting, f"the run was over before {waiting}"
        return read_report(self.run_dir)

    def _manage(self, arguments: Sequence[str], waiting: deque[Taking]) -> None:
        program = ["-m", "morph.cli.main"] if self.secrets_path is None else ["-c", RECORDED, str(self.secrets_path)]
        command = [sys.executable, *program, *arguments, "--log-format", "json"]
        if self.uid:
            os.chown(self.directory, self.uid, self.uid)
            number = str(self.uid)
            command = ["setpriv", "--reuid", number, "--regid", number, "--clear-groups", "--", *command]
        with self.azure.popen(command, **self.environment) as process:
            for line in self._lines(process):
                whole = self._is_whole(line)
                if waiting and whole and line["version"] >= waiting[0].step:
                    taking = waiting.popleft()
                    vm = self._chooser.choice(sorted(self.azure.region.living()))
                    if self._inject(vm, taking) if taking.injected else self.azure.region.take(vm, taking.notice_s):
                        self.taken.append(Taken(vm, taking, line["version"]))
                elif not waiting and self.steps_after is not None and (whole if self.whole else self._all_known()):
                    self._stop_at = line["version"] + self.steps_after if self._stop_at is None else self._stop_at
                    if line["version"] >= self._stop_at:
                        psutil.Process(process.pid).children()[0].send_signal(signal.SIGINT)
                        self.steps_after = None
                self.on_line(line)
            self.exit_code = process.wait(END_BOUND_S)

    def _inject(self, vm: str, taking: Taking) -> bool:
        options = ("--vm", vm, "--notice", f"{taking.notice_s or 0:g}s")
        with self.azure.popen((sys.executable, "-m", "morph.cli.main", "inject", str(self.run_dir), *options)) as given:
            told, _ = given.communicate(timeout=END_BOUND_S)
        self.output.append(told)
        return given.returncode == 0 and f"{vm}  taken" in told

    def told(self) -> str:
        """Return all output of the run and its VMs, for a failed test."""
        hosts = [f"== {vm}\n{text[-2000:]}" for vm, text in self.azure.logs.items()]
        return "\n".join([*self.output[-60:], *hosts, *self.azure.region.troubles])

    def _is_whole(self, line: dict[str, Any]) -> bool:
        """Return whether the run trains, all VMs are ready, and all VMs to be taken are gone."""
        self.ready |= set(READY.findall(line["sentence"]))
        self.gone |= set(GONE.findall(line["sentence"]))
        living = self.azure.region.living()
        if ALL_READY.search(line["sentence"]):  # the run reports nothing at the start about VMs that were ready before
            self.ready |= set(living)
        noticed = {taken.vm for taken in self.taken if taken.taking.notice_s is not None}
        all_there = len(living) == self.keep and set(living) <= self.ready and noticed <= self.gone
        return line["phase"] == "training" and all_there

    def _all_known(self) -> bool:
        """Return whether the run has reported the end of every VM that was taken."""
        return {taken.vm for taken in self.taken} <= self.gone

    def _lines(self, process: subprocess.Popen[str]) -> Any:
        arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read() -> None:
            assert process.stdout is not None
            for text in process.stdout:
                arrived.put(text.rstrip("\n"))
            arrived.put(None)

        threading.Thread(target=read, daemon=True).start()
        while True:
            try:
                text = arrived.get(timeout=LINE_BOUND_S)
            except queue.Empty:
                process.kill()
                raise AssertionError(f"nothing was told for {LINE_BOUND_S:g} s: {self.told()}") from None
            if text is None:
                return
            self.output.append(text)
            if text.startswith("{"):
                yield json.loads(text)


def digests(run_dir: Path) -> dict[str, str]:
    """Return the sha256 of every unit of the newest checkpoint."""
    url = str(run_dir / "checkpoints")
    return {entry.unit: entry.sha256 for entry in read_manifest(url, complete_versions(url)[-1]).units}

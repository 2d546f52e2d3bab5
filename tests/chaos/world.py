"""One run of the real command, as a user starts it: folder, processes, journal and clock."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import psutil

from manager.host.processes import wait_gone
from manager.report.journal_reader import read_report
from manager.report.values import RunReport
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.errors import MorphError
from tests.chaos.processes import MARK, Family, end_all, line_of, own_mark
from tests.small_disk import may_mount, small_disk
from tests.system.commands import COMMAND, ROOT, environment_of_commands
from tests.waiting import BOUND_S, PATIENCE

JOB = ROOT / "configs/jobs/tiny_gpt.py"
NUM_VMS = 3
POLICY = "{{checkpoint_every_steps: {0.checkpoint_every}, heartbeat_timeout_s: {1}, takeover_patience_s: 120}}"
CLUSTER = f"vms: {{{{keep: {NUM_VMS}, launcher: {{0.launcher}}}}}}\npolicy: {POLICY}\n"
READING = '        """Return ``tokens`` and ``targets``, each [length]."""\n'
OWNERS = ("manager.engine.on_ray.vm_host", "manager.engine.on_processes.process_host")
DISK = "256m"
MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """The job, with its profile and number of steps.

    ``launcher``: what runs the local VMs. ``read_s``: extra time for reading a sample of ``JOB``, so that a few steps
    last for many faults. ``job``: the file of the job.
    """

    profile: Path
    steps: int
    launcher: Literal["ray", "processes"] = "ray"
    read_s: float = 0.0
    checkpoint_every: int = 15
    job: Path = JOB


@dataclass(frozen=True)
class Size:
    """The size of a run: memory, handles and threads of its manager, and the run directory on disk."""

    version: int
    rss_mib: float
    num_handles: int
    num_threads: int
    disk_mib: float


class World:
    """A run in a folder of its own; a context manager that leaves no process and, unless kept, no file of the run.

    ``disk``: a small disk for the run directory; None if the run is kept, or if this user may not mount one.
    """

    def __init__(self, setting: Setting, folder: Path, *, is_kept: bool = False) -> None:
        self._rest = ExitStack()
        may = may_mount() and not is_kept
        self.disk = self._rest.enter_context(small_disk(folder / "disk", DISK)) if may else None
        self.folder, self.run_dir = folder, folder / "disk" / "run"
        self.family = Family(mark := own_mark())
        self.steps, self._on_ray = setting.steps, setting.launcher == "ray"
        self._process: subprocess.Popen[bytes] | None = None
        self._version, self._ready = 0, set[int]()
        self._before: int | None = None
        self._temporary = Path(tempfile.mkdtemp(prefix="c"))  # short, because Ray puts sockets into it
        self._clock = folder / "clock"
        self._clock.write_bytes(struct.pack("q", 0))
        self.job = folder / "job" / "job.py"
        self.job.parent.mkdir(exist_ok=is_kept)
        text = setting.job.read_text(encoding="utf-8")
        if setting.read_s:
            assert READING in text
            text = text.replace(READING, f"{READING}        time.sleep({setting.read_s})\n")
            text = text.replace("import torch\n", "import time\n\nimport torch\n", 1)
        self.job.write_text(text, encoding="utf-8")
        (folder / "cluster.yaml").write_text(CLUSTER.format(setting, 4 * PATIENCE), encoding="utf-8")
        self._arguments = (
            *("run", f"{self.job}:job", "--profile", setting.profile, "--cluster", folder / "cluster.yaml"),
            *("--steps", setting.steps, "--run-dir", self.run_dir, "--plain"),
        )
        given = {MARK: mark, "TMPDIR": str(self._temporary), "CHAOS_CLOCK": str(self._clock)}
        self._environment = {**environment_of_commands(), **given, **_preloaded(folder)}

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.family.look()
        end_all(left)
        wait_gone(left, BOUND_S)
        self._rest.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def start(self) -> None:
        """Start the command, for the first time or again."""
        self._before = self._last_line()
        with (self.folder / "output.log").open("ab") as output:
            self._process = subprocess.Popen(
                [*COMMAND, *map(str, self._arguments)],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def has_begun(self) -> bool:
        """Return whether the command, as started last, has read the job and written to the journal."""
        line = self._last_line()
        return self._before is not None and line is not None and line > self._before

    def _last_line(self) -> int | None:
        """Return the number of the journal's last line, condensed or not, 0 before the first; None if unreadable."""
        if not (self.run_dir / "journal.sqlite").exists():
            return 0
        rows = self._journal("SELECT max(seq) FROM sqlite_sequence WHERE name = 'entries'")
        return (rows[0][0] or 0) if rows else None

    @property
    def manager(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def workers(self) -> list[psutil.Process]:
        """Return the workers: Ray's once they begin, plain processes once the journal has their process ids."""
        self._note_ready()
        return [found for found in self.family.look() if found.pid in self._ready or "ray::Worker" in line_of(found)]

    def _note_ready(self) -> None:
        """Record which processes are workers before the journal's line about them is condensed."""
        query = "SELECT json_extract(payload_json, '$.answer.pid') FROM entries WHERE kind = 'event'"
        self._ready |= {
            pid for (pid,) in self._journal(f"{query} AND json_extract(payload_json, '$.answer.kind') = 'ready'")
        }

    def vms(self) -> list[psutil.Process]:
        """Return the first process of each VM: a raylet of Ray, or the worker."""
        return self.family.named("raylet/raylet", "morph_vm_") if self._on_ray else self.workers()

    def owners(self) -> list[psutil.Process]:
        """Return the process that owns the VMs; its forks have the same command line."""
        found = [process for part in OWNERS for process in self.family.named(part)]
        return [process for process in found if process.ppid() not in {owner.pid for owner in found}]

    def ended(self) -> int | None:
        """Return the exit code of the command; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def kill_manager(self) -> bool:
        """Send SIGKILL to the command alone; return whether this ended it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        return self._process.wait(BOUND_S) == -signal.SIGKILL

    def stop(self) -> int:
        """Stop the run as Ctrl-C does; return the exit code once it is saved."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(BOUND_S)

    def set_clock(self, moved_s: int) -> None:
        """Set the wall clock of every process of the run this far ahead of the machine's clock."""
        with self._clock.open("r+b") as clock:
            clock.write(struct.pack("q", moved_s))

    def version(self) -> int:
        """Return the newest decided version in the journal, or the last one seen while lines are condensed."""
        query = "SELECT json_extract(payload_json, '$.version') FROM entries WHERE kind = 'decision'"
        rows = self._journal(f"{query} ORDER BY sequence DESC LIMIT 1")
        self._version = int(rows[0][0]) if rows else self._version
        self._note_ready()
        return self._version

    def size(self) -> Size:
        """Return the present size of the run. Raises psutil.Error if the manager has just ended."""
        manager = self.manager
        files = [path.stat().st_size for path in self.run_dir.rglob("*") if path.is_file()]
        with manager.oneshot():
            rss_mib = manager.memory_info().rss / MIB
            return Size(self.version(), rss_mib, manager.num_fds(), manager.num_threads(), sum(files) / MIB)

    def status_cpu_s(self) -> float:
        before = os.times()
        self._status()
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    def _status(self) -> None:
        subprocess.run(
            [*COMMAND, "status", str(self.run_dir)],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            timeout=BOUND_S,
        )

    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def digests(self) -> dict[str, str]:
        """Return the sha256 of every unit of the last version, or nothing if that version does not exist."""
        url = str(self.checkpoints())
        try:
            if self.steps not in complete_versions(url):
                return {}
            return {entry.unit: entry.sha256 for entry in read_manifest(url, self.steps).units}
        except MorphError:
            return {}

    def _journal(self, query: str) -> list[tuple[int, ...]]:
        """Return rows of the journal, or none if it cannot be read."""
        if not (self.run_dir / "journal.sqlite").exists():
            return []
        try:
            uri = f"{(self.run_dir / 'journal.sqlite').as_uri()}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True, timeout=1.0)) as connection:
                return connection.execute(query).fetchall()
        except sqlite3.Error:
            return []

    def left(self) -> list[str]:
        """Return processes and folders of the run that still exist a moment after the run and the next command."""
        self._status()
        until_s = time.monotonic() + BOUND_S
        while found := self._left():
            if time.monotonic() > until_s:
                break
            time.sleep(0.2)
        return found

    def _left(self) -> list[str]:
        processes = [f"process {process.pid}: {line_of(process)[:100]}" for process in self.family.look()]
        return processes + [
            f"{folder} with {len(list(folder.rglob('*')))} files" for folder in self._temporary.glob("morph-*")
        ]

    def story(self) -> str:
        """Return the end of the output and the journal's path, both kept as the disk is removed with the run."""
        kept = self.folder / "run"
        shutil.copytree(self.run_dir, kept, ignore_dangling_symlinks=True)
        output = (self.folder / "output.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([*output[-60:], f"journal: {kept / 'journal.sqlite'}"])

    def report(self) -> RunReport:
        return read_report(self.run_dir)


def _preloaded(folder: Path) -> dict[str, str]:
    """Build the library for a clock that can be set; None without a compiler."""
    compiler, library = shutil.which("gcc"), folder / "clock.so"
    if compiler is None:
        return {}
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": os.fspath(library)}

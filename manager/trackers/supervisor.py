"""Starts the processes of trackers and callbacks, reports each of their errors once, and ends them in time.

Training never waits for them, because they read the journal by themselves. A process that died, or that ended itself
because it hung, is restarted a few times. At the end of a run each has ``END_S`` to report the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from manager.host.environment import handed_on
from manager.trackers.process import Watching

END_S, SAMPLES_END_S = 20.0, 120.0
MOST_STARTS = 5
LIMIT_OF_A_CALL_S, LIMIT_OF_A_SAMPLE_S = 60.0, 3600.0
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
OWN_VARIABLES = {"wandb": ("WANDB_", "NETRC", *PROXIES), "mlflow": ("MLFLOW_", *PROXIES), "notify": PROXIES}
"""The prefixes of a process's own variables, credentials included, which it gets in addition to harmless ones."""


def environment_of(kind: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return a tracker's part of the manager's environment; a callback gets only the harmless part."""
    prefixes = OWN_VARIABLES.get(kind, ())
    own = {name: value for name, value in environment.items() if prefixes and name.upper().startswith(prefixes)}
    return handed_on(environment) | own


class Watchers:
    """All trackers and callbacks of a run, while the context is open; ``watching``: one value for each process.

    ``tell``: shows the user a sentence. ``end_s``: the time that each has at the end.
    """

    def __init__(self, watching: tuple[Watching, ...], tell: Callable[[str], None], end_s: float = END_S) -> None:
        self._tell, self._end_s = tell, end_s
        self._ending = threading.Event()
        self._watchers = [_Watcher(watched, tell, self._ending) for watched in watching]

    def __enter__(self) -> Self:
        for watcher in self._watchers:
            watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        begun_s = time.monotonic()
        for watcher in self._watchers:
            watcher.end()
        for watcher in self._watchers:
            samples = watcher.watching.kind == "samples"
            watcher.join(begun_s + (max(self._end_s, SAMPLES_END_S) if samples else self._end_s))


class _Watcher(threading.Thread):
    def __init__(self, watching: Watching, tell: Callable[[str], None], ending: threading.Event) -> None:
        super().__init__(name=f"morph-{watching.kind}", daemon=True)
        self.watching, self._say, self._ending = watching, tell, ending
        self._name = watching.kind if watching.kind != "callback" else f"callback {watching.target}"
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._given_up = False

    def run(self) -> None:
        """Start the process, restart it if it ends too early, and pass on its messages."""
        for left in reversed(range(MOST_STARTS)):
            with self._start() as process:
                assert process.stdout is not None
                for line in process.stdout:
                    self._tell_once(line.strip())
                code = process.wait()
            if code == 0 or self._given_up:
                return
            if not left:
                self._say(f"note: {self._name} ended {MOST_STARTS} times and is left out; see {self._log}")

    def end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._tell_end(self._process)

    def join(self, deadline_s: float | None = None) -> None:
        """Wait for the process to end, and kill it if the time is up."""
        super().join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        if self.is_alive():
            self._say(f"note: {self._name} did not end in time and is killed; the run itself is not affected")
            with self._lock:
                self._given_up = True
                if self._process is not None:
                    self._process.kill()
            super().join()

    @property
    def _command(self) -> list[str]:
        if self.watching.kind != "samples":
            return [sys.executable, "-m", "manager.trackers.process"]
        run_dir = str(self.watching.run_dir)
        return [sys.executable, "-m", "morph.cli.main", "sample", run_dir, "--while-open"]

    @property
    def _log(self) -> Path:
        number = f"-{self.watching.number}" if self.watching.kind == "callback" else ""
        return self.watching.run_dir / "trackers" / f"{self.watching.kind}{number}.log"

    def _start(self) -> subprocess.Popen[str]:
        with self._lock:
            self._log.parent.mkdir(mode=0o700, exist_ok=True)
            with open(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:  # noqa: PTH123
                process = self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment_of(self.watching.kind, os.environ) | self.watching.variables,
                    start_new_session=True,  # Ctrl-C must not reach it: it still has to report how the run ended
                )
            if self._given_up:
                process.kill()
            self._write(process, self.watching.model_dump_json())
            if self._ending.is_set():
                self._tell_end(process)
            return process

    def _tell_end(self, process: subprocess.Popen[str]) -> None:
        if process.stdin is not None and not process.stdin.closed:
            self._write(process, "end")
            with suppress(OSError):
                process.stdin.close()

    def _write(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        with suppress(OSError):  # the process is dead
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def _tell_once(self, sentence: str) -> None:
        if sentence and sentence not in self._told:
            self._told.add(sentence)
            self._say(f"note: {self._name}: {sentence}; training continues")

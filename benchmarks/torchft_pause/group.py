"""The replicas of a run: started, killed and watched from one process that has no threads of torchft's."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from replica import Commit, Setting, serve_lighthouse, train

START_TIMEOUT_S = 60.0


@dataclass
class Replica:
    """A running replica and what it committed."""

    pid: int
    lane: Connection
    commits: list[Commit] = field(default_factory=list)


class Group:
    """A lighthouse and its replicas, all of them forks of this process."""

    def __init__(self, setting: Setting, num_replicas: int, step_s: float, directory: Path) -> None:
        self._setting, self._step_s, self._directory = setting, step_s, directory
        self.replicas: dict[int, Replica] = {}
        self._dead: list[int] = []
        self._num_started = 0
        ours, theirs = Pipe()
        self._lighthouse_pid = _fork(
            lambda: serve_lighthouse(setting, num_replicas // 2, theirs, directory / "lighthouse.log")
        )
        theirs.close()
        self._lighthouse = ours
        if not ours.poll(START_TIMEOUT_S):
            raise TimeoutError(f"the lighthouse did not start within {START_TIMEOUT_S:g} s")
        self.address: str = ours.recv()
        for index in range(num_replicas):
            self.start(index)

    def start(self, index: int) -> None:
        """Start replica ``index``, under a new name."""
        ours, theirs = Pipe()
        name, log = f"r{self._num_started}_{index}", self._directory / f"replica{index}.log"
        self._num_started += 1
        inherited = [self._lighthouse, ours, *(replica.lane for replica in self.replicas.values())]

        def body() -> None:
            for lane in inherited:
                lane.close()
            train(self._setting, name, self.address, self._step_s, theirs, log)

        pid = _fork(body)
        theirs.close()
        self.replicas[index] = Replica(pid, ours)

    def kill(self, indices: list[int]) -> float:
        """End replicas with SIGKILL, all at once; returns when (wall-clock seconds)."""
        doomed = [self.replicas.pop(index) for index in indices]
        now_s = time.time()
        for replica in doomed:
            os.kill(replica.pid, signal.SIGKILL)
        for replica in doomed:
            os.waitpid(replica.pid, 0)
            replica.lane.close()
        return now_s

    def watch(self, until: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Take commits in until a condition holds.

        Raises:
            TimeoutError: it did not within ``timeout_s``.
        """
        end_s = time.monotonic() + timeout_s
        while not until():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"waited {timeout_s:g} s for {what}")
            by_lane = {id(replica.lane): replica for replica in self.replicas.values()}
            for lane in wait([replica.lane for replica in self.replicas.values()], min(left_s, 0.5)):
                try:
                    by_lane[id(lane)].commits.append(lane.recv())  # type: ignore[union-attr]
                except EOFError:
                    raise RuntimeError(f"a replica ended by itself: {self._last_words()}") from None

    def _last_words(self) -> str:
        """The end of the newest replica's log."""
        logs = sorted(self._directory.glob("replica*.log"), key=lambda path: path.stat().st_mtime)
        return logs[-1].read_text(errors="replace")[-600:] if logs else "nothing was logged"

    def close(self) -> None:
        """End every process."""
        for replica in self.replicas.values():
            os.kill(replica.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._lighthouse_pid, signal.SIGKILL)
        for pid in (*(replica.pid for replica in self.replicas.values()), self._lighthouse_pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.replicas.clear()


def _fork(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)

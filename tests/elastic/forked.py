"""``morph elastic`` and its workers as forks of a process that has loaded torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.forked_scripts import ForkedScript
from tests.members import FORKS


class ForkedJob:
    """The part of ``Popen`` that tests need for a ``morph elastic``."""

    def __init__(
        self, options: Sequence[str], command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self._process = FORKS.Process(target=_elastic, args=(options, command, dict(environment), log))
        self._process.start()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("morph elastic", timeout)
        return self._process.exitcode


def _elastic(options: Sequence[str], command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    from morph.cli.main import main
    from morph.elastic import launcher

    os.environ.clear()
    os.environ.update(environment)
    with log.open("a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    launcher._process = ForkedScript  # type: ignore[assignment]
    sys.argv = ["morph", "elastic", *options, "--", *command]
    main()

"""Another process asks a run to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager.run_dir import RunDir, RunFacts, ask_to_stop, holder_of, wait_for_end
from morph.contract.errors import RunDirError, WaitTimeout
from tests.waiting import BOUND_S

FACTS = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=6)
MANAGER = """
import signal, sys
from pathlib import Path
from manager.host.signals import STOP_SIGNAL
from manager.run_dir import RunDir, RunFacts
facts = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=6)
signal.pthread_sigmask(signal.SIG_BLOCK, [STOP_SIGNAL])
with RunDir(Path(sys.argv[1]), facts):
    print("held", flush=True)
    signal.sigwait([STOP_SIGNAL])
    print("asked", flush=True)
"""


@pytest.fixture
def managed(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    run_dir = tmp_path / "run"
    manager = subprocess.Popen([sys.executable, "-c", MANAGER, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert manager.stdout.readline() == "held\n"
    yield run_dir, manager
    manager.kill()
    manager.wait(BOUND_S)
    manager.stdout.close()


def test_a_running_manager_is_asked_and_awaited(managed: tuple[Path, subprocess.Popen[str]]) -> None:
    run_dir, manager = managed
    assert holder_of(run_dir) == manager.pid
    assert ask_to_stop(run_dir) == manager.pid
    wait_for_end(run_dir, 100.0)
    assert holder_of(run_dir) is None
    assert manager.stdout.readline() == "asked\n"


def test_waiting_for_a_run_that_continues_is_bounded(managed: tuple[Path, subprocess.Popen[str]]) -> None:
    run_dir, _ = managed
    with pytest.raises(WaitTimeout, match="it goes on"):
        wait_for_end(run_dir, 0.2)


def test_a_run_without_a_manager_gets_no_request(
    managed: tuple[Path, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, manager = managed
    manager.send_signal(signal.SIGKILL)  # the manager's lock goes with it; the content of the file stays
    manager.wait(BOUND_S)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a process was sent a signal"))
    with pytest.raises(RunDirError, match="is not running"):
        ask_to_stop(run_dir)
    with RunDir(run_dir, FACTS):
        assert holder_of(run_dir) == os.getpid()

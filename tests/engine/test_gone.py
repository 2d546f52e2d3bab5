"""The end of killed processes is awaited, even of unreaped ones and of others' children."""

from __future__ import annotations

import subprocess
import sys

import psutil

from manager.host.processes import lives, session_of, wait_gone
from tests.waiting import BOUND_S

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_processes_that_were_killed_are_gone_before_they_are_reaped() -> None:
    with subprocess.Popen(SLEEP) as first, subprocess.Popen(SLEEP) as second:
        known = [psutil.Process(first.pid), psutil.Process(second.pid)]
        first.kill()
        second.kill()
        assert wait_gone(known, BOUND_S) == []


def test_processes_that_were_reaped_are_gone() -> None:
    with subprocess.Popen(SLEEP) as process:
        known = psutil.Process(process.pid)
        process.kill()
    assert wait_gone([known], BOUND_S) == []


def test_a_living_process_is_reported_after_the_time_out() -> None:
    with subprocess.Popen(SLEEP) as process:
        try:
            known = psutil.Process(process.pid)
            assert wait_gone([known], 0.1) == [known]
        finally:
            process.kill()


def test_orphans_of_a_session_with_a_killed_leader_are_found() -> None:
    program = f"import subprocess; p = subprocess.Popen({SLEEP!r}); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as leader:
        known = psutil.Process(leader.pid)
        orphan = psutil.Process(int(leader.stdout.readline()))
        try:
            assert session_of(known) == [known, orphan]
            leader.kill()
            leader.wait(BOUND_S)
            assert session_of(known) == [orphan]
        finally:
            orphan.kill()
    assert wait_gone([orphan], BOUND_S) == []
    assert not any(map(lives, session_of(known)))

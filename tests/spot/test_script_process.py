"""A script does not outlive whoever watches it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from manager.host.gone import wait_gone

WATCHER = """
import sys, time
from pathlib import Path
from manager.spot.script_process import ScriptProcess

options = {"user": 65534, "group": 65534, "extra_groups": []} if sys.argv[2] == "another user" else {}
script = ScriptProcess(Path(sys.argv[1]), ["sleep", "600"], "", None, {}, **options)
print(script._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels tell no process of its parent's end")
@pytest.mark.parametrize("user", ["the same user", "another user"])
def test_a_script_ends_when_its_agent_is_killed(user: str, tmp_path: Path) -> None:
    if user == "another user" and os.getuid() != 0:
        pytest.skip("only root starts processes of others")
    command = [sys.executable, "-c", WATCHER, str(tmp_path), user]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        script = psutil.Process(int(watcher.stdout.readline()))
        try:
            watcher.send_signal(signal.SIGKILL)
            assert wait_gone([script], 60) == []
        finally:
            if script.is_running():
                script.kill()

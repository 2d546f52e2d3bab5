"""What ``morph spot-run`` refuses before it asks for a VM, and what it leaves when it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from manager.host.folders import sweep
from manager.host.gone import wait_gone
from manager.providers.local import LocalProvider
from manager.spot.launcher import Launcher, Source
from manager.spot.local import LocalMachines
from manager.spot.spec import SpotJob
from morph.cli.main import app

TIMEOUT_S = 100.0


def told_of(text: str, tmp_path: Path) -> str:
    """What the command says of a job file before anything is started."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    done = CliRunner().invoke(app, ["spot-run", str(path), "--", "touch", str(tmp_path / "started")])
    assert done.exit_code == 2, done.output
    assert not (tmp_path / "started").exists()
    return done.stderr.replace(str(path), "job.yaml").rstrip("\n")


def test_storage_for_which_nothing_is_installed_is_refused_before_a_vm_is_asked_for(tmp_path: Path) -> None:
    told = told_of("storage: nowhere://bucket/job\n", tmp_path)
    assert told == (
        "error: job.yaml: storage: cannot be used: Protocol not known: nowhere (got 'nowhere://bucket/job'); "
        "allowed: a URL fsspec knows"
    )


def test_whose_notices_there_are_is_said_as_one_writes_it(tmp_path: Path) -> None:
    told = told_of("storage: backups\nnotices: azur\n", tmp_path)
    assert told.endswith("(got 'azur'); allowed: '' or azure or aws or gcp")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other kernels tell no process of its parent's end")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_however_it_is_ended_it_leaves_neither_script_nor_folder(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed one cannot remove, the next command does."""
    temporary, code = tmp_path / "temporary", tmp_path / "code"
    for folder in (temporary, code):
        folder.mkdir()
    (code / "job.yaml").write_text("storage: ../backups\n")
    script = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-m", "morph.cli.main", "spot-run", "job.yaml", "--", sys.executable, "-c", script]
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, cwd=code, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        running = psutil.Process(int(process.stdout.readline()))
        try:
            process.send_signal(number)
            assert process.wait(TIMEOUT_S) == (-number if number == signal.SIGKILL else 130)
            assert wait_gone([running], TIMEOUT_S) == []
        finally:
            if running.is_running():
                running.kill()
    if number == signal.SIGKILL:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        sweep()
    assert list(temporary.iterdir()) == []


class Interrupting(LocalProvider):
    """Ends VMs while the user presses Ctrl-C."""

    was_dismantled = False

    def dismantle(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        super().dismantle()
        self.was_dismantled = True


def test_ctrl_c_while_vms_are_ended_leaves_none_of_them(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    machines = LocalMachines(tmp_path / "vms", code)
    provider = Interrupting(machines, max_vms=2)
    launcher = Launcher(SpotJob(storage=str(tmp_path / "backups")), ["true"], Source(provider, 1), machines, None)
    try:
        assert launcher.run().code == 0
    except KeyboardInterrupt:
        pytest.fail("it was interrupted")
    assert provider.was_dismantled
    assert provider.list() == ()

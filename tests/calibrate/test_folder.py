from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from calibrate.writing.storage import temporary_folder

BOUND_S = 150.0
HOLD = """
import signal, sys
from calibrate.writing.storage import temporary_folder
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
with temporary_folder() as folder:
    (folder / "state").write_bytes(b"x" * 1000)
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_goes_with_its_block() -> None:
    with temporary_folder() as folder:
        (folder / "below").mkdir()
    assert not folder.exists()
    with pytest.raises(OSError, match="File exists"), temporary_folder() as folder:
        folder.mkdir()
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_folder_goes_with_its_process(ending: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert (folder / "state").is_file()
        process.send_signal(ending)
        process.wait(BOUND_S)
        end_s = time.monotonic() + BOUND_S
        while folder.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
    assert not folder.exists()

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

import pytest

from calibrate.writing.storage import temporary_folder
from tests.crew import FORKS
from tests.waiting import ANSWER_S, poll_until


def hold(line: Connection) -> None:
    with temporary_folder() as folder:
        (folder / "state").write_bytes(b"x" * 1000)
        line.send(folder)
        line.recv()


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
    line, theirs = FORKS.Pipe()
    with line, theirs:
        process = FORKS.Process(target=hold, args=(theirs,), daemon=True)
        process.start()
        assert line.poll(ANSWER_S)
        folder = line.recv()
        assert (folder / "state").is_file()
        assert process.pid is not None
        os.kill(process.pid, ending)
        process.join(ANSWER_S)
        poll_until(lambda: not folder.exists(), "the folder to go")

"""Telling tests, run again as on machines that differ from the developer's: only in ``make test-long``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
TELLING = (
    "tests/test_user_cache.py",
    *(f"tests/engine/test_{name}.py" for name in ("signals", "run_dir", "folders", "control_socket", "process_vms")),
    "tests/manager/test_report_command.py",
)
"""Files and folders of a user, signals, sockets, hosts and workers that outlive a manager, and printed texts."""
NOBODY = 65534
MAY_READ = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
"""The interpreter of these tests may be in a folder that only its owner can read."""
UNREADABLE = "tests/engine/test_run_dir.py::test_a_directory_that_cannot_be_read_is_refused"
MOST_S = 1200 * PATIENCE
ANOTHER_USER = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *MAY_READ)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Return a folder whose name is short, unlike those of ``tmp_path``."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(2 * MOST_S)
@pytest.mark.parametrize(
    ("num_busy", "before", "environment"),
    [
        pytest.param(2, (), {}, id="two busy loops"),
        pytest.param(0, ("nohup",), {}, id="nohup"),
        pytest.param(0, (), {"LC_ALL": "C"}, id="LC_ALL=C"),
        pytest.param(0, ANOTHER_USER, {}, id="another user"),
        pytest.param(0, (), {"HOME": "/sys"}, id="a home that nobody can write to"),
        pytest.param(0, (), {"TMPDIR": "long"}, id="a TMPDIR of 87 characters"),
    ],
)
def test_telling_tests_pass_on_other_machines_too(
    num_busy: int, before: tuple[str, ...], environment: dict[str, str], temporary: Path
) -> None:
    if before == ANOTHER_USER:
        if subprocess.run([*before, "true"], capture_output=True).returncode != 0:
            pytest.skip("this user may not become another")
        os.chown(temporary, NOBODY, NOBODY)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MORPH_"))}
    given = {**inherited, "MORPH_TEST_PATIENCE": str(PATIENCE), "HOME": str(temporary), **environment}
    folder = temporary
    if "TMPDIR" in environment:
        folder = temporary / ("t" * (86 - len(str(temporary))))
        folder.mkdir()
    options = ["-q", "-p", "no:cacheprovider", "-m", "not long", f"--deselect={UNREADABLE}"]
    command = [*before, sys.executable, "-m", "pytest", *options, *TELLING]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=given | {"TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MOST_S,
        )
    finally:
        for loop in busy:
            loop.kill()
            loop.wait()
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 40

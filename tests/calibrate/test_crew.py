from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from calibrate.helpers.crew import Crew
from calibrate.helpers.token import find_token
from manager.host.processes import runs
from morph.contract.errors import ClusterError, ConfigError, WaitTimeout
from tests.calibrate.helpers import check_that_none_outlives
from tests.waiting import BOUND_S

HELPER = """
import os
import sys
from calibrate.helpers.helper_end import serve

def work(line):
    while True:
        message = line.next()
        print("the job prints this")
        if "fail" in message:
            print("one more line", file=sys.stderr)
            raise ValueError(message["fail"])
        if "environment" in message:
            line.answer({"environment": [os.environ.get(name) for name in message["environment"]]})
        elif "quiet" not in message:
            line.answer({"twice": 2 * message["number"]})

serve(work)
"""

SECOND_FAILS = """
import os

fork = os.fork

def fork_once():
    os.fork = no_more
    pid = fork()
    if pid:
        open({born!r}, "w").write(str(pid))
    return pid

def no_more():
    raise BlockingIOError("no more processes")

os.fork = fork_once
"""


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_helper.py").write_text(HELPER, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    return "some_helper"


def test_each_helper_answers_and_its_output_is_not_an_answer(helper: str) -> None:
    with Crew(helper, 3, "testing") as crew:
        for round_number in (1, 10):
            for number in range(3):
                crew.send(number, {"number": number * round_number})
            found = crew.gather(range(3), "answers", BOUND_S)
            assert found == {number: {"twice": 2 * number * round_number} for number in range(3)}


def test_a_helper_that_fails_is_reported_with_its_last_words(helper: str) -> None:
    with Crew(helper, 2, "testing") as crew:
        crew.send(0, {"quiet": True})
        crew.send(1, {"fail": "this and that"})
        with pytest.raises(ClusterError, match="testing failed in process 1: ValueError: this and that"):
            crew.gather(range(2), "answers", BOUND_S)
        crew.send(1, {"number": 1})  # sending to a lost member does not raise an error itself


def test_waiting_is_bounded_and_says_for_what(helper: str) -> None:
    with Crew(helper, 1, "testing") as crew, pytest.raises(WaitTimeout, match=r"waited 0 s for an answer"):
        crew.gather([0], "an answer", 0.0)


def test_no_helper_is_left_behind_when_one_cannot_be_started(helper: str, tmp_path: Path) -> None:
    born = tmp_path / "born"
    script = tmp_path / f"{helper}.py"
    script.write_text(SECOND_FAILS.format(born=str(born)) + script.read_text(encoding="utf-8"), encoding="utf-8")
    with (
        pytest.raises(ClusterError, match=r"testing failed in process [01]: BlockingIOError: no more processes"),
        Crew(helper, 2, "testing") as crew,
    ):
        crew.gather([1], "an answer", BOUND_S)
    assert not runs(int(born.read_text()))


def test_common_modules_are_imported_once_or_reported_as_missing(helper: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"testing failed in process \d: .*No module named nothing_of_this_name"),
        Crew("nothing_of_this_name", 3, "testing") as crew,
    ):
        crew.gather(range(3), "answers", BOUND_S)
    imported = tmp_path / "imported"
    script = tmp_path / f"{helper}.py"
    said = f"open({str(imported)!r}, 'a').write('once.')\n"
    script.write_text(said + script.read_text(encoding="utf-8"), encoding="utf-8")
    with Crew(helper, 3, "testing") as crew:
        for number in range(3):
            crew.send(number, {"number": number})
        crew.gather(range(3), "answers", BOUND_S)
    assert imported.read_text() == "once."


def test_helpers_have_the_environment_of_the_process_that_measures(
    helper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with Crew(helper, 1, "testing") as crew:
        crew.send(0, {"number": 0, "environment": ["OMP_NUM_THREADS", "MKL_NUM_THREADS"]})
        assert crew.gather([0], "an answer", BOUND_S) == {0: {"environment": ["3", None]}}


def test_no_helper_outlives_a_process_that_is_interrupted(helper: str, tmp_path: Path) -> None:
    script = (
        "from calibrate.helpers.crew import Crew\n"
        f"with Crew({helper!r}, 2, 'testing') as crew:\n"
        "    crew.gather(range(2), 'answers', 1e6)\n"
    )
    check_that_none_outlives(script, 2, helper, signal.SIGINT, tmp_path)


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_process_that_exchanges_messages_loads_nothing_that_exports_or_cuts() -> None:
    told = "import sys, calibrate.links.peer; print(*(name for name in sys.argv[1:] if name in sys.modules))"
    heavy = ("sympy", "morph.cutting.exporting.export", "calibrate.writing.measure", "ray")
    command = [sys.executable, "-c", told, *heavy, "morph.runtime.device.links"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=True)
    assert done.stdout.split() == ["morph.runtime.device.links"]


def test_a_secret_is_made_once_and_then_read(tmp_path: Path) -> None:
    path = tmp_path / "peer.token"
    made = find_token(path, None, make=True)
    assert len(made) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert find_token(path, "what the environment says", make=True) == made
    assert find_token(path, None) == made


def test_the_environment_is_asked_where_there_is_no_file() -> None:
    assert find_token(None, " sixteen letters at least\n") == "sixteen letters at least"


def test_a_secret_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    open_to_all, short = tmp_path / "open", tmp_path / "short"
    open_to_all.write_text("sixteen letters at least", encoding="utf-8")
    open_to_all.chmod(0o644)
    short.write_text("short", encoding="utf-8")
    short.chmod(0o600)
    for path, error in (
        (open_to_all, r"open: --token-file: others can read the secret \(got '0644'\); allowed: mode 0600"),
        (short, "short: the secret has only 5 characters; allowed: at least 16"),
        (tmp_path / "none", "none: --token-file: cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=error):
            find_token(path, None)
    with pytest.raises(ConfigError, match="MORPH_PEER_TOKEN: the secret has only 3 characters"):
        find_token(None, "abc")
    with pytest.raises(ConfigError, match="--token-file: the two nodes need a shared secret to recognise each other"):
        find_token(None, None)

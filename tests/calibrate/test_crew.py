from __future__ import annotations

import signal
from pathlib import Path

import pytest

from calibrate.helpers.crew import Crew
from manager.host.gone import runs
from morph.contract.errors import ClusterError, WaitTimeout
from tests.calibrate.helpers import check_that_none_outlives

BOUND_S = 150.0
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


def test_each_helper_answers_and_what_it_prints_is_no_answer(helper: str) -> None:
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
        crew.send(1, {"number": 1})  # to one who is gone: no error of its own


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


def test_what_is_needed_by_all_is_imported_once_and_told_of_when_it_cannot_be(helper: str, tmp_path: Path) -> None:
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

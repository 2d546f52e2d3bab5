from __future__ import annotations

import sys
from pathlib import Path

import pytest

from calibrate.helpers import crew as crew_module
from calibrate.helpers.crew import Crew
from morph.contract.errors import ClusterError, WaitTimeout

BOUND_S = 150.0
HELPER = """
import sys
from calibrate.helpers.helper_end import serve

def work(line):
    while True:
        message = line.next()
        print("the job prints this")
        if "fail" in message:
            print("one more line", file=sys.stderr)
            raise ValueError(message["fail"])
        if "quiet" not in message:
            line.answer({"twice": 2 * message["number"]})

serve(work)
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


def test_no_helper_is_left_behind_when_one_cannot_be_started(helper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = crew_module.subprocess.Popen

    def second_fails(*args: object, **options: object) -> object:
        if started:
            raise OSError("no more processes")
        started.append(popen(*args, **options))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr(crew_module.subprocess, "Popen", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        Crew(helper, 2, "testing")
    assert started[0].returncode is not None
    assert sys.executable

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.times import MOST_WHOLE_RUNS, Scheduling, processor_s
from tests.waiting import poll_until

NUM_PROCESSES = 4
WHOLE = {f"tests/system/test_{number}.py": 2 + number for number in range(6)}
OTHERS = {f"tests/data/test_{number}.py": 5 for number in range(20)}


class Process:
    """The part of a process of pytest-xdist that its scheduler sees."""

    def __init__(self) -> None:
        self.gateway, self.waiting = SimpleNamespace(id=str(id(self))), list[int]()
        self.shutting_down, self.shutdown, self.send_runtest_some = False, bool, self.waiting.extend


@pytest.mark.parametrize(("files", "most"), [(WHOLE | OTHERS, MOST_WHOLE_RUNS), (WHOLE, NUM_PROCESSES)])
def test_few_processes_have_whole_runs_while_others_compute(files: dict[str, int], most: int) -> None:
    settings: Any = SimpleNamespace(getvalue=lambda _: ["popen"] * NUM_PROCESSES)
    settings.option = SimpleNamespace(loadscopereorder=False)
    tests = [f"{file}::test_{number}" for file, count in files.items() for number in range(count)]
    scheduling, processes = Scheduling(settings), [Process() for _ in range(NUM_PROCESSES)]
    for process in processes:
        scheduling.add_node(process)
        scheduling.add_node_collection(process, tests)
    scheduling.schedule()
    turns = []
    while busy := [process for process in processes if process.waiting]:
        turns.append([tests[process.waiting[0]].partition("::")[0] for process in busy])
        for process in busy:
            scheduling.mark_test_complete(process, process.waiting.pop(0))
    assert {file: sum(turn.count(file) for turn in turns) for file in files} == files
    assert max(sum(file in WHOLE for file in turn) for turn in turns) == most
    assert sum(file in WHOLE for file in turns[0]) == most
    assert list(dict.fromkeys(file for turn in turns for file in turn if file in WHOLE)) == list(WHOLE)


def test_the_seconds_of_processes_that_live_on_are_counted() -> None:
    program = "import os\nif child := os.fork():\n    os.waitpid(child, 0)\nwhile True:\n    pass"
    before_s = processor_s()
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as waiting:
        try:
            poll_until(lambda: processor_s() > before_s + 0.5, "the seconds of its child")
        finally:
            os.killpg(waiting.pid, signal.SIGKILL)

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.times import MOST_WHOLE_RUNS, Scheduling


class Process:
    """The part of a process of pytest-xdist that its scheduler sees."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id=str(id(self)))
        self.shutting_down = False
        self.waiting: deque[int] = deque()

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self.waiting += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def run(files: dict[str, int], num_processes: int) -> list[list[str]]:
    """Run files with so many tests each; return the files whose tests run at the same time, by turn."""
    config: Any = SimpleNamespace(
        getvalue=lambda _name: ["popen"] * num_processes, option=SimpleNamespace(loadscopereorder=False)
    )
    tests = [f"{file}::test_{number}" for file, count in files.items() for number in range(count)]
    scheduling, processes = Scheduling(config), [Process() for _ in range(num_processes)]
    for process in processes:
        scheduling.add_node(process)
        scheduling.add_node_collection(process, tests)
    scheduling.schedule()
    turns = []
    while any(process.waiting for process in processes):
        turns.append([tests[process.waiting[0]].partition("::")[0] for process in processes if process.waiting])
        for process in processes:
            if process.waiting:
                scheduling.mark_test_complete(process, process.waiting.popleft())
    assert scheduling.tests_finished
    return turns


def test_few_processes_have_whole_runs_while_others_compute() -> None:
    whole = {f"tests/system/test_{number}.py": 2 + number for number in range(6)}
    files = whole | {f"tests/data/test_{number}.py": 5 for number in range(20)}
    turns = run(files, 4)
    assert {file: sum(turn.count(file) for turn in turns) for file in files} == files
    at_once = [sum(file in whole for file in turn) for turn in turns]
    assert max(at_once) == MOST_WHOLE_RUNS
    assert sum(at_once[: len(turns) // 4]) / (len(turns) // 4) > MOST_WHOLE_RUNS - 1  # they begin early
    assert list(dict.fromkeys(file for turn in turns for file in turn if file in whole)) == list(whole)


def test_whole_runs_alone_use_every_process() -> None:
    turns = run({f"tests/system/test_{number}.py": 3 for number in range(8)}, 4)
    assert len(turns[0]) == 4

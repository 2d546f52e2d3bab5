"""What the tests of a run took, by the clock and of processors, and which process of pytest-xdist gets which file.

Each run writes ``out/tests.xml`` (JUnit), in which a test has properties beside its seconds by the clock; ``make
test-times`` prints them. The seconds by file of a run are kept in ``tests/seconds.json``, by which the files of each
folder are put in order: the longest first, so that no process is left with a long one when the others have ended. Few
processes at once get a file with whole runs: these mostly wait, and starve if many of them start Ray together, while
files that compute use the cores beside them.

A test's processor seconds are those of its process and of all processes below it, set-up and clean-up included: also
those of workers that outlive the test. Daemons with another parent are not in them.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from xdist.scheduler import LoadFileScheduling

RESULTS = Path("out/tests.xml")
RECORDED = Path(__file__).with_name("seconds.json")
NUM_SLOWEST = 40
WHOLE_RUNS = tuple(f"tests/{name}/" for name in ("chaos", "cloud", "notebooks", "spot", "system"))
"""Folders whose tests start managers, clusters of Ray, and clouds' stand-ins, and mostly wait for them."""
MOST_WHOLE_RUNS = 2


def processor_s() -> float:
    """Return the processor seconds of this process and of all processes below it, living (on Linux) and ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + _of_children(os.getpid())


def _of_children(pid: int) -> float:
    spent_s = 0.0
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the process, or its thread, has just ended
            for child in map(int, path.read_text("ascii").split()):
                ticks = Path(f"/proc/{child}/stat").read_text("utf-8").rpartition(")")[2].split()[11:15]
                spent_s += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") + _of_children(child)
    return spent_s


def in_order(items: list[pytest.Item], root: Path) -> None:
    """Put the files of each folder in the order of their recorded seconds; one that is not recorded begins.

    Folders keep their order: ``tests/training``, whose workers take all cores, comes when runs on Ray have ended.
    """
    seconds: dict[str, float] = json.loads(RECORDED.read_text(encoding="utf-8"))
    files = {item.path: str(item.path.relative_to(root)) for item in items}
    items.sort(key=lambda item: (item.path.parent, -seconds.get(files[item.path], sys.float_info.max)))


class WaitingFiles(OrderedDict[str, dict[str, bool]]):
    """Files that no process has yet, in order. ``assigned``: whether each test has ended, by process and file."""

    def __init__(self, assigned: Mapping[Any, Mapping[str, Mapping[str, bool]]]) -> None:
        super().__init__()
        self._assigned = assigned
        self.asking: object = None
        """The process that needs another file."""

    def popitem(self, last: bool = False) -> tuple[str, dict[str, bool]]:
        """Return the next file with whole runs, or the next other one if enough other processes have whole runs."""
        others = [files for process, files in self._assigned.items() if process is not self.asking]
        left = [{file for file, tests in files.items() if not all(tests.values())} for files in others]
        wanted = sum(any(file.startswith(WHOLE_RUNS) for file in files) for files in left) < MOST_WHOLE_RUNS
        file = next((file for file in self if file.startswith(WHOLE_RUNS) == wanted), next(iter(self)))
        return file, self.pop(file)


class Scheduling(LoadFileScheduling):
    """Gives each process of pytest-xdist one file after the other, in an order that keeps cores busy."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.workqueue = self._waiting = WaitingFiles(self.assigned_work)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        self._waiting.asking = node
        super().mark_test_complete(node, item_index, duration)


@dataclass(frozen=True)
class Timed:
    """A test's seconds by the clock and of processors; ``process`` is the one of pytest-xdist that ran it."""

    file: str
    name: str
    clock_s: float
    processor_s: float
    process: str
    collection_s: float


def timed(results: Path) -> list[Timed]:
    """Return the tests in a file that pytest wrote with ``--junitxml``, without those that were skipped."""
    found = []
    for case in ElementTree.parse(results).iter("testcase"):
        told = {one.get("name"): one.get("value", "") for one in case.iter("property")}
        if case.find("skipped") is None and "file" in told:
            clock_s, spent_s = float(case.get("time", 0)), float(told["processor_s"])
            collection_s, name = float(told["collection_s"]), case.get("name", "")
            found.append(Timed(told["file"], name, clock_s, spent_s, told["process"], collection_s))
    return found


def by(tests: Iterable[Timed], keys: Mapping[str, str]) -> dict[str, tuple[float, float, int]]:
    """Return seconds by the clock and of processors, and tests, by the key of each test's file; longest first."""
    sums: dict[str, tuple[float, float, int]] = defaultdict(lambda: (0.0, 0.0, 0))
    for test in tests:
        clock_s, spent_s, num = sums[keys[test.file]]
        sums[keys[test.file]] = (clock_s + test.clock_s, spent_s + test.processor_s, num + 1)
    return dict(sorted(sums.items(), key=lambda entry: -entry[1][0]))


def table(tests: list[Timed]) -> str:
    """Return the slowest tests, and sums by folder and by process, as text."""
    lines = [
        "  clock processor waiting",
        *(_line(one.clock_s, one.processor_s, f"{one.file}::{one.name}") for one in _slowest(tests)),
    ]
    folders = by(tests, {test.file: str(Path(test.file).parent) for test in tests})
    lines += ["", *(_line(*sums[:2], f"{name} ({sums[2]} tests)") for name, sums in folders.items())]
    for process in sorted({test.process for test in tests}):
        own = [test for test in tests if test.process == process]
        clock_s, spent_s = sum(test.clock_s for test in own), sum(test.processor_s for test in own)
        note = f"{process} ({len(own)} tests, after {own[0].collection_s:.0f} s of collection)"
        lines += [*([""] if process == min(test.process for test in tests) else []), _line(clock_s, spent_s, note)]
    total_s, spent_s = sum(test.clock_s for test in tests), sum(test.processor_s for test in tests)
    return "\n".join([*lines, "", _line(total_s, spent_s, f"all ({len(tests)} tests)")])


def record(tests: list[Timed], path: Path = RECORDED) -> None:
    """Keep the seconds of every file, in tenths."""
    files = by(tests, {test.file: test.file for test in tests})
    path.write_text(
        json.dumps({file: round(files[file][0], 1) for file in sorted(files)}, indent=0) + "\n", encoding="utf-8"
    )


def _slowest(tests: list[Timed]) -> list[Timed]:
    return sorted(tests, key=lambda test: -test.clock_s)[:NUM_SLOWEST]


def _line(clock_s: float, spent_s: float, name: str) -> str:
    return f"{clock_s:7.1f} {spent_s:9.1f} {max(0.0, clock_s - spent_s):7.1f}  {name}"


class Clock:
    """A plugin for pytest: each test's properties in the results."""

    def __init__(self) -> None:
        self._began_s = self._collected_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> object:
        began = time.perf_counter()
        done = yield
        self._collected_s = time.perf_counter() - began
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> object:
        self._began_s = processor_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> object:
        if call.when == "teardown":
            config = item.config
            item.user_properties += [
                ("file", str(item.path.relative_to(config.rootpath))),
                ("processor_s", f"{processor_s() - self._began_s:.3f}"),
                ("process", getattr(config, "workerinput", {}).get("workerid", "one process")),
                ("collection_s", f"{self._collected_s:.1f}"),
            ]
        return (yield)


def main() -> None:
    """Print the times of the last run; with ``record``, keep the seconds of its files for the order of the next."""
    if not RESULTS.exists():
        raise SystemExit(f"{RESULTS}: is not there; run `make test` first")
    tests = timed(RESULTS)
    print(table(tests))
    if sys.argv[1:] == ["record"]:
        record(tests)
        print(f"\nwrote {RECORDED}")


if __name__ == "__main__":
    main()

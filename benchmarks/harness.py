"""Shared parts of benchmarks: alternating rounds, medians and ranges, tables, the line about the machine, processes.

A benchmark is a module with a function ``main``, whose parameters are its options (Typer reads them).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
JOBS, PROFILES = ROOT / "configs/jobs", ROOT / "configs/profiles"
TINY_JOB, GPT2_JOB = f"{JOBS}/tiny_gpt.py:job", f"{JOBS}/gpt2_stdlib.py:job"
LOOPBACK = "127.0.0.1"
Seed = Annotated[int, typer.Option(help="of every random choice")]


def option(text: str) -> Any:
    """Return an option with a line of help."""
    return typer.Option(help=text)


def words(text: str, allowed: Iterable[str] | None = None) -> list[str]:
    """Split an option with several values, "a,b".

    Raises:
        typer.BadParameter: one of them is not allowed.
    """
    found = [word.strip() for word in text.split(",") if word.strip()]
    if allowed is not None and (unknown := [word for word in found if word not in list(allowed)]):
        raise typer.BadParameter(f"{', '.join(unknown)}; allowed: {', '.join(allowed)}")
    return found


def numbers(text: str) -> list[int]:
    """Split an option with several whole numbers, "8,64".

    Raises:
        typer.BadParameter: one of them is not a number.
    """
    try:
        return [int(word) for word in words(text)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def machine() -> str:
    """Return the line about the machine: cores, the present load average, and versions."""
    versions = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    return f"{os.cpu_count()} cores, load {load():.1f}, {versions}"


def load() -> float:
    """Return the load average of the last minute."""
    return os.getloadavg()[0]


def in_turns(
    ways: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: int = 0, shuffled: random.Random | None = None
) -> dict[str, list[T]]:
    """Measure every way once in each round, so that other load on the machine affects all of them equally.

    Args:
        ways: The functions to measure, by name.
        rounds: Number of rounds.
        warm_up: Number of rounds before these that do not count.
        shuffled: Draws the order of each round; None: always the given order.
    """
    found: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(warm_up + rounds):
        for name in shuffled.sample(list(ways), len(ways)) if shuffled else ways:
            result = ways[name]()
            if number >= warm_up:
                found[name].append(result)
    return found


def wall_s(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def cpu_s(work: Callable[[], object]) -> float:
    """Return the processor seconds of this process that some work takes."""
    begin_s = time.process_time()
    work()
    return time.process_time() - begin_s


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over rounds of the ratio of two ways in the same round."""
    return statistics.median(one / other for one, other in zip(values, others, strict=True))


def spread(values: Sequence[float], unit: str = "s", digits: int = 2, scale: float = 1.0) -> str:
    """Return the median, with minimum and maximum, as text."""
    middle, low, high = (scale * value for value in (statistics.median(values), min(values), max(values)))
    return f"{middle:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f})"


def worst_cases(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, 95th percentile (nearest rank) and maximum."""
    ordered = sorted(values)
    rank = max(0, -(-95 * len(ordered) // 100) - 1)
    return statistics.median(ordered), ordered[rank], ordered[-1]


def quartiles(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Return lower quartile, median, upper quartile and maximum."""
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]
    return lower, middle, upper, max(values)


def head(columns: str) -> None:
    """Begin a Markdown table with columns such as "shape | workers"."""
    print(f"\n| {columns} |\n{'|---' * (columns.count('|') + 1)}|", flush=True)


def row(*cells: object) -> None:
    """Print one line of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def write_json(path: Path, figures: object) -> None:
    """Write figures to a file."""
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def forked(work: Callable[[], object]) -> int:
    """Run ``work`` in a fork, which ends together with this process; return the process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def kill(pids: Iterable[int]) -> None:
    """Kill processes that this one has started, and wait for them."""
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)

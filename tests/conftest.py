"""Settings for every test: nothing reaches a model hub, and torch uses one thread wherever a test loads it.

Several pytest-xdist workers share the machine. With ``--dist loadfile`` one of them runs all tests of a file in turn,
so that each fixture is made once; ``tests/times.py`` says which file comes next.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.training.shapes import ShapesCrew

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("MORPH_VALIDATE", "1")
# Inductor believes this setting; otherwise it first compiles programs that try vector instructions, for 6 s
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# tests do not read a developer's cache; the processes of pytest-xdist share one
if "MORPH_CACHE_DIR" not in os.environ:
    os.environ["MORPH_CACHE_DIR"] = tempfile.mkdtemp(prefix="morph-tests-")
    atexit.register(shutil.rmtree, os.environ["MORPH_CACHE_DIR"], ignore_errors=True)
# set even if a developer has set it: a real history learns nothing from tests
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["MORPH_DATA_DIR"] = tempfile.mkdtemp(prefix="morph-tests-data-")
    atexit.register(shutil.rmtree, os.environ["MORPH_DATA_DIR"], ignore_errors=True)

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from tests import times
from tests.waiting import PATIENCE

# Each invocation makes Typer build all commands anew, which takes 0.1 s, and hundreds of tests invoke it.
typer.testing._get_command = cache(typer.testing._get_command)
# A busy machine must not fail tests: examples have no deadline, and data may be slow to draw. pytest bounds each test.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

MOST_WORKERS = 4


def hear_signals() -> None:
    """Let programs started from now on receive signals that are ignored here because of nohup or a shell's ``&``.

    A program begins with the default action of a signal for which its parent has a handler, but keeps ignoring a signal
    that its parent ignores. This process itself ignores a hang-up as before.
    """
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def crew() -> Iterator[ShapesCrew]:
    """Workers that train one job after another for all tests of a process."""
    import torch

    from tests.training.shapes import ShapesCrew

    torch.set_num_threads(1)
    processes = ShapesCrew()
    try:
        yield processes
    finally:
        processes.close()


@pytest.fixture(scope="session", autouse=True)
def heard_signals() -> None:
    """Only processes that run tests need this; others of pytest-xdist must survive a SIGHUP as their parent does."""
    hear_signals()


@pytest.fixture(autouse=True)
def plain_imports() -> Iterator[None]:
    """Later tests would import a job's files as they were for a test that leaves them in use."""
    finders = list(sys.meta_path)
    yield
    left = [finder for finder in sys.meta_path if finder not in finders and type(finder).__name__ == "JobFiles"]
    if left:
        sys.meta_path[:] = finders
        pytest.fail(f"left in use: {left}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the processes for ``--numprocesses auto``: two more than usable cores, because many tests mostly wait."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + 2, MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> times.Scheduling | None:
    return times.Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(times.Clock())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if PATIENCE != 1.0:
        for item in items:
            bound = item.get_closest_marker("timeout")
            given_s = bound.args[0] if bound else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(given_s * PATIENCE), append=False)
    if hasattr(config, "workerinput"):
        times.in_order(items, config.rootpath)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Compile the simulator while workers collect, because numba's cache does not support concurrent writers."""
    if session.config.getoption("dist", "no") != "no" and not hasattr(session.config, "workerinput"):
        from simulator import plan, simulate, synthetic_profile

        profile = synthetic_profile(num_sections=4, jitter=0.1)
        plan(profile, num_gpus=4)
        simulate(profile, num_stages=2, num_replicas=2, jitter_seed=0)
    # imported objects stay: without this, a fifth of the time would be spent on searching them for garbage
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 10)  # as Morph's commands do
        gc.enable()

"""Settings for every test: nothing reaches a model hub, and torch, where a test loads it, uses one thread.

Several pytest-xdist workers share the machine (``--dist loadfile``: a file's tests run one after the other in one of
them, so that its fixtures are made once). Files with real processes go first, for they take longest, then those with
slow tests; the short ones then fill up whatever worker is free.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.training.shapes import ShapesCrew

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MPLBACKEND", "Agg")
# Inductor takes the processor at its word: else it first compiles programs that try its vector instructions, for 6 s.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
if "MORPH_CACHE_DIR" not in os.environ:  # a developer's cache is not read; processes of pytest-xdist share one
    os.environ["MORPH_CACHE_DIR"] = tempfile.mkdtemp(prefix="morph-tests-")
    atexit.register(shutil.rmtree, os.environ["MORPH_CACHE_DIR"], ignore_errors=True)
if "PYTEST_XDIST_WORKER" not in os.environ:  # whatever a developer has set: a real history learns nothing from tests
    os.environ["MORPH_DATA_DIR"] = tempfile.mkdtemp(prefix="morph-tests-data-")
    atexit.register(shutil.rmtree, os.environ["MORPH_DATA_DIR"], ignore_errors=True)

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

# Typer builds all commands anew, in 0.1 s, whenever one is invoked: hundreds of tests do.
typer.testing._get_command = cache(typer.testing._get_command)
# A busy machine must not fail tests: examples have no deadline and data may be slow to draw; pytest bounds each test.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

MOST_WORKERS = 4


def hear_signals() -> None:
    """Let what is started from now on hear signals that are ignored here: by nohup, or by a shell's ``&``.

    A program begins with the default where there was a handler, but goes on ignoring what is ignored. This process
    itself ignores a hang-up as before.
    """
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def crew() -> Iterator[ShapesCrew]:
    """Workers that train one job after another, for all tests of a process."""
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
    """Set only where tests run, so that processes of pytest-xdist survive a SIGHUP that their parent survives."""
    hear_signals()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the processes for ``--numprocesses auto``: two more than usable cores, because many tests mostly wait."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + 2, MOST_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        marked = {mark: {item.path for item in items if item.get_closest_marker(mark)} for mark in ("system", "slow")}
        items.sort(key=lambda item: tuple(item.path not in paths for paths in marked.values()))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Compile the simulator while workers collect, because numba's cache does not support concurrent writers."""
    if session.config.getoption("dist", "no") != "no" and not hasattr(session.config, "workerinput"):
        from simulator import plan, simulate, synthetic_profile

        profile = synthetic_profile(num_sections=4, jitter=0.1)
        plan(profile, num_gpus=4)
        simulate(profile, num_stages=2, num_replicas=2, jitter_seed=0)
    gc.disable()  # what is imported stays: a fifth of the time would go into looking through it again and again
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 10)  # as in Morph's commands
        gc.enable()

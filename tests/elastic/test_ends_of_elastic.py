"""However ``morph elastic`` ends, no worker is left; and it never offers a place that cannot be taken."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manager.host.processes import runs
from tests.waiting import BOUND_S

pytestmark = pytest.mark.slow

STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1], f"told-{time.monotonic_ns()}").touch())
pathlib.Path(sys.argv[1], f"up-{time.monotonic_ns()}").touch()
while True:
    time.sleep(0.1)
"""
"""Replaces a training script: it saves before it ends, which takes long."""


class Started:
    """A running ``morph elastic`` of two such workers."""

    def __init__(self, folder: Path, *options: str, begun_with: Callable[[], Any], **environment: str) -> None:
        self._log = folder / "log"
        self.folder = folder
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "morph.cli.main",
                    "elastic",
                    "--workers",
                    "2",
                    *options,
                    "--",
                    sys.executable,
                    "-c",
                    STUBBORN,
                    str(folder),
                ],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=begun_with,
            )
        self.until(lambda: len(list(folder.glob("up-*"))) == 2, "both workers are up")

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def left(self) -> list[int]:
        return [pid for pid in map(int, re.findall(r"worker process (\d+) started", self.log)) if runs(pid)]

    def until(self, holds: Callable[[], Any], what: str) -> None:
        until_s = time.monotonic() + BOUND_S
        while not holds():
            assert time.monotonic() < until_s, f"{what}: {self.log}"
            time.sleep(0.05)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(BOUND_S)
        for pid in self.left:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def start_one(*options: str, begun_with: Callable[[], Any] = lambda: None, **environment: str) -> Started:
        started.append(Started(tmp_path, *options, begun_with=begun_with, **environment))
        return started[-1]

    yield start_one
    for one in started:
        one.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_workers_that_take_their_time_and_leaves_none(
    start: Callable[..., Started], number: signal.Signals
) -> None:
    job = start()
    job.process.send_signal(number)
    job.until(lambda: len(list(job.folder.glob("told-*"))) == 2, "both were asked to end")
    assert len(job.left) == 2
    job.process.send_signal(number)
    assert job.process.wait(BOUND_S) == 130, job.log
    assert job.left == []
    assert job.log.endswith("interrupted\n")


def test_under_nohup_it_outlives_its_terminal(start: Callable[..., Started]) -> None:
    job = start(begun_with=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    job.process.send_signal(signal.SIGHUP)
    # this signal must be the first one: after a second, workers are killed without being asked to stop
    job.process.send_signal(signal.SIGTERM)
    job.until(lambda: len(list(job.folder.glob("told-*"))) == 2, "both were asked to end")
    assert len(job.left) == 2


def test_it_offers_a_place_only_to_those_who_can_know_the_secret(start: Callable[..., Started]) -> None:
    assert "join" not in start(MORPH_ELASTIC_SECRET="").log


def test_its_output_says_where_to_join_and_how_many_are_missing(start: Callable[..., Started]) -> None:
    log = start("--founders", "5", MORPH_ELASTIC_SECRET="a secret of this test").log
    assert re.search(r"^workers can join at 127\.0\.0\.1:\d+; waiting for 3 more$", log, re.MULTILINE)


def test_a_command_that_joins_also_listens_where_it_is_told(start: Callable[..., Started]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--join", "127.0.0.1:1", "--listen", f"127.0.0.1:{port}")
    log = start(*options, MORPH_ELASTIC_SECRET="a secret of this test").log
    assert f"workers can join at 127.0.0.1:{port}\n" in log

"""Whole jobs of real processes: workers are killed, stopped and added; weights equal those of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manager.host.processes import runs
from tests.elastic.forked import ForkedJob
from tests.grids import IS_LONG
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("training_script.py")
TIMEOUT_S = 280.0 * PATIENCE
INIT_SEED = "5"


class Job:
    """A running ``morph elastic``.

    ``is_forked``: its workers are forked from a process that has torch, which a user's workers load themselves.
    """

    def __init__(self, folder: Path, *options: str, is_forked: bool = True, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._log = (folder / f"log-{len(list(folder.glob('log-*')))}").open("w+")
        command = [sys.executable, str(SCRIPT)]
        whole = {**os.environ, "FOLDER": str(folder), "INIT_SEED": INIT_SEED, **environment}
        self.process: subprocess.Popen[bytes] | ForkedJob
        if is_forked:
            self.process = ForkedJob(options, command, whole, Path(self._log.name))
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "morph.cli.main", "elastic", *options, "--", *command],
                env=whole,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    @property
    def workers(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"worker process (\d+) started", self.log)]

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def until(self, holds: Callable[[], Any], what: str) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < until_s, f"{what}: {self.log}"
            assert self.process.poll() is None, self.log
            time.sleep(0.05)

    def ends(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.folder.glob("end-*")]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(TIMEOUT_S)
        self._log.close()
        assert [pid for pid in self.workers if runs(pid)] == []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start_one(*options: str, is_forked: bool = True, **environment: str) -> Job:
        jobs.append(Job(tmp_path, *options, is_forked=is_forked, **environment))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.close()


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of an undisturbed run with one worker."""
    job = Job(tmp_path_factory.mktemp("quiet"), is_forked=False)
    assert job.wait() == 0, job.log
    (end,) = job.ends()
    job.close()
    return end


def test_after_losses_the_weights_are_those_of_a_quiet_run(start: Callable[..., Job], quiet: dict[str, Any]) -> None:
    faults = {"4": {"kill": [1, 3]}, "8": {"kill": [0]}}
    job = start("--workers", "5", FAULTS=json.dumps(faults))
    assert job.wait() == 0, job.log
    assert job.log.count("was ended by SIGKILL") == 3
    assert job.ends() == [quiet, quiet]


def two_and_a_joiner(start: Callable[..., Job], **environment: str) -> tuple[Job, Job]:
    """Start two workers, and a third that joins them, upon which the first ends itself."""
    faults = {"FAULTS": json.dumps({"3": {"await": []}}), "JOINED_FROM": "4", **environment}
    secret = {"MORPH_ELASTIC_SECRET": "a secret of this test", **faults}
    job = start("--workers", "2", **secret)
    job.until(lambda: len(list(job.folder.glob("begun-*"))) == 2, "its founders have begun: this one is none of them")
    where = re.search(r"workers can join at (\S+)", job.log)
    # the first of these addresses is that of a worker that is gone
    return job, start("--join", f"127.0.0.1:1,{where[1]}", IS_JOINER="1", **{**secret, "INIT_SEED": "6"})


@pytest.mark.skipif(not IS_LONG, reason="as with batches of Morph, only in make test-long")
def test_a_joiner_with_batches_of_its_own_has_the_others_state(start: Callable[..., Job]) -> None:
    job, joiner = two_and_a_joiner(start, NUM_STEPS="80", OWN_LOADER="1")
    assert (job.wait(), joiner.wait()) == (0, 0), job.log + joiner.log
    one, other = job.ends()
    assert one == other
    assert one["averaged"] == 80


@pytest.mark.parametrize("sync", ["s-sgd", "ad-psgd"])
def test_a_joiner_enters_the_ring_and_replaces_a_lost_worker(
    start: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory, sync: str
) -> None:
    """With s-sgd a joiner follows the others' steps before it joins; where models differ, it gets one as it joins.

    Before it came, the founders' loops froze, thawed and added parameters, and advanced a schedule.
    """
    job, joiner = two_and_a_joiner(start, NUM_STEPS="80", SYNC=sync, CHANGES="all")
    assert (job.wait(), joiner.wait()) == (0, 0), job.log + joiner.log
    assert job.log.count("was ended by SIGKILL") == 1
    one, other = job.ends()
    assert (one["weights"], one["steps"]) == (other["weights"], 80)
    if sync == "s-sgd":
        alone = Job(tmp_path_factory.mktemp("alone"), NUM_STEPS="80", CHANGES="all")
        assert alone.wait() == 0, alone.log
        assert alone.ends() == [one]
        alone.close()


def test_frozen_thawed_and_added_parameters_equal_those_of_one_worker(
    start: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The first step of a thawed parameter is among those in which a worker is lost."""
    job = start("--workers", "3", CHANGES="all", FAULTS=json.dumps({"2": {"kill": [2]}, "7": {"kill": [1]}}))
    assert job.wait() == 0, job.log
    assert job.log.count("was ended by SIGKILL") == 2
    alone = Job(tmp_path_factory.mktemp("alone"), CHANGES="all")
    assert alone.wait() == 0, alone.log
    assert alone.ends() == job.ends()
    alone.close()


@pytest.mark.parametrize("exit", [{"exit": [0, 2]}, {"exit_between": 2}])
def test_a_script_that_exits_after_a_loss_counts_as_unfinished(start: Callable[..., Job], exit: dict[str, Any]) -> None:
    """Python forgets the argument of ``sys.exit`` before it calls the exit handlers that close an open ring."""
    job = start("--workers", "3", FAULTS=json.dumps({"4": {"kill": [1]}, "8": exit}))
    assert job.wait() == 1, job.log
    assert job.log.count("ended with code 3") == 2
    assert job.ends() == []


def test_too_few_stop_and_say_so(start: Callable[..., Job]) -> None:
    job = start("--workers", "3", FAULTS=json.dumps({"3": {"kill": [0, 2]}}))
    assert job.wait() == 1
    assert "too few to continue without the others" in job.log
    assert job.ends() == []


def test_a_silent_worker_is_left_out_and_reported(start: Callable[..., Job], quiet: dict[str, Any]) -> None:
    job = start("--workers", "3", "--silence-s", "10", FAULTS=json.dumps({"3": {"stop": [1]}}))
    job.until(lambda: len(job.ends()) == 2, "the others end")
    assert job.ends() == [quiet, quiet]
    os.kill(int((job.folder / "stopped").read_text()), signal.SIGCONT)
    assert job.wait() == 0
    assert job.log.count("ended with code 0") == 2
    assert job.log.count("ended with code 1") == 1


def test_with_batches_of_its_own_the_survivors_agree(start: Callable[..., Job]) -> None:
    job = start("--workers", "3", OWN_LOADER="1", FAULTS=json.dumps({"5": {"kill": [2]}}))
    assert job.wait() == 0, job.log
    one, other = job.ends()
    assert one == other
    assert one["steps"] == 12


def test_ctrl_c_ends_every_worker(start: Callable[..., Job]) -> None:
    job = start("--workers", "2", is_forked=False, NUM_STEPS="1000000")
    job.until(lambda: len(job.workers) == 2, "the workers start")
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert [pid for pid in job.workers if runs(pid)] == []


def test_a_worker_that_does_not_know_the_secret_is_not_let_in(start: Callable[..., Job], quiet: dict[str, Any]) -> None:
    job = start("--workers", "2", FAULTS=json.dumps({"3": {"await": []}}), MORPH_ELASTIC_SECRET="right")
    job.until(lambda: "workers can join at" in job.log, "the job begins")
    where = re.search(r"workers can join at (\S+)", job.log)
    stranger = start("--join", where[1], MORPH_ELASTIC_SECRET="wrong", IS_JOINER="1")
    stranger.until(lambda: stranger.workers, "it starts")
    (job.folder / "joiner").touch()
    assert job.wait() == 0, job.log
    assert job.ends() == [quiet, quiet]


def text_run(start: Callable[..., Job], sync: str, **environment: str) -> list[dict[str, Any]]:
    job = start("--workers", "4", TEXT="1", SYNC=sync, **environment)
    assert job.wait() == 0, job.log
    return job.ends()


@pytest.fixture(scope="module")
def quiet_text(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return the loss on held-out text after a run of s-sgd."""
    job = Job(tmp_path_factory.mktemp("text"), TEXT="1", NUM_STEPS="150")
    assert job.wait() == 0, job.log
    (end,) = job.ends()
    job.close()
    return float(end["loss"])


@pytest.mark.parametrize("sync", ["sma", "ad-psgd"])
def test_replicas_that_differ_learn_as_s_sgd_does_and_end_equal(
    start: Callable[..., Job], sync: str, quiet_text: float
) -> None:
    ends = text_run(start, sync, NUM_STEPS="150")
    assert len(ends) == 4
    assert len({end["weights"] for end in ends}) == 1
    assert len({end["hashes"][100] for end in ends}) == 4  # the replicas did differ
    assert ends[0]["loss"] < 1.15 * quiet_text
    assert quiet_text < 2.4  # the loss begins at 4.85


FAULTS_BETWEEN_REPLICAS = {
    "sma": {"4": {"kill": [1]}, "8": {"kill": [0]}},
    "ad-psgd": {"5": {"kill_serving": [1]}, "33": {"kill": [0]}},  # in the middle of a model, and before a meeting
}


@pytest.mark.parametrize(("sync", "faults"), FAULTS_BETWEEN_REPLICAS.items())
def test_after_losses_replicas_continue_and_end_equal(
    start: Callable[..., Job], sync: str, faults: dict[str, Any]
) -> None:
    ends = text_run(start, sync, NUM_STEPS="60", FAULTS=json.dumps(faults))
    assert [end["steps"] for end in ends] == [60, 60]
    assert ends[0]["weights"] == ends[1]["weights"]
    assert ends[0]["loss"] < 3.2


def test_auto_changes_at_the_same_boundary_everywhere_and_returns_with_equal_weights(
    start: Callable[..., Job],
) -> None:
    ends = text_run(start, "auto", NUM_STEPS="150", SLOW="9,16", FAULTS=json.dumps({"40": {"kill": [3]}}))
    syncs = ends[0]["syncs"]
    assert len(ends) == 3
    assert all(end["syncs"] == syncs for end in ends)
    changes = [index for index in range(1, 150) if syncs[index] != syncs[index - 1]]
    assert [syncs[index] for index in (0, *changes[:2])] == ["s-sgd", "ad-psgd", "s-sgd"]
    assert len({end["hashes"][changes[0] + 3] for end in ends}) == 3
    for step in range(changes[1] + 1, changes[2] if len(changes) > 2 else 150):
        assert len({end["hashes"][step] for end in ends}) == 1, step
    assert len({end["weights"] for end in ends}) == 1

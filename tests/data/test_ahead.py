"""Data workers read what the computing thread would have read, whatever happens to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from morph.contract.errors import JobError
from morph.data.evaluation import EvaluationLoader
from morph.data.loader import data_facts
from morph.data.prefetch import MOST_FAILURES, NUM_RESTORING, WITHOUT, DataWorkers
from morph.jobs.job import load_job
from tests.data import read_jobs
from tests.data.read_jobs import BROKEN
from tests.data.readings import KEYS, M, Reading, is_ready, reading, spec_of, step_of
from tests.members import FORKS
from tests.waiting import BOUND_S, poll_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

NUM_STEPS = 12


def is_there(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture(scope="module")
def shared() -> Iterator[Reading]:
    with reading("drawn", is_forked=False) as found:
        yield found


@pytest.fixture
def drawn(shared: Reading) -> Reading:
    shared.dataset.num_reads = 0
    return shared


def test_micro_batches_of_several_epochs_are_read_beside_bit_for_bit(drawn: Reading) -> None:
    for step in range(NUM_STEPS):
        drawn.expect(step_of(step) + step_of(step + 1))
        for place in step_of(step):
            drawn.same(*place)
    assert drawn.dataset.num_reads == 0, "the loader read by itself"


def test_a_wrong_prediction_is_dropped_and_the_rest_is_read_here(drawn: Reading) -> None:
    drawn.expect(step_of(100))
    drawn.expect([(50, 2), (50, 0)], ["x", "even"])  # of another shape: other samples and other entries
    drawn.same(50, 1, ["x"])
    assert drawn.dataset.num_reads == M, "what nobody expected is read by the loader"
    for place in ((50, 2), (50, 0)):
        drawn.same(*place, ["even"])
        drawn.same(*place, ["x"])
    drawn.expect(step_of(101))
    drawn.expect([])
    drawn.same(101, 0)
    assert drawn.dataset.num_reads == 2 * M


def test_a_step_that_is_run_again_is_read_again_or_remembered(drawn: Reading) -> None:
    for places in (step_of(40), step_of(40), [(40, 1)], step_of(41) + step_of(40), step_of(40)):
        drawn.expect(places)
        for place in places:
            drawn.same(*place)
    assert drawn.dataset.num_reads == 0


def test_an_entry_that_was_not_expected_is_read_here(drawn: Reading) -> None:
    drawn.expect(step_of(60), ["x"])
    drawn.same(60, 0, ["x"])
    drawn.same(60, 0, ["even"])
    assert drawn.dataset.num_reads == M


def test_a_reader_that_must_not_wait_reads_samples_itself(drawn: Reading) -> None:
    stopped = drawn.workers.pids
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        drawn.expect(step_of(70), over=True)
        drawn.same(70, 0)
        assert drawn.dataset.num_reads == M
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def test_evaluations_are_read_beside_in_place_of_what_training_expected() -> None:
    with reading("evaluated") as found:
        job = load_job(spec_of("evaluated"))
        assert job.eval_data is not None
        loaders = [
            EvaluationLoader(job.eval_data(), job.seed, found.dataset[0], M, None, prefetcher)
            for prefetcher in (found.workers, None)
        ]
        found.dataset.num_reads = loaders[0]._dataset.num_reads = 0  # type: ignore[attr-defined]
        found.expect(step_of(0))
        loaders[0].expect(range(5), KEYS, bool)
        for micro_batch in range(5):
            for keys in (["x", "half"], ["picture"]):
                prefetcher, alone = (loader.load(micro_batch, keys) for loader in loaders)
                assert all(torch.equal(prefetcher[key], alone[key]) for key in keys)
        assert loaders[0]._dataset.num_reads <= 2 * M  # type: ignore[attr-defined]  # what training expected is under way
        found.expect(step_of(0))
        for place in step_of(0):
            found.same(*place)
        assert found.dataset.num_reads == 0


def test_killed_data_workers_are_replaced_and_what_they_had_is_read_again() -> None:
    with reading("drawn") as found:
        found.expect(step_of(0) + step_of(1))
        before = found.workers.pids
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        for place in step_of(0):
            found.same(*place)
        poll_until(lambda: is_ready(found.workers) and not set(before) & set(found.workers.pids), "other data workers")
        assert len(found.workers.pids) == 2
        assert not any(is_there(pid) for pid in before)
        found.dataset.num_reads = 0
        found.expect(step_of(1))
        for place in step_of(1):
            found.same(*place)
        assert found.dataset.num_reads == 0


def test_a_hanging_data_worker_is_replaced_after_a_while() -> None:
    with reading("drawn", 1, patience_s=0.2) as found:
        (pid,) = found.workers.pids
        os.kill(pid, signal.SIGSTOP)
        found.expect(step_of(0))
        for place in step_of(0):
            found.same(*place)
        assert pid not in found.workers.pids
        assert not is_there(pid)


def test_data_workers_that_fail_repeatedly_are_suspended_for_a_while() -> None:
    clock_s = [0.0]
    with reading("drawn", 1, clock=lambda: clock_s[0]) as found:
        for step in range(10 * NUM_STEPS):  # more than enough: an end may be noticed some steps later
            if not found.workers.pids:
                break
            for pid in found.workers.pids:
                with suppress(ProcessLookupError):  # the same ones as before, if their end was not noticed since
                    os.kill(pid, signal.SIGKILL)
                poll_until(lambda pid=pid: not is_there(pid), "a death")  # type: ignore[misc]
            found.expect(step_of(step))
            for place in step_of(step):
                found.same(*place)
        assert found.workers.pids == ()
        (note,) = found.workers.notes
        assert note.startswith("data workers failed 8 times (the last one has ended)")
        clock_s[0] = WITHOUT.first_s - 1
        found.expect(step_of(0))
        assert found.workers.pids == ()
        clock_s[0] = WITHOUT.first_s
        found.expect(step_of(0))
        poll_until(lambda: is_ready(found.workers), "a data worker")
        assert list(found.workers.notes)[1:] == ["1 data worker is started again"]
        found.dataset.num_reads = 0
        found.expect(step_of(0))
        found.same(*step_of(0)[0])
        assert found.dataset.num_reads == 0


def test_failures_count_no_more_after_many_micro_batches_were_read() -> None:
    workers, batch = DataWorkers(0, spec_of("drawn")), (0, 0, ("x",))
    reader = SimpleNamespace(answered=lambda _said, _wanted: batch)
    for _ in range(4):
        for _ in range(MOST_FAILURES - 1):
            workers._take_in(reader, {"slot": 0, "error": "no route to host"})  # type: ignore[arg-type]
        for _ in range(NUM_RESTORING):
            workers._take_in(reader, {"slot": 0})  # type: ignore[arg-type]
    assert list(workers.notes) == []
    for _ in range(MOST_FAILURES):
        workers._take_in(reader, {"slot": 0, "error": "no route to host"})  # type: ignore[arg-type]
    assert [note.partition(" (")[0] for note in workers.notes] == ["data workers failed 8 times"]


@pytest.mark.parametrize(("job", "kind"), [("broken", OSError), ("wrong", JobError)])
def test_an_error_in_a_sample_is_the_loaders_own(job: str, kind: type[Exception]) -> None:
    with reading(job, 1) as found:
        errors = []
        found.expect([place for step in range(4) for place in step_of(step)], ["x"])
        for place in [place for step in range(4) for place in step_of(step)]:
            for loader in (found.prefetcher, found.alone):
                try:
                    loader.load(*place, ["x"])
                except kind as error:
                    errors.append((place, type(error), str(error)))
        assert len(errors) == 2 * (24 // 20), "each sample comes once in an epoch"
        assert errors[0] == errors[1]
        assert str(BROKEN) in errors[0][2]
        assert found.workers.pids, "it reads on"


def test_a_data_worker_does_without_the_compiler_also_with_deterministic_kernels() -> None:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        with reading("loaded", 1, is_forked=False) as found:
            found.expect(step_of(0), ["compiler", "determinism"])
            batch = found.prefetcher.load(0, 0, ["compiler", "determinism"])
    finally:
        torch.set_deterministic_debug_mode(before)
    assert found.dataset.num_reads == 0
    assert not batch["compiler"].any()
    assert batch["determinism"].tolist() == [2] * M


def test_a_data_worker_that_finds_other_data_is_not_used() -> None:
    with reading("elsewhere", 1, known=data_facts(read_jobs.elsewhere)) as found:
        assert found.workers.pids == ()
        found.expect(step_of(0), ["x"])
        found.same(0, 0, ["x"])
    with reading("evaluated", 1, known=data_facts(read_jobs.evaluated)) as found:
        assert found.workers.pids


def test_a_data_worker_that_cannot_build_its_data_set_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORPH_TEST_BUILDS", str(os.getpid()))
    with reading("built_here", 1) as found:
        poll_until(lambda: is_ready(found.workers) and not found.workers.pids, "its end")
        found.expect(step_of(0))
        found.same(0, 0)


@pytest.mark.usefixtures("shared")  # files that the first data workers of a process open stay open
def test_closing_leaves_no_process_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with reading("drawn", 1, is_forked=False) as found:
        found.expect(step_of(0))
        found.same(0, 0)
        pids = found.workers.pids
    assert not any(is_there(pid) for pid in pids)
    del found
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def read_for_ever(line: Connection) -> None:
    with reading("slow", 1, is_forked=False) as found:
        found.expect(step_of(0))
        line.send(found.workers.pids)
        line.recv()


def test_data_workers_end_with_a_worker_that_is_killed_while_they_read() -> None:
    line, theirs = FORKS.Pipe()
    with line, theirs:
        worker = FORKS.Process(target=read_for_ever, args=(theirs,), daemon=True)
        worker.start()
        assert line.poll(BOUND_S)
        (pid,) = line.recv()
        assert is_there(pid)
        worker.kill()
        poll_until(lambda: not is_there(pid), "data workers to end with their worker")
        worker.join()


def test_batches_for_a_device_are_contiguous_and_pinned(drawn: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []
    empty = torch.empty

    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        pinned.append(pin_memory)
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(drawn.workers, "_pinned", True)
    drawn.expect(step_of(80))
    found = drawn.prefetcher.load(80, 0, ["picture"])["picture"]
    assert any(pinned)
    assert found.is_contiguous()
    assert torch.equal(found, drawn.alone.load(80, 0, ["picture"])["picture"])

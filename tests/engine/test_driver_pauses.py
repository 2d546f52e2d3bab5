"""The live loop when the journal cannot be written for a while: it pauses, reports that once, and continues."""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from manager.controller.state.actions import ReasonCode
from manager.controller.state.state import Phase
from manager.engine.loop import checkpoint_store
from manager.engine.loop.driver import Observed
from manager.journal import journal as journal_module
from manager.journal import journal as patience
from manager.journal.replay import replay
from manager.run_dir import JOURNAL
from morph.checkpoint.manifest import complete_versions
from morph.contract.errors import RunDirStuck
from tests.engine.driver_scene import Run
from tests.small_disk import read_only, small_disk
from tests.waiting import own_time


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the journal as another process would."""
    other = sqlite3.connect(path / JOURNAL, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


class Pauses:
    """Advances the run's clock by an hour for each sleep; the fault ends after three pauses."""

    def __init__(self, run: Run, trouble: ExitStack) -> None:
        self._run, self._trouble, self.num = run, trouble, 0
        self._thread, self._sleep = threading.current_thread(), time.sleep

    def __call__(self, pause_s: float) -> None:
        if threading.current_thread() is not self._thread:  # one that an earlier test left
            self._sleep(pause_s)
            return
        self.num += 1
        clock = self._run.event_queue.now_s
        self._run.event_queue.now_s = lambda: clock() + 3600.0
        if self.num == 3:
            self._trouble.close()


@pytest.mark.parametrize("kind", ["locked", "full"])
def test_hours_without_a_writable_journal_are_a_pause_without_cost(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "WRITER_BUSY_S", 0.01)
    with ExitStack() as disks, ExitStack() as trouble:
        disk = disks.enter_context(small_disk(tmp_path / "disk")) if kind == "full" else None
        run = Run(disk.path if disk else tmp_path, 6, 2)
        disks.callback(run.journal.close)
        pauses = Pauses(run, trouble)
        own_time(monkeypatch, patience, sleep=pauses)

        def begin(observed: Observed) -> None:
            if observed.decision.state.version == 3 and not pauses.num:
                if disk:
                    disk.fill()
                    trouble.callback(disk.free)
                else:
                    trouble.enter_context(locked(tmp_path))

        run.react = begin
        assert run.driver.run().outcome == "finished"
        assert pauses.num == 3
        assert set(run.driver.state.workers) == {"vm0", "vm1"}, "orders' time did not run"
        assert run.driver.state.generation == 1
        assert replay(run.journal) == run.driver.state
    told = [record.message for record in caplog.records]
    assert [line for line in told if "the run pauses" in line] == told[:1]
    assert ("database is locked" if kind == "locked" else "database or disk is full") in told[0]
    assert "goes on after a pause" in told[1]
    assert len(told) == 2


def test_a_journal_stuck_beyond_the_users_limit_ends_the_run(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "WRITER_BUSY_S", 0.01)
    run, now_s = make_run(), iter(range(0, 10**9, 86400))
    own_time(monkeypatch, patience, sleep=lambda _s: None, monotonic=lambda: float(next(now_s)))
    with locked(tmp_path), pytest.raises(RunDirStuck, match="database is locked"):
        run.driver.run()


@pytest.mark.parametrize("kind", ["read-only", "full", "injected"])
def test_the_last_manifest_waits_for_storage_and_the_run_ends_saved(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_run: Callable[..., Run]
) -> None:
    run, trouble, tried = make_run(), ExitStack(), [0]
    checkpoints = Path(run.url)
    if kind == "full":
        disk = trouble.enter_context(small_disk(checkpoints))
    write = checkpoint_store.write_manifest

    def attempt(url: str, manifest: object) -> None:
        """Let two attempts fail for real."""
        tried[0] += 1
        with ExitStack() as now:
            if tried[0] <= 2:
                if kind == "read-only":
                    now.enter_context(read_only(checkpoints))
                elif kind == "full":
                    disk.fill()
                    now.callback(disk.free)
                else:
                    raise OSError(errno.ENOSPC, "No space left on device")
            write(url, manifest)

    with trouble:
        monkeypatch.setattr(checkpoint_store, "write_manifest", attempt)
        run = _without_earlier_checkpoints(run)
        assert run.driver.run().outcome == "finished"
        assert tried[0] == 3
        assert complete_versions(run.url)[-1] == 6
    told = [seen.decision.reason.sentence for seen in run.observed if seen.event.kind == "checkpoint_failed"]
    assert len(told) == 2
    assert all("the manifest of version 6 cannot be written" in sentence for sentence in told)


def _without_earlier_checkpoints(run: Run) -> Run:
    """Configure a run in which only the last manifest is written."""
    policy = run.config.policy.model_copy(update={"checkpoint_every_steps": 100})
    run.driver.state = run.driver.state.model_copy(update={"config": run.config.model_copy(update={"policy": policy})})
    return run


def test_a_run_directory_that_becomes_read_only_costs_no_step(
    make_run: Callable[..., Run], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole folder is read-only: open files of the journal can still be written, but no file can be made."""
    run, trouble = make_run(num_steps=12), ExitStack()
    refused: list[int] = []

    def look(observed: Observed) -> None:
        state, event = observed.decision.state, observed.event
        if state.version == 3 and state.phase is Phase.TRAINING and not refused:
            trouble.enter_context(read_only(tmp_path))
            refused.append(0)
        if event.kind == "checkpoint_failed":
            refused.append(event.version)
            if event.version == 12:  # an earlier manifest may fail this late
                trouble.close()

    run.react = look
    with trouble:
        assert run.driver.run().outcome == "finished"
    assert run.driver.state.generation == 1
    assert refused[-1] == 12
    assert complete_versions(run.url)[-1] == 12
    assert replay(run.journal) == run.driver.state
    assert caplog.messages == []  # the journal did not have to wait
    told = [seen.decision for seen in run.observed if seen.event.kind == "checkpoint_failed"]
    assert "Read-only file system" in told[0].reason.sentence
    while_training = [one.reason.code for one in told if one.state.phase is not Phase.SEALING]
    assert while_training.count(ReasonCode.CHECKPOINT_ABANDONED) <= 1  # and again when the end waits for storage

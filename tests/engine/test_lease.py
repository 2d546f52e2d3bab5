"""Only one manager at a time writes checkpoints at a URL.

The next one waits, notices the first one's death, or takes over.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch

from manager.engine.loop import lease as lease_module
from manager.engine.loop.driver import Observed
from manager.engine.loop.lease import Lease, run_name, this_process
from manager.run_dir import RunDir, RunFacts
from morph.checkpoint.manifest import complete_versions, version_folders
from morph.contract.errors import CheckpointError, CheckpointsTaken, RunDirError
from morph.contract.messages import Heartbeat
from morph.runtime.attendants.checkpoint_writer import CheckpointWriter
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.state.unit_state import StateCopy
from tests.checkpoint.fake_blobs import CONTAINER, blob_service
from tests.checkpoint.fake_buckets import bucket_service
from tests.engine.driver_scene import Run
from tests.waiting import BOUND_S, Clock


@pytest.fixture(params=["a folder", "memory", "S3", "Azure"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "a folder":
        yield str(tmp_path / "checkpoints")
    elif request.param == "memory":
        yield f"memory://{uuid.uuid4().hex}/run"
    elif request.param == "S3":
        with bucket_service() as service:
            for name, value in service.environment.items():
                monkeypatch.setenv(name, value)
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            yield f"s3://{service.bucket}/run"
            fsspec.get_filesystem_class("s3").clear_instance_cache()
    else:
        adlfs = pytest.importorskip("adlfs")
        with blob_service() as blobs:
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", blobs.connection_string)
            adlfs.AzureBlobFileSystem.clear_instance_cache()
            yield f"abfs://{CONTAINER}/run"
            adlfs.AzureBlobFileSystem.clear_instance_cache()


@pytest.fixture
def clock() -> Clock:
    return Clock(1e9)


@pytest.fixture
def make(clock: Clock) -> Iterator[Callable[..., Lease]]:
    leases: list[Lease] = []

    def new(url: str, run: str, **changed: object) -> Lease:
        holder = this_process(run, Path("/runs") / run).model_copy(update=changed)
        leases.append(Lease(url, holder, now_s=clock))
        return leases[-1]

    yield new
    for lease in leases:
        lease.close()


def test_a_second_manager_is_refused_and_the_holder_named(url: str, make: Callable[..., Lease]) -> None:
    first, second = make(url, "one", host="there"), make(url, "two")
    assert first.take() is None
    for attempt in (second.take, second.check_free):
        with pytest.raises(RunDirError, match="its checkpoints are in use by") as refused:
            attempt()
        assert f"the run in /runs/one (process {os.getpid()} on there)" in str(refused.value)
        assert "--take-over" in str(refused.value)
    first.hold()
    first.close()
    second.check_free()
    assert second.take() is None


def test_a_lease_that_is_not_renewed_expires(url: str, make: Callable[..., Lease], clock: Clock) -> None:
    first, second = make(url, "one"), make(url, "two")
    first.take()
    clock.now_s += lease_module.LEASE_S - 1
    first.hold()
    clock.now_s += lease_module.LEASE_S
    with pytest.raises(RunDirError, match="180 s ago"):
        second.take()
    clock.now_s += 1
    assert second.take() is None
    with pytest.raises(CheckpointsTaken, match="were taken over by the run in /runs/two"):
        first.hold()
    with pytest.raises(CheckpointsTaken):
        first.check()
    first.close()  # and does not release another run's lease
    with pytest.raises(RunDirError):
        make(url, "three").take()


def test_a_lease_is_taken_over_by_force(url: str, make: Callable[..., Lease]) -> None:
    first, second = make(url, "one"), make(url, "two")
    first.take()
    taken_from = second.take(by_force=True)
    assert taken_from.run == "one"
    second.hold()
    with pytest.raises(CheckpointsTaken):
        first.hold()


def test_of_many_managers_one_gets_it(url: str, make: Callable[..., Lease]) -> None:
    if url.startswith("memory"):
        pytest.skip("fsspec's memory is looked at and written in two steps, which are not guarded among threads")
    leases = [make(url, f"run{number}") for number in range(6)]

    def take(lease: Lease) -> bool:
        try:
            lease.take()
        except RunDirError:
            return False
        return True

    with ThreadPoolExecutor(len(leases)) as pool:
        assert sum(pool.map(take, leases)) == 1


def test_the_next_manager_of_the_same_run_need_not_wait(make: Callable[..., Lease], tmp_path: Path) -> None:
    url, run = str(tmp_path / "checkpoints"), run_name(tmp_path)
    make(url, run, host="a machine that is gone", processes="").take()
    assert run_name(tmp_path) == run
    assert make(url, run_name(tmp_path)).take() is None


def test_a_copied_run_directory_is_another_run(make: Callable[..., Lease], tmp_path: Path) -> None:
    url, first, copied = str(tmp_path / "checkpoints"), tmp_path / "first", tmp_path / "copied"
    first.mkdir()
    run = run_name(first)
    make(url, run).take()
    shutil.copytree(first, copied)
    assert run_name(copied) != run
    assert run_name(copied) == run_name(copied)
    with pytest.raises(RunDirError, match="its checkpoints are in use by the run in"):
        make(url, run_name(copied)).take()
    assert run_name(first.rename(tmp_path / "moved")) == run


def test_workers_of_a_run_write_no_file_where_another_run_took_over(url: str, make: Callable[..., Lease]) -> None:
    """Their manager learns of it at its next check; the same run's next manager does not count as another run."""
    first, other = make(url, "one"), make(url, "two")
    writer = CheckpointWriter("w", url, FaultPlan([]))
    writer.lease = first.run
    first.take()
    assert [one.version for one in saved(writer, 1).written] == [1]
    make(url, "one").take()
    assert [one.version for one in saved(writer, 2).written] == [2]
    other.take(by_force=True)
    beat = saved(writer, 3)
    assert (beat.written, beat.error_version) == ((), 3)
    assert "its checkpoints were taken over by another run" in (beat.checkpoint_error or "")
    filesystem, path = fsspec.core.url_to_fs(url)
    assert sorted(version_folders(filesystem, path)) == [1, 2]


def saved(writer: CheckpointWriter, version: int) -> Heartbeat:
    writer.hand_over(version, "s0", StateCopy({"x": torch.ones(3)}))
    return writer.collect(BOUND_S)


def test_nor_does_another_run_where_the_process_is_known_to_be_dead(make: Callable[..., Lease], tmp_path: Path) -> None:
    url = str(tmp_path / "checkpoints")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(BOUND_S)
    make(url, "one", pid=ended.pid, processes="another machine's").take()
    with pytest.raises(RunDirError):
        make(url, "two").take()
    make(url, "three", pid=ended.pid).take(by_force=True)
    assert make(url, "four").take() is None


def test_an_invalid_file_is_not_a_lease(make: Callable[..., Lease], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lease-00000007.json").write_text("{")
    make(str(tmp_path), "one").take()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lease-00000008.json"]


def test_storage_without_an_answer_is_asked_again_before_something_is_written(
    make: Callable[..., Lease], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    lease = make(str(tmp_path / "checkpoints"), "one")
    for attempt in (lease.take, lease.hold):
        with pytest.raises(CheckpointError, match="cannot be written"):
            attempt()
    (tmp_path / "checkpoints").unlink()
    lease.hold()
    with pytest.raises(RunDirError):
        make(str(tmp_path / "checkpoints"), "two").take()


def test_storage_that_hangs_keeps_no_run_from_going_on(
    make: Callable[..., Lease], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, lease = threading.Event(), make(str(tmp_path), "one")
    newest = lease._newest
    monkeypatch.setattr(lease_module, "TAKE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(lease, "_newest", lambda: (answers.wait(BOUND_S), newest())[1])
    with pytest.raises(CheckpointError, match=r"cannot be written: storage took longer than 0\.05 s"):
        lease.take()
    answers.set()
    lease.hold()
    with pytest.raises(RunDirError):
        make(str(tmp_path), "two").take()


def test_checkpoints_in_the_directory_of_a_living_run_are_in_use(make: Callable[..., Lease], tmp_path: Path) -> None:
    facts = RunFacts(job="a.py:job", fingerprint="x", micro_batch_size=1, batch_size=1, num_sections=1)
    with RunDir(tmp_path / "run", facts), pytest.raises(RunDirError, match=f"process {os.getpid()}"):
        make(str(tmp_path / "run" / "checkpoints"), "other").check_free()
    make(str(tmp_path / "run" / "checkpoints"), "other").check_free()


def test_a_lease_is_renewed_while_nothing_is_saved(tmp_path: Path) -> None:
    seen, enough = [], threading.Event()

    def count() -> float:
        seen.append(1e9 + len(seen))
        if len(seen) > 10:
            enough.set()
        return seen[-1]

    lease = Lease(str(tmp_path), this_process("one", tmp_path), lease_s=0.03, now_s=count)
    lease.take()
    assert enough.wait(BOUND_S)
    lease.close()


def test_a_run_whose_checkpoints_are_taken_over_stops_and_writes_no_more(
    make_run: Callable[..., Run], make: Callable[..., Lease], tmp_path: Path
) -> None:
    """What the first of two managers has saved stays, and it saves nothing after the second begins."""
    url = str(tmp_path / "shared")
    first, second = make(url, "one"), make(url, "two")
    first.take()
    run, then = make_run(num_steps=10_000, url=url, lease=first), set[int]()

    def take_over(observed: Observed) -> None:
        if not then and observed.event.kind == "manifest_written":
            second.take(by_force=True)
            then.update(complete_versions(url))

    run.react = take_over
    with pytest.raises(CheckpointsTaken, match="this run stops, and writes nothing more there"):
        run.driver.run()
    assert len(set(complete_versions(url)) - then) <= 1, "more than the manifest that was on its way"
    second.hold()

"""Manifests and old checkpoints in the live loop, with slow and with failing storage."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection

import pytest
import torch

from manager.controller.state.events import MANIFEST_WRITER, CheckpointFailed, Event, ManifestWritten, UnitsWritten
from manager.engine.loop import checkpoint_store
from manager.engine.loop.driver import Observed
from manager.journal.records import Fact
from morph.checkpoint.manifest import complete_versions
from morph.checkpoint.unit_files import write_unit
from morph.contract.checkpoint import Manifest
from morph.contract.rules import CheckpointRules
from tests.checkpoint.fake_blobs import CONTAINER, blob_service
from tests.engine.driver_scene import Run
from tests.waiting import BOUND_S


def test_only_the_newest_checkpoints_are_kept(make_run: Callable[..., Run]) -> None:
    run = make_run(num_steps=9)
    run.driver.run()
    left = complete_versions(run.url)
    assert (len(left), left[-1]) == (CheckpointRules().keep_newest, 9)


def test_the_policy_of_the_run_says_which_checkpoints_stay(make_run: Callable[..., Run]) -> None:
    run = make_run(num_steps=13, checkpoints=CheckpointRules(keep_newest=1, keep_every_steps=5))
    run.driver.run()
    events = [observed.event for observed in run.observed]
    written = [event.version for event in events if event.kind == "manifest_written"]
    firsts = {version // 5: version for version in reversed(written)}
    assert len(firsts) > 1
    assert complete_versions(run.url) == tuple(sorted({*firsts.values(), 13}))


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("403 from the cloud")])
def test_a_failed_manifest_write_is_reported_to_the_controller(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run, failures = make_run(), [error]

    def fail_once(url: str, manifest: object) -> None:
        if failures:
            raise failures.pop()
        write(url, manifest)

    write = checkpoint_store.write_manifest
    monkeypatch.setattr(checkpoint_store, "write_manifest", fail_once)
    assert run.driver.run().outcome == "finished"
    told = [observed.event for observed in run.observed if observed.event.kind == "checkpoint_failed"]
    assert len(told) == 1
    assert told[0].worker == MANIFEST_WRITER
    assert str(error) in told[0].error
    assert complete_versions(run.url)[-1] == 6


def test_training_continues_while_slow_storage_writes_a_manifest(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, trained_on = make_run(num_steps=20), threading.Event()

    def write_late(url: str, manifest: object) -> None:
        if not trained_on.wait(BOUND_S):
            raise OSError("nothing was decided meanwhile")
        write(url, manifest)

    def look(observed: Observed) -> None:
        if observed.decision.state.version >= 10:
            trained_on.set()

    write = checkpoint_store.write_manifest
    monkeypatch.setattr(checkpoint_store, "write_manifest", write_late)
    run.react = look
    assert run.driver.run().outcome == "finished"
    assert not any(observed.event.kind == "checkpoint_failed" for observed in run.observed)
    assert complete_versions(run.url)[-1] == 20


def test_a_hanging_manifest_is_given_up_and_the_next_one_written(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, never = make_run(num_steps=40, checkpoints=CheckpointRules(file_timeout_s=0.3)), threading.Event()
    limits_s: list[float] = []

    def hang_once(url: str, manifest: Manifest) -> None:
        if manifest.version == 2:
            never.wait()
        else:
            write(url, manifest)

    def bounded(call: Callable[[], None], limit_s: float, what: str) -> None:
        """Bound only the hanging manifest; the others may be slow."""
        limits_s.append(limit_s)
        bound(call, limit_s if len(limits_s) == 1 else BOUND_S, what)

    def wait_for_the_bound(observed: Observed) -> None:
        if observed.decision.state.version == 30:
            assert given_up.wait(BOUND_S)

    given_up = threading.Event()
    put = run.event_queue.put

    def look(item: object) -> None:
        put(item)  # type: ignore[arg-type]
        if getattr(item, "kind", "") == "checkpoint_failed":
            given_up.set()

    write, bound = checkpoint_store.write_manifest, checkpoint_store.bounded
    monkeypatch.setattr(checkpoint_store, "write_manifest", hang_once)
    monkeypatch.setattr(checkpoint_store, "bounded", bounded)
    monkeypatch.setattr(run.event_queue, "put", look)
    run.react = wait_for_the_bound
    assert run.driver.run().outcome == "finished"
    (failed,) = [observed.event for observed in run.observed if observed.event.kind == "checkpoint_failed"]
    assert failed.error == "TimeoutError: storage took longer than 0.3 s"
    assert complete_versions(run.url)[-1] == 40
    never.set()


def test_old_checkpoints_that_cannot_be_deleted_are_noted_and_the_new_one_counts(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tried = make_run(num_steps=20), threading.Semaphore(0)

    def fail(url: str, rules: CheckpointRules, back_steps: int | None, spared: Collection[int]) -> None:
        tried.release()
        raise OSError("busy")

    def wait_for_the_storage(observed: Observed) -> None:
        if any(action.kind == "write_manifest" for action in observed.decision.actions):
            assert tried.acquire(timeout=BOUND_S)

    run.react = wait_for_the_storage

    monkeypatch.setattr(checkpoint_store, "delete_superfluous", fail)
    assert run.driver.run().outcome == "finished"
    kept = complete_versions(run.url)
    assert kept[0] == 2
    assert kept[-1] == 20
    assert len(kept) > CheckpointRules().keep_newest
    assert not any(observed.event.kind == "checkpoint_failed" for observed in run.observed)
    facts = [Fact.model_validate_json(entry.payload_json) for entry in run.journal.read() if entry.kind == "fact"]
    assert facts
    assert facts[0].detail == "OSError: busy"


@pytest.mark.slow
@pytest.mark.parametrize("refusal", [(503, "ServerBusy"), (403, "AuthenticationFailed")], ids=["away", "expired"])
def test_ten_minutes_without_storage_cost_no_step_and_are_reported_once(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, refusal: tuple[int, str]
) -> None:
    """Units and manifests go through Azure's SDK to a local service; a step takes ten seconds of the run's clock."""
    adlfs = pytest.importorskip("adlfs")

    async def at_once(*_: object) -> None:
        """Replaces the SDK's own pauses before retries, of 57 s in all each time."""

    monkeypatch.setattr("azure.storage.blob._shared.policies_async.AsyncStorageRetryPolicy.sleep", at_once)
    with blob_service() as blobs:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", blobs.connection_string)
        adlfs.AzureBlobFileSystem.clear_instance_cache()
        url = f"abfs://{CONTAINER}/run"
        run = make_run(num_steps=90, url=url)

        def write(worker: str, version: int, units: tuple[str, ...]) -> None:
            try:
                written = [write_unit(url, version, unit, worker, {"w": torch.full((8,), version)}) for unit in units]
            except Exception as error:
                run.event_queue.put(CheckpointFailed(worker=worker, error=f"{type(error).__name__}: {error}"))
            else:
                run.event_queue.put(UnitsWritten(worker=worker, written=tuple(written)))

        monkeypatch.setattr(run.pool, "_write", lambda *given: given[2] and write(*given))
        policy = run.config.policy.model_copy(update={"checkpoint_every_steps": None})
        config = run.config.model_copy(update={"policy": policy})
        run.driver.state = run.driver.state.model_copy(update={"config": config})
        began: list[tuple[float, tuple[int, ...]]] = []
        still_there: list[tuple[int, ...]] = []
        begin_s, passed_s = run.event_queue.now_s(), [0.0]
        run.event_queue.now_s = lambda: begin_s + passed_s[0]
        put, tried = run.event_queue.put, threading.Semaphore(0)

        def note(item: Event | Fact) -> None:
            put(item)
            if isinstance(item, ManifestWritten) or getattr(item, "worker", "") == MANIFEST_WRITER:
                tried.release()

        def look(observed: Observed) -> None:
            if any(action.kind == "write_manifest" for action in observed.decision.actions):
                assert tried.acquire(timeout=BOUND_S)  # steps take no time here: all could be done meanwhile
            passed_s[0] = 10.0 * observed.decision.state.version
            if observed.event.kind == "manifest_written" and not began:
                began.append((passed_s[0], complete_versions(url)))
                blobs.faults += [refusal] * 10_000
            if began and not still_there and passed_s[0] > began[0][0] + 600:
                with blobs.lock:
                    blobs.faults.clear()
                still_there.append(complete_versions(url))

        monkeypatch.setattr(run.event_queue, "put", note)
        run.react = look
        assert run.driver.run().outcome == "finished"
        kept = complete_versions(url)
        adlfs.AzureBlobFileSystem.clear_instance_cache()
    assert run.driver.state.generation == 1
    assert still_there == [began[0][1]]
    assert kept[-1] == 90
    codes = Counter(observed.decision.reason.code.value for observed in run.observed)
    assert codes["checkpoint_abandoned"] == 1
    sentences = [observed.decision.reason.sentence for observed in run.observed]
    (again,) = (sentence for sentence in sentences if "that storage refused" in sentence)
    assert "is complete, after 6 that storage refused" in again

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from morph.checkpoint.unit_files import read_unit
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.messages import Heartbeat, UnitWritten
from morph.contract.rules import CheckpointRules
from morph.runtime.attendants import checkpoint_writer
from morph.runtime.attendants.checkpoint_writer import CheckpointWriter
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.state.unit_state import StateCopy
from tests.small_disk import read_only, small_disk
from tests.waiting import BOUND_S


def collect(writer: CheckpointWriter, count: int) -> list[UnitWritten]:
    written: list[UnitWritten] = []
    while len(written) < count:
        beat = writer.collect(BOUND_S)
        assert beat.written, beat.checkpoint_error
        written += beat.written
    return written


def held_back(monkeypatch: pytest.MonkeyPatch, unit: str | None = None) -> tuple[threading.Event, threading.Event]:
    """Block the write of a unit, or of any, until the second event is set; the first is set once the write blocks."""
    begun, go_on = threading.Event(), threading.Event()
    write = checkpoint_writer.write_unit

    def write_when_allowed(url: str, version: int, of: str, *more: Any) -> UnitWritten:
        if unit in (None, of):
            begun.set()
            assert go_on.wait(BOUND_S)
        return write(url, version, of, *more)

    monkeypatch.setattr(checkpoint_writer, "write_unit", write_when_allowed)
    return begun, go_on


def test_units_are_written_in_order_and_reported_once(tmp_path: Path) -> None:
    writer = CheckpointWriter("w", str(tmp_path), FaultPlan([]))
    tensors = {f"s{index}": {"x": torch.full((3,), float(index))} for index in range(4)}
    for unit, state in tensors.items():
        writer.hand_over(8, unit, StateCopy(state))
    written = collect(writer, 4)
    assert [entry.unit for entry in written] == list(tensors)
    assert writer.collect(0.0) == Heartbeat(worker="w")
    files = tuple(UnitFile(**entry.model_dump(exclude={"worker", "version", "stall_s"})) for entry in written)
    manifest = Manifest(fingerprint="f", version=8, units=files)
    for unit, state in tensors.items():
        assert torch.equal(read_unit(str(tmp_path), manifest, unit)["x"], state["x"])


def test_a_failed_write_is_reported_and_the_next_one_is_tried(tmp_path: Path) -> None:
    (tmp_path / "v00000001").write_text("a file where a directory should be")
    writer = CheckpointWriter("w", str(tmp_path), FaultPlan([]))
    writer.hand_over(1, "s0", StateCopy({"x": torch.ones(1)}))
    beat = writer.collect(BOUND_S)
    assert beat.checkpoint_error is not None
    assert "unit s0, version 1" in beat.checkpoint_error
    assert not writer.has(1, "s0"), "it may be handed over again"
    writer.hand_over(2, "s0", StateCopy({"x": torch.ones(1)}))
    assert collect(writer, 1)[0].version == 2
    assert writer.collect(0.0).checkpoint_error is None


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_disk_failure_costs_only_the_writes_during_it(tmp_path: Path, trouble: str) -> None:
    with small_disk(tmp_path / "disk") as disk:
        url = disk.path / "checkpoints"
        writer = CheckpointWriter("w", str(url), FaultPlan([]))
        writer.hand_over(1, "s0", StateCopy({"x": torch.ones(9000)}))
        (first,) = collect(writer, 1)
        before = (url / "v00000001" / first.file).read_bytes()
        with ExitStack() as stack:
            if trouble == "full":
                disk.fill()
            else:
                stack.enter_context(read_only(url))
            writer.hand_over(2, "s0", StateCopy({"x": torch.ones(9000)}))
            error = writer.collect(BOUND_S).checkpoint_error
            assert error is not None
            assert {"full": "No space left on device", "read-only": "Read-only file system"}[trouble] in error
        disk.free()
        writer.hand_over(3, "s0", StateCopy({"x": torch.ones(9000)}))
        assert collect(writer, 1)[0].version == 3
        assert (url / "v00000001" / first.file).read_bytes() == before
        assert sorted(path.suffix for path in url.rglob("*") if path.is_file()) == [".safetensors"] * 2


def test_writes_are_reported_again_to_a_new_manager_except_old_versions(
    tmp_path: Path,
) -> None:
    writer = CheckpointWriter("w", str(tmp_path), FaultPlan([]))
    first = []
    for version in (1, 2, 3):
        writer.hand_over(version, "s0", StateCopy({"x": torch.ones(1)}))
        first += collect(writer, 1)
    writer.tell_again()
    writer.tell_again()  # a third manager, before the second one received it
    assert collect(writer, 2) == first[1:]
    assert writer.has(3, "s0")
    assert collect(writer, 1) == first[2:]
    assert not writer.has(1, "s0")
    assert not writer.has(3, "s1")


def test_a_writer_still_has_the_units_that_the_manifest_names(tmp_path: Path) -> None:
    writer = CheckpointWriter("w", str(tmp_path), FaultPlan([]))
    digests = {}
    for version in (1, 2, 3):
        writer.hand_over(version, "s0", StateCopy({"x": torch.full((2,), float(version))}))
        digests |= {entry.version: entry.sha256 for entry in collect(writer, 1)}
    copied = writer.copy(3, "s0", digests[3])
    assert copied is not None
    copied["x"] += 1  # only the caller's own
    again = writer.copy(3, "s0", digests[3])
    assert torch.equal(again["x"], torch.full((2,), 3.0))
    assert writer.copy(2, "s0", digests[2]) is not None
    assert writer.copy(3, "s0", digests[2]) is None, "another history wrote that"
    assert writer.copy(1, "s0", digests[1]) is None, "two versions are kept"
    assert writer.copy(3, "s1", digests[3]) is None


def test_files_written_before_going_back_belong_to_another_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = held_back(monkeypatch, unit="under way")
    writer = CheckpointWriter("w", str(tmp_path), FaultPlan([]))
    old, new = {"x": torch.zeros(1)}, {"x": torch.ones(1)}
    writer.hand_over(20, "s0", StateCopy(old))
    (kept,) = collect(writer, 1)
    writer.hand_over(40, "told of", StateCopy(old))
    (told,) = collect(writer, 1)
    writer.hand_over(40, "not told of", StateCopy(old))
    writer.hand_over(40, "under way", StateCopy(old))
    writer.hand_over(40, "waiting", StateCopy(old))
    assert begun.wait(BOUND_S)
    writer.forget_after(20)  # with one write under way, and another behind it
    names = ("told of", "not told of", "under way", "waiting")
    assert not any(writer.has(40, unit) for unit in names)
    assert writer.copy(40, "told of", told.sha256) is None
    go_on.set()
    for unit in names:
        writer.hand_over(40, unit, StateCopy(new))
    again = collect(writer, 4)
    assert {entry.unit for entry in again} == set(names)
    assert len({entry.sha256 for entry in again} | {told.sha256}) == 2  # only of the new history
    assert writer.copy(20, "s0", kept.sha256) is not None
    writer.forget_after(40)  # as in most changes, nothing is void
    assert all(writer.has(40, unit) for unit in names)


def test_a_possibly_best_version_is_written_before_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = held_back(monkeypatch)
    writer = CheckpointWriter("w", str(tmp_path), FaultPlan([]))
    for version, earlier in ((1, ()), (2, (1,)), (3, (1, 2)), (4, (1, 3))):
        writer.hand_over(version, "s0", StateCopy({"x": torch.full((1,), float(version))}), earlier)
    assert begun.wait(BOUND_S)
    go_on.set()
    assert [entry.version for entry in collect(writer, 3)] == [1, 3, 4]


def test_one_version_waits_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = held_back(monkeypatch)
    writer = CheckpointWriter("w", str(tmp_path), FaultPlan([]))
    for unit in ("s0", "s1", "s2"):
        writer.hand_over(1, unit, StateCopy({"x": torch.ones(1)}))
    assert begun.wait(BOUND_S)
    writer.hand_over(2, "s0", StateCopy({"x": torch.ones(1)}))  # version 1 is no longer awaited
    go_on.set()
    assert [(entry.version, entry.unit) for entry in collect(writer, 1)] == [(2, "s0")]
    assert not any(writer.has(1, unit) for unit in ("s0", "s1", "s2"))
    assert writer.collect(0.0) == Heartbeat(worker="w")


class OneHasty(CheckpointRules):
    """Gives up a file of one number soon; other files have enough time for a busy machine."""

    def file_limit_s(self, num_bytes: int) -> float:
        return 0.2 if num_bytes == torch.ones(1).nbytes else BOUND_S


def test_storage_that_hangs_is_given_up_and_the_next_file_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    write = checkpoint_writer.write_unit

    def hang_once(url: str, version: int, *more: Any) -> UnitWritten:
        if version == 1:
            never.wait()
        return write(url, version, *more)

    monkeypatch.setattr(checkpoint_writer, "write_unit", hang_once)
    writer = CheckpointWriter("w", str(tmp_path), FaultPlan([]), OneHasty())
    writer.hand_over(1, "s0", StateCopy({"x": torch.ones(1)}))
    beat = writer.collect(BOUND_S)
    assert beat.checkpoint_error == "unit s0, version 1: TimeoutError: storage took longer than 0.2 s"
    writer.hand_over(2, "s0", StateCopy({"x": torch.ones(2)}))
    assert collect(writer, 1)[0].version == 2
    never.set()


def test_a_network_that_fails_for_a_moment_costs_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [ConnectionError("reset"), OSError(5, "throttled")]
    write = checkpoint_writer.write_unit

    def fail_twice(*given: Any) -> UnitWritten:
        if failures:
            raise failures.pop()
        return write(*given)

    monkeypatch.setattr(checkpoint_writer, "write_unit", fail_twice)
    monkeypatch.setattr(checkpoint_writer, "PAUSES_S", (0.01, 0.01))
    writer = CheckpointWriter("w", "memory://moment", FaultPlan([]))
    writer.hand_over(1, "s0", StateCopy({"x": torch.ones(1)}))
    assert collect(writer, 1)[0].version == 1
    failures += [ConnectionError("reset")] * 3
    writer.hand_over(2, "s0", StateCopy({"x": torch.ones(1)}))
    assert writer.collect(BOUND_S).checkpoint_error == "unit s0, version 2: ConnectionError: reset"


def test_a_saves_cost_is_its_wait_and_the_processor_time_of_writing(
    tmp_path: Path,
) -> None:
    state = {"x": torch.ones(1 << 20)}
    on_device = CheckpointWriter("w", str(tmp_path), FaultPlan([]))
    copy = StateCopy(state)
    copy.finish()
    on_device.hand_over(1, "s0", copy)
    assert collect(on_device, 1)[0].stall_s == copy.waited_s > 0
    on_device.hand_over(2, "s0", StateCopy(state))
    assert collect(on_device, 1)[0].stall_s == 0
    on_processor = CheckpointWriter("w", str(tmp_path), FaultPlan([]), on_processor=True)
    on_processor.hand_over(3, "s0", StateCopy(state))
    assert collect(on_processor, 1)[0].stall_s > 0


def test_a_state_is_copied_before_it_changes_and_never_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = held_back(monkeypatch)
    writer = CheckpointWriter("w", str(tmp_path), FaultPlan([]))
    state = {f"s{index}": torch.full((1 << 16,), float(index)) for index in range(8)}
    copies = {unit: StateCopy({"x": tensor}) for unit, tensor in state.items()}
    for unit, copy in copies.items():
        writer.hand_over(1, unit, copy)
    assert begun.wait(BOUND_S)  # the first is being written, the others are copied, are being copied, or wait
    for unit, copy in copies.items():
        copy.finish()
        state[unit] += 100
    go_on.set()
    written = {entry.unit: entry for entry in collect(writer, 8)}
    files = tuple(UnitFile(**e.model_dump(exclude={"worker", "version", "stall_s"})) for e in written.values())
    manifest = Manifest(fingerprint="f", version=1, units=files)
    for index, unit in enumerate(state):
        assert torch.equal(read_unit(str(tmp_path), manifest, unit)["x"], torch.full((1 << 16,), float(index)))


def test_an_unwanted_copy_is_not_made() -> None:
    copy = StateCopy({"x": torch.ones(1)})
    copy.drop()
    assert copy.take() is None


def test_a_worker_writes_no_faster_than_it_may(tmp_path: Path) -> None:
    writer = CheckpointWriter("w", str(tmp_path), FaultPlan([]), CheckpointRules(bytes_per_s=4e5))
    begun_s = time.monotonic()
    for unit in ("s0", "s1"):
        writer.hand_over(1, unit, StateCopy({"x": torch.ones(10_000)}))  # 40 kB, which take a tenth of a second each
    written = collect(writer, 2)
    assert time.monotonic() - begun_s >= sum(entry.size_bytes for entry in written) / 4e5


def test_a_failed_copy_is_reported_and_the_next_state_written(tmp_path: Path) -> None:
    class Lost(StateCopy):
        def take(self) -> dict[str, torch.Tensor] | None:
            raise TypeError("can't convert a tensor of a lost device")

    writer = CheckpointWriter("w", str(tmp_path), FaultPlan([]))
    writer.hand_over(1, "s0", Lost({"x": torch.ones(1)}))
    assert "unit s0, version 1: TypeError: can't convert" in (writer.collect(BOUND_S).checkpoint_error or "")
    assert not writer.has(1, "s0")
    writer.hand_over(2, "s0", StateCopy({"x": torch.ones(1)}))
    assert [entry.version for entry in collect(writer, 1)] == [2]

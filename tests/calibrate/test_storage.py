"""Measurements of storage speed and of memory."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from calibrate.computing.peak import LiveBytes, peak_bytes
from calibrate.writing import storage
from calibrate.writing.storage import (
    check_upload_url,
    measure_checkpoint_speed,
    measure_host_copy,
    measure_upload_speed,
    temporary_folder,
)
from morph.contract.errors import ConfigError
from tests.members import FORKS
from tests.waiting import BOUND_S, poll_until


def test_writing_and_copying_have_a_speed() -> None:
    assert measure_checkpoint_speed(1) > 1e6
    assert measure_host_copy(torch.device("cpu"), 1) > 1e6


def test_an_upload_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("the user's", encoding="utf-8")
    check_upload_url(tmp_path.as_uri())
    assert measure_upload_speed(tmp_path.as_uri(), 1) > 1e6
    assert [entry.name for entry in tmp_path.iterdir()] == ["own.txt"]


def test_uploads_go_to_any_file_system() -> None:
    assert measure_upload_speed("memory://bucket/checkpoints", 1) > 1e6


@pytest.mark.parametrize("url", ["nosuch://bucket/folder", "{folder}/own.txt/below"])
def test_a_url_that_cannot_be_written_is_refused(tmp_path: Path, url: str) -> None:
    (tmp_path / "own.txt").write_text("a file, not a folder", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^checkpoint_url: cannot be written: .*\(got '.*'\); allowed: a place"):
        check_upload_url(url.format(folder=tmp_path))


def test_an_upload_that_breaks_off_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(url: str, *_: object) -> None:
        folder = Path(url.removeprefix("file://"))
        folder.mkdir()
        (folder / "half").write_bytes(b"half")
        raise OSError("the bucket is full")

    monkeypatch.setattr(storage, "write_unit", break_off)
    with pytest.raises(ConfigError, match="the bucket is full"):
        measure_upload_speed(tmp_path.as_uri(), 1)
    assert list(tmp_path.iterdir()) == []


def hold(line: Connection) -> None:
    with temporary_folder() as folder:
        (folder / "state").write_bytes(b"x" * 1000)
        line.send(folder)
        line.recv()


def test_a_folder_goes_with_its_block() -> None:
    with temporary_folder() as folder:
        (folder / "below").mkdir()
    assert not folder.exists()
    with pytest.raises(OSError, match="File exists"), temporary_folder() as folder:
        folder.mkdir()
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_folder_goes_with_its_process(ending: signal.Signals) -> None:
    line, theirs = FORKS.Pipe()
    with line, theirs:
        process = FORKS.Process(target=hold, args=(theirs,), daemon=True)
        process.start()
        assert line.poll(BOUND_S)
        folder = line.recv()
        assert (folder / "state").is_file()
        assert process.pid is not None
        os.kill(process.pid, ending)
        process.join(BOUND_S)
        poll_until(lambda: not folder.exists(), "the folder to go")


CPU = torch.device("cpu")
KIB = 1024


def block(kib: int = 1) -> Tensor:
    return torch.ones(kib * KIB // 4)


def test_freed_memory_no_longer_counts() -> None:
    def work() -> None:
        for _ in range(5):
            block(4)
        kept = [block(), block()]
        del kept

    assert peak_bytes(work, CPU) == 4 * KIB


def test_tensors_that_live_at_once_add_up() -> None:
    kept: list[Tensor] = []
    assert peak_bytes(lambda: kept.extend(block() for _ in range(3)), CPU) == 3 * KIB


def test_views_and_what_was_there_before_take_nothing() -> None:
    before = block(8)

    def work() -> None:
        before.add_(1.0).view(2, -1)[0].mul_(2.0)

    assert peak_bytes(work, CPU) == 0


def test_a_backward_counts_what_was_saved_for_it_and_its_gradients() -> None:
    weight = block(2).requires_grad_()

    def work() -> None:
        hidden = (weight * 2.0).sigmoid()  # autograd saves the result of this operation, but not that of the product
        torch.autograd.grad(hidden.sum(), weight)

    peak = peak_bytes(work, CPU)
    assert 4 * KIB <= peak <= 8 * KIB


def test_nothing_is_left_when_all_is_gone() -> None:
    with LiveBytes() as live:
        made = block(3)
        assert live.now == 3 * KIB
        del made
    assert (live.now, live.peak) == (0, 3 * KIB)

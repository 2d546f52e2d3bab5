"""Finding the VMs of a killed manager; the test plays the process that owns them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from manager.controller.decide import decide
from manager.controller.state.events import NodeAppeared
from manager.controller.state.state import initial_state
from manager.engine.local_vms.control_socket import hear, tell
from manager.engine.machines.attachment import Attachment, TakeoverFailed, find_living, write_attachment
from manager.journal.journal import Journal
from manager.journal.records import DIED_WITH_MANAGER, Fact
from manager.run_dir import ATTACHMENT, RunDir, RunFacts
from morph.contract.errors import RunDirError
from tests.engine.driver_scene import PROFILE, config_of
from tests.waiting import BOUND_S

FACTS = RunFacts(job="j", fingerprint=PROFILE.job.fingerprint, micro_batch_size=2, batch_size=8, num_sections=2)
COMMAND = {"--steps": "10", "--trace": "abc"}


class Host:
    """Accepts connections, and records how each ended."""

    def __init__(self, directory: Path) -> None:
        self.control_socket = directory / "control_socket"
        self.ended: list[bool] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.control_socket))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        manager, _ = self._listener.accept()
        with manager:
            with suppress(OSError):
                tell(manager, host=0, vms={"vm0": 1})
            request, _ = hear(manager)
            self.ended.append(request == {"end": True})

    def join(self) -> bool:
        self._thread.join(BOUND_S)
        return self.ended[-1]

    def close(self) -> None:
        if self._thread.is_alive():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as last:
                last.connect(str(self.control_socket))
            self._thread.join(BOUND_S)
        self._listener.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir(tmp_path / "run", FACTS) as opened:
        yield opened


@pytest.fixture
def host(socket_folder: Path, run_dir: RunDir) -> Iterator[Host]:
    started = Host(socket_folder)
    write_attachment(
        run_dir,
        Attachment(kind="ray", control_socket=started.control_socket, store_host="h", store_port=1, command=COMMAND),
    )
    yield started
    started.close()


def write_journal(run_dir: RunDir, generation: int = 0) -> None:
    event = NodeAppeared(node="vm0")
    decision = decide(initial_state(config_of(2)), event, 1.0)
    state = decision.state.model_copy(update={"generation": generation})
    with Journal.open(run_dir.journal_path) as journal:
        journal.append_config(0.0, config_of(2))
        journal.append_decision(1.0, event, decision.model_copy(update={"state": state}))
        journal.append_decision(2.0, event, decide(state, event, 2.0))
        journal._connection.execute("DELETE FROM snapshots")


def test_a_run_that_lives_is_found_with_the_state_of_its_journal(run_dir: RunDir, host: Host) -> None:
    write_journal(run_dir)
    found = find_living(run_dir, COMMAND)
    assert found.vms == ("vm0",)
    assert set(found.state.workers) == {"vm0"}
    assert found.appeared == {"vm0"}
    assert (run_dir.path / ATTACHMENT).stat().st_mode & 0o077 == 0
    found.line.close()
    assert not host.join()


def test_without_a_killed_manager_there_is_nothing_to_find(run_dir: RunDir) -> None:
    assert find_living(run_dir, COMMAND) is None


def test_another_command_than_the_runs_is_refused_and_the_run_lives_on(run_dir: RunDir, host: Host) -> None:
    write_journal(run_dir)
    with pytest.raises(
        RunDirError, match="--steps: differs from the value with which this run was started, and its VMs still live"
    ):
        find_living(run_dir, {**COMMAND, "--steps": "20"})
    assert not host.join()
    assert (run_dir.path / ATTACHMENT).exists()


def test_a_journal_of_another_controller_ends_the_vms(run_dir: RunDir, host: Host) -> None:
    write_journal(run_dir, generation=7)
    with pytest.raises(TakeoverFailed, match="another version of the controller"):
        find_living(run_dir, COMMAND)
    assert host.join()
    assert find_living(run_dir, COMMAND) is None


@pytest.mark.parametrize("left", ["no process", "no directory", "not a file of ours"])
def test_remains_of_a_dead_run_are_removed(run_dir: RunDir, tmp_path: Path, left: str) -> None:
    control_socket = tmp_path / "gone" / "control_socket"
    if left != "no directory":
        control_socket.parent.mkdir(mode=0o700)
    write_attachment(run_dir, Attachment(kind="ray", control_socket=control_socket, store_host="h", store_port=1))
    if left == "not a file of ours":
        (run_dir.path / ATTACHMENT).write_text("{")
    with pytest.raises(TakeoverFailed):
        find_living(run_dir, COMMAND)
    assert find_living(run_dir, COMMAND) is None


def test_a_socket_that_others_could_have_put_there_is_not_connected_to(run_dir: RunDir, host: Host) -> None:
    for directory in (host.control_socket.parent, host.control_socket.parent.parent):
        directory.chmod(0o755)
    with pytest.raises(TakeoverFailed, match="can be entered by others"):
        find_living(run_dir, COMMAND)


@pytest.mark.parametrize(("seen_s", "noted_s"), [(30.0, 30.0), (1.0, 2.0)], ids=["outlived it", "died with it"])
def test_until_when_vms_lived_whose_host_was_killed_is_written_down(
    run_dir: RunDir, host: Host, seen_s: float, noted_s: float
) -> None:
    write_journal(run_dir)
    host.close()
    os.utime(host.control_socket, (seen_s, seen_s))
    with pytest.raises(TakeoverFailed, match="the process that owned its VMs is gone"):
        find_living(run_dir, COMMAND)
    with Journal.open(run_dir.journal_path) as journal:
        last = journal.facts(0)[-1]
    assert Fact.model_validate_json(last.payload_json).name == DIED_WITH_MANAGER
    assert last.time_s == noted_s

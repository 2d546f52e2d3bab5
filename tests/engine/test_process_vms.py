"""VMs that are processes, handed from one manager to the next."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from manager.engine.joining.link_server import Entrance, LinkServer, listen
from manager.engine.local_vms.host_line import HostLine
from manager.engine.on_processes.process_vms import ProcessVms
from manager.host.processes import runs
from morph.contract.messages import Failed
from morph.link.encoding import ANSWER, pack, parts
from morph.link.proof import new_secret
from tests.engine.link_scene import Told
from tests.forked_modules import SUBPROCESS
from tests.waiting import BOUND_S, poll_until
from tests.worker_setup import SETUP

pytestmark = pytest.mark.slow


class Manager:
    """VMs, and the server to which their workers connect."""

    def __init__(self, entrance: Entrance, vms: ProcessVms) -> None:
        self.told, self.entrance, self.vms = Told(), entrance, vms

    @classmethod
    def begun(cls, log_path: Path, patience_s: float = BOUND_S) -> Manager:
        entrance = Entrance(listen("127.0.0.1"), new_secret())
        vms = ProcessVms.begin(entrance.listening, log_path, entrance.home, patience_s=patience_s)
        return cls(entrance, vms)

    def open(self) -> None:
        self.server = LinkServer(self.entrance, self.told)

    def die(self) -> None:
        """Act like the kernel when a manager is killed."""
        self.vms._line.close()
        self.server.close()

    def ask(self, worker: str) -> None:
        """Give an order that cannot be carried out, and return its answer."""
        self.told.lines[worker].send(pack("setup", SETUP))
        name, from_whom, body = self.told.next()
        assert (name, from_whom) == ("heard", worker)
        assert isinstance(body, bytes)
        kind, answer = parts(body)
        assert kind == ANSWER
        assert "no such file" in Failed.model_validate_json(answer).error


@pytest.fixture
def first(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """Start a manager with one VM, whose host waits as long as a test says for another manager."""
    monkeypatch.setattr("manager.engine.local_vms.host_line.subprocess", SUBPROCESS)
    patience_s = getattr(request, "param", BOUND_S)
    manager = Manager.begun(tmp_path / "log", patience_s)
    manager.vms.start()
    manager.open()
    manager.vms.add_vm("vm0")
    assert manager.told.next() == ("came", "vm0")
    manager.vms.settle()
    yield manager
    manager.vms.close()
    manager.server.close()


def wait_until_gone(pid: int, directory: Path) -> None:
    poll_until(lambda: not runs(pid) and not directory.exists(), f"the end of {pid} and {directory}")


def test_a_worker_outlives_its_manager_and_serves_the_next_one(first: Manager, tmp_path: Path) -> None:
    control_socket, (pid,) = first.vms.control_socket, first.vms.vm_pids("vm0")
    address = first.entrance.listening.getsockname()
    first.ask("vm0")
    first.die()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(address)
    line, greeting = HostLine.attach(control_socket, tmp_path)
    assert greeting["vms"] == {"vm0": pid}
    assert line.workers.getsockname() == address
    entrance = Entrance(line.workers, first.entrance.secret)
    vms = ProcessVms.take_over(line, control_socket, greeting["vms"], tmp_path / "log", entrance.home)
    second = Manager(entrance, vms)
    second.open()
    assert second.told.next() == ("came", "vm0")
    second.ask("vm0")
    second.vms.add_vm("vm1")
    assert second.told.next() == ("came", "vm1")
    second.ask("vm1")
    second.vms.kill("vm1")
    assert second.told.next() == ("died", "vm1")
    second.server.close()
    second.vms.close()
    wait_until_gone(pid, control_socket.parent)
    socket.create_server(address).close()  # no process holds it any more


@pytest.mark.parametrize("first", [1.0], indirect=True)
def test_when_no_other_manager_comes_everything_ends(first: Manager) -> None:
    control_socket, (pid,) = first.vms.control_socket, first.vms.vm_pids("vm0")
    first.die()
    wait_until_gone(pid, control_socket.parent)


@pytest.mark.parametrize("starts", ["pass", "threading.Thread(target=threading.Event().wait, daemon=True).start()"])
def test_a_job_is_imported_before_the_first_fork_unless_it_starts_a_thread(tmp_path: Path, starts: str) -> None:
    job, log_path = tmp_path / "job.py", tmp_path / "log"
    told = f"open({str(tmp_path / 'who')!r}, 'a').write(f'{{os.getpid()}} ')"
    job.write_text(f"import os, threading\n{told}\n{starts}\njob = None\n")
    manager = Manager.begun(log_path)
    try:
        assert not (tmp_path / "who").exists()
        assert not log_path.exists()
        manager.vms.start(f"{job}:job")
        manager.open()
        manager.vms.add_vm("vm0")
        assert manager.told.next() == ("came", "vm0")
        manager.ask("vm0")
        assert psutil.Process(manager.vms.pid).num_threads() == 1
        assert (tmp_path / "who").read_text() == f"{manager.vms.pid} "
    finally:
        manager.vms.close()
        manager.server.close()


def test_a_host_whose_manager_ends_before_it_is_needed_ends_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manager.engine.local_vms.host_line.subprocess", SUBPROCESS)
    manager = Manager.begun(tmp_path / "log")
    with manager.entrance.listening:
        pid, directory = manager.vms.pid, manager.vms.control_socket.parent
        manager.vms._tell(None)  # what the kernel does when a manager is killed
        wait_until_gone(pid, directory)
        manager.vms.close()


def test_that_a_process_ended_is_known_whether_it_called_or_not(first: Manager) -> None:
    assert not first.vms.has_ended("vm0")
    first.vms.add_vm("vm1")
    (pid,) = first.vms.vm_pids("vm1")
    os.kill(pid, signal.SIGKILL)
    poll_until(lambda: first.vms.has_ended("vm1"), "the end of vm1")
    first.vms.kill("vm0")
    assert first.vms.has_ended("vm0")

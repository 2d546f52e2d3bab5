"""Managers connect to a host one after the other; both ends of the connection, without VMs."""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from manager.engine.local_vms import control_socket as control_socket_module
from manager.engine.local_vms import host_line
from manager.engine.local_vms.control_socket import ControlSocket, hear, tell
from manager.engine.local_vms.host_line import HostLine
from morph.contract.errors import ClusterError
from tests.waiting import BOUND_S, poll_until


@pytest.fixture
def listener(socket_folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(socket_folder / "control_socket"))
        listening.listen(1)
        yield listening


def visitor(listener: socket.socket) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(listener.getsockname())
    return connection


def let_in(control_socket: ControlSocket) -> None:
    manager = control_socket.next()
    manager.close()


def test_a_host_that_starts_still_is_not_asked_to_end_but_killed(
    tmp_path: Path, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is Ctrl-C while Ray's head node boots: the host would not read a request until the node is up."""
    monkeypatch.setattr(host_line, "END_TIMEOUT_S", 600.0)
    (tmp_path / "deaf.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    line = HostLine.start("deaf", socket_folder / "control_socket", 0.0, tmp_path / "log", env=environment)
    assert not line.end()
    line.kill()
    assert not psutil.pid_exists(line.pid)


def test_after_a_manager_that_settled_the_next_one_is_waited_for(listener: socket.socket) -> None:
    control_socket = ControlSocket(listener, patience_s=BOUND_S)
    with visitor(listener):
        let_in(control_socket)
        control_socket.settle()
    late = threading.Timer(0.05, lambda: visitor(listener).close())
    late.start()
    let_in(control_socket)
    late.join()


@pytest.mark.parametrize(("settles", "patience_s"), [(False, 1000.0), (True, 0.0)])
def test_no_manager_is_awaited_after_an_unsettled_one_or_without_patience(
    listener: socket.socket, settles: bool, patience_s: float
) -> None:
    control_socket = ControlSocket(listener, patience_s)
    with visitor(listener):
        let_in(control_socket)
        if settles:
            control_socket.settle()
    assert control_socket.next() is None


def test_a_manager_that_leaves_without_settling_gains_no_time(listener: socket.socket) -> None:
    control_socket = ControlSocket(listener, patience_s=1.0)
    with visitor(listener), visitor(listener):
        let_in(control_socket)
        control_socket.settle()
        let_in(control_socket)
        until_s = control_socket._until_s
        assert control_socket.next() is None
        assert control_socket._until_s == until_s


def test_packets_go_both_ways_and_an_end_differs_from_a_death(listener: socket.socket) -> None:
    control_socket = ControlSocket(listener, patience_s=BOUND_S)
    with visitor(listener) as manager:
        host = control_socket.next()
        assert host is not None
        line = HostLine(manager, Path("log"))
        tell(host, host=0, vms={})
        assert line.greeting(BOUND_S) == {"host": 0, "vms": {}}
        line.send({"add": "a"})
        assert hear(host) == ({"add": "a"}, [])
        tell(host, name="a", pids=[1])
        assert line.receive("a", BOUND_S)["pids"] == [1]
        tell(host, name="b", error="no room")
        with pytest.raises(ClusterError, match="no room"):
            line.receive("b", BOUND_S)
        with pytest.raises(ClusterError, match=r"waited [\d.]+ s for c; see log"):
            line.receive("c", 0.01)
        assert line.end()
        assert hear(host) == ({"end": True}, [])
        assert hear(host) == (None, [])
        host.close()


def test_a_listener_gets_every_packet_and_then_the_end(listener: socket.socket) -> None:
    control_socket = ControlSocket(listener, patience_s=BOUND_S)
    with visitor(listener) as manager:
        host = control_socket.next()
        assert host is not None
        heard: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        HostLine(manager, Path("log")).listen(heard.put)
        tell(host, name="a", error="no room")
        tell(host, gone="b")
        host.close()
        packets = [heard.get(timeout=BOUND_S) for _ in range(3)]
        assert packets == [{"name": "a", "error": "no room"}, {"gone": "b"}, {}]


def test_the_end_of_a_host_is_reported_at_once(listener: socket.socket, socket_folder: Path) -> None:
    control_socket = ControlSocket(listener, patience_s=BOUND_S)
    connection = visitor(listener)
    line = HostLine(connection, socket_folder)
    host = control_socket.next()
    host.close()
    with pytest.raises(ClusterError, match="ended"):
        line.receive("anything", BOUND_S)
    with pytest.raises(ClusterError, match="gone"):
        line.send({"add": "a"})
    connection.close()
    control_socket.close()
    for path in (socket_folder / "control_socket", socket_folder / "never"):
        with pytest.raises(ClusterError, match="owned its VMs is gone"):
            HostLine.attach(path, socket_folder)


def test_a_packet_that_is_not_a_managers_ends_that_visit_alone() -> None:
    for packet in (b"{", b"\xff\xfe", b"[1]", b"[" * 60_000):
        inside, outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with inside, outside:
            outside.sendall(packet)
            assert hear(inside) == (None, [])


def test_the_vms_live_on_without_a_descriptor_for_the_next_manager(listener: socket.socket) -> None:
    class Short(socket.socket):
        num_failures = 3

        def accept(self) -> tuple[socket.socket, object]:
            if self.num_failures:
                self.num_failures -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    short = Short(fileno=os.dup(listener.fileno()))
    control_socket = ControlSocket(short, 0.0)
    with visitor(listener):
        let_in(control_socket)
    assert short.num_failures == 0
    short.close()


def test_a_host_without_a_manager_shows_that_it_lives(
    listener: socket.socket, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket_module, "SIGN_OF_LIFE_EVERY_S", 0.001)
    control_socket, path = ControlSocket(listener, patience_s=BOUND_S), socket_folder / "control_socket"
    with visitor(listener):
        let_in(control_socket)
        control_socket.settle()
    os.utime(path, (0, 0))

    def visit_after_signs() -> None:
        for _ in range(2):
            poll_until(lambda: path.stat().st_mtime > 0, "a sign of life")
            os.utime(path, (0, 0))
        visitor(listener).close()

    later = threading.Thread(target=visit_after_signs)
    later.start()
    let_in(control_socket)
    later.join(BOUND_S)

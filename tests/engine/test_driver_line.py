"""The connection to the process that is Ray's driver, and the launcher that uses it; the test plays the driver."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from manager.engine.on_ray import driver_line
from manager.engine.on_ray.driver_line import DriverLine
from manager.engine.on_ray.driver_messages import Hello, Kill, Nodes, Start, Told, read_order, write
from manager.engine.on_ray.launcher import RayLauncher
from morph.contract.errors import ClusterError
from morph.link.home import Home
from tests.waiting import BOUND_S, poll_until


class Drivers:
    def __init__(self) -> None:
        self._launched: queue.Queue[socket.socket] = queue.Queue()
        self._connection: socket.socket | None = None
        self.line = DriverLine(lambda descriptor: self._launched.put(socket.socket(fileno=os.dup(descriptor))))

    def next(self, **workers: str) -> None:
        """Become the next driver, which sees these workers' nodes."""
        self.end()
        self._connection = self._launched.get(timeout=BOUND_S)
        self._connection.settimeout(BOUND_S)
        self._orders = self._connection.makefile("rb")
        self.say(Hello())
        self.say(Nodes(workers=workers))
        assert self.line.wait_for_nodes(lambda nodes: nodes == workers, BOUND_S)

    def say(self, told: Hello | Told | Nodes) -> None:
        self.write(write(told))

    def write(self, line: bytes) -> None:
        self._connection.sendall(line)

    def order(self) -> Start | Kill:
        return read_order(self._orders.readline())

    def end(self) -> None:
        """End like a killed driver."""
        if self._connection is not None:
            self._orders.close()
            self._connection.close()
            assert self.line.wait_for_nodes(lambda nodes: nodes is None, BOUND_S)


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drivers]:
    monkeypatch.setattr(driver_line, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(driver_line, "LONGEST_PAUSE_S", 0.0)
    found = Drivers()
    found.line.start()
    yield found
    found.line.close()
    found.end()


@contextmanager
def launched(drivers: Drivers, *living: str) -> Iterator[tuple[RayLauncher, list[tuple[str, str]]]]:
    failed: list[tuple[str, str]] = []

    def home(worker: str) -> Home:
        return Home(worker=worker, host="127.0.0.1", port=1, secret=f"of {worker}")

    yield RayLauncher(drivers.line, home, lambda: living, lambda *told: failed.append(told)), failed


@pytest.mark.parametrize(
    "line",
    [b"garbage\n", b"\x80\x04.\n", b'{"kind":"nodes"}\n', b'{"kind":"told","worker":"vm0"}\n', b'{"kind":"nodes",\n'],
)
def test_a_driver_that_says_something_else_is_ended_and_another_one_is_started(drivers: Drivers, line: bytes) -> None:
    drivers.next(vm0="10.0.0.1")
    assert drivers.line.nodes == {"vm0": "10.0.0.1"}
    drivers.write(line)
    assert drivers.line.wait_for_nodes(lambda nodes: nodes is None, BOUND_S)
    with pytest.raises(ClusterError, match="not connected"):
        _ = drivers.line.nodes
    drivers.next(vm1="10.0.0.2")
    assert drivers.line.nodes == {"vm1": "10.0.0.2"}


def test_the_next_driver_gets_the_starts_and_kills_that_are_unconfirmed(
    drivers: Drivers,
) -> None:
    drivers.next()
    with launched(drivers) as (launcher, failed):
        for worker in ("vm0", "vm1", "vm2"):
            launcher.start_worker(worker, worker)
            order = drivers.order()
            assert isinstance(order, Start)
            assert (order.worker, order.exists) == (worker, False)
            assert f'"of {worker}"' in order.home.get_secret_value()
        for worker in ("vm0", "vm2"):
            drivers.say(Told(kind="started", worker=worker))
        drivers.say(Told(kind="ended", worker="vm2", cause="its VM is gone"))
        poll_until(lambda: failed == [("vm2", "its VM is gone")], "the VM to be known as gone")
        drivers.end()
        launcher.kill("vm0")
        launcher.start_worker("vm3", "vm3")
        drivers.next()
        orders = [drivers.order() for _ in range(3)]
        assert [(order.kind, order.worker) for order in orders] == [("kill", "vm0"), ("start", "vm1"), ("start", "vm3")]
        drivers.say(Told(kind="unreachable", worker="vm1"))
        assert drivers.order().worker == "vm1"
        assert failed == [("vm2", "its VM is gone")]


def test_of_another_managers_workers_living_ones_are_adopted(drivers: Drivers) -> None:
    drivers.next()
    with launched(drivers, "vm0", "vm1.d0", "vm2") as (launcher, failed):
        adopted: list[str] = []
        adopting = threading.Thread(target=lambda: adopted.extend(launcher.adopt()))
        adopting.start()
        for kind in ("started", "ended", "started"):
            order = drivers.order()
            assert isinstance(order, Start)
            assert order.exists
            drivers.say(Told(kind=kind, worker=order.worker))  # type: ignore[arg-type]
        adopting.join(BOUND_S)
        assert (adopted, failed) == (["vm0", "vm2"], [])


def test_where_no_driver_can_be_started_none_is_waited_for() -> None:
    def launch(_: int) -> None:
        raise ClusterError("the cluster is closed")

    line = DriverLine(launch)
    line.start()
    assert not line.wait_for_nodes(lambda nodes: nodes is not None, 0.0)
    assert not line.send(Kill(worker="vm0"))


def test_a_secret_is_in_no_text_about_an_order() -> None:
    order = Start(worker="vm0", vm="vm0", home="s3cret")  # type: ignore[arg-type]
    assert "s3cret" not in f"{order!r} {order}"
    assert b"s3cret" in write(order)

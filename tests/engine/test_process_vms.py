"""VMs that are processes, handed from one manager to the next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from manager.engine.host_line import HostLine
from manager.engine.process_pool import Lanes
from manager.engine.process_vms import ProcessVms
from morph.contract.messages import Failed
from morph.runtime.serving import pack
from tests.worker_setup import SETUP

BOUND_S = 60.0


@pytest.fixture
def first(tmp_path: Path) -> Iterator[ProcessVms]:
    """VMs of a manager with little patience for its successor; one is up."""
    vms = ProcessVms(tmp_path / "log", patience_s=1.0)
    vms.start()
    vms.add_vm("vm0")
    vms.settle()
    yield vms
    vms.close()


def die(vms: ProcessVms, lanes: Lanes) -> None:
    """What the kernel does to a manager that is killed."""
    assert vms._line is not None
    vms._line.close()
    lanes.orders.close()
    lanes.control.close()


def ask(lanes: Lanes) -> None:
    """Give an order that cannot be carried out, and get its answer."""
    lanes.orders.send_bytes(pack("setup", SETUP))
    assert lanes.orders.poll(BOUND_S)
    answer = Failed.model_validate_json(lanes.orders.recv_bytes())
    assert "no such file" in answer.error


def wait_until_gone(pid: int, directory: Path) -> None:
    until_s = time.monotonic() + BOUND_S
    while psutil.pid_exists(pid) or directory.exists():
        assert time.monotonic() < until_s, (pid, directory)
        time.sleep(0.01)


def test_a_worker_outlives_its_manager_and_serves_the_next_one(first: ProcessVms, tmp_path: Path) -> None:
    lanes, door, (pid,) = first.lanes("vm0"), first.door, first.vm_pids("vm0")
    ask(lanes)
    die(first, lanes)
    line, greeting = HostLine.attach(door, tmp_path)
    assert greeting["vms"] == {"vm0": pid}
    second = ProcessVms(tmp_path / "log")
    second.take_over(line, door, greeting["vms"])
    rejoined = second.rejoin_all()
    ask(rejoined["vm0"])
    second.add_vm("vm1")
    ask(second.lanes("vm1"))
    second.close()
    wait_until_gone(pid, door.parent)
    with rejoined["vm0"].orders as orders, pytest.raises((EOFError, ConnectionError)):
        orders.recv_bytes()


def test_when_no_other_manager_comes_everything_ends(first: ProcessVms) -> None:
    lanes, door, (pid,) = first.lanes("vm0"), first.door, first.vm_pids("vm0")
    die(first, lanes)
    wait_until_gone(pid, door.parent)

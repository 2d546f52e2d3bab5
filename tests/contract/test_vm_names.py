"""Workers and the VMs that they are on know one another by name."""

from __future__ import annotations

import pytest

from morph.contract.vm_names import beside, vm_of, workers_of


def test_the_only_worker_of_a_vm_has_its_name_and_several_are_numbered_by_device() -> None:
    assert workers_of("job-1-0", 1) == ("job-1-0",)
    assert workers_of("job-1-0", 3) == ("job-1-0.d0", "job-1-0.d1", "job-1-0.d2")


@pytest.mark.parametrize("num_devices", [1, 2, 12])
@pytest.mark.parametrize("vm", ["vm0", "job-1-0", "x-d0", "vm0.2"])
def test_every_worker_tells_its_vm(vm: str, num_devices: int) -> None:
    workers = workers_of(vm, num_devices)
    assert len(set(workers)) == num_devices
    assert {vm_of(worker) for worker in workers} == {vm}


def test_a_local_vm_that_came_back_is_another_vm() -> None:
    assert vm_of("vm0.2") == "vm0.2"
    assert beside("vm0", ["vm0", "vm0.2", "vm0.d1"]) == ()


def test_beside_a_worker_are_the_others_of_its_vm() -> None:
    assert beside("a.d1", ["b.d0", "a.d0", "a.d1", "a.d11", "ab.d0"]) == ("a.d0", "a.d11")

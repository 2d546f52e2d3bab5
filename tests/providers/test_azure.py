"""Spot VMs by the real SDK, on a resource manager on loopback."""

from __future__ import annotations

import json
import logging
import math
import stat
import threading
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from manager.providers.azure.client import DEFAULT_PAUSE_S, until_stopped
from manager.providers.interface.operations import Operations
from manager.providers.interface.provider import (
    CapacityShort,
    Misconfigured,
    ProviderError,
    QuotaExceeded,
    Throttled,
    Transient,
)
from tests.providers.azure_world import NODE_SECRET, RAY_TOKEN, SPEC, Hasty, Killed, Line, provider, trouble
from tests.providers.fake_arm import DISKS, FakeArm, Fault

pytestmark = pytest.mark.slow


def names(vms: object) -> list[str]:
    return [vm.name for vm in vms]  # type: ignore[attr-defined]


def puts(arm: FakeArm) -> list[str]:
    return [call for call in arm.calls if call.startswith("PUT virtualMachines/")]


def test_vms_come_with_fewest_gpus_first_and_spread_over_zones(arm: FakeArm, tmp_path: Path) -> None:
    vms = provider(arm, tmp_path).request("tiny-1", 5)
    assert sorted(names(vms)) == [f"tiny-1-{index}" for index in range(5)]
    assert {vm.size for vm in vms} == {"Standard_NC6"}
    assert sorted(vm.zone for vm in vms) == ["1", "1", "2", "2", "3"]
    assert {vm.request for vm in vms} == {"tiny-1"}
    assert arm.sets["tiny-1"]["zones"] == ["1", "2", "3"]


def test_a_full_zone_is_followed_by_the_next_then_another_size(arm: FakeArm, tmp_path: Path) -> None:
    arm.shortages = {("Standard_NC6", zone): "ZonalAllocationFailed" for zone in ("1", "2")}
    (vm,) = provider(arm, tmp_path).request("a", 1)
    assert (vm.zone, vm.size) == ("3", "Standard_NC6")
    arm.shortages["Standard_NC6", "3"] = "SkuNotAvailable"
    (vm,) = provider(arm, tmp_path).request("b", 1)
    assert vm.size == "Standard_NC24"
    assert len(arm.machines) == 2


def test_a_size_whose_type_names_a_zone_comes_in_no_other(arm: FakeArm, tmp_path: Path) -> None:
    sizes = tuple(SPEC.sizes[1].model_copy(update={"node_type": f"k80@{zone}"}) for zone in ("3", "1"))
    azure = provider(arm, tmp_path, spec=SPEC.model_copy(update={"sizes": sizes}))
    for zone in ("1", "3"):
        made = azure.request(f"in-{zone}", 2, node_type=f"k80@{zone}")
        assert [(vm.zone, vm.node_type) for vm in made] == [(zone, f"k80@{zone}")] * 2
    assert sorted(vm.node_type for vm in azure.list()) == ["k80@1", "k80@1", "k80@3", "k80@3"]
    arm.shortages = {("Standard_NC6", "1"): "AllocationFailed"}
    with pytest.raises(CapacityShort):
        azure.request("more", 1, node_type="k80@1")


def test_each_vm_has_its_sizes_price_from_its_creation_on(arm: FakeArm, tmp_path: Path) -> None:
    begin_s = time.time()
    cheap = provider(arm, tmp_path).request("a", 2)
    made_s = time.time()
    arm.shortages = {("Standard_NC6", zone): "AllocationFailed" for zone in SPEC.zones}
    (dear,) = provider(arm, tmp_path).request("b", 1)
    assert [vm.usd_per_h for vm in (*cheap, dear)] == [0.3, 0.3, 1.4]
    for vm in cheap:
        assert vm.paid_since_s is not None
        assert begin_s <= vm.paid_since_s <= made_s
    assert set(provider(arm, tmp_path).list()) == {*cheap, dear}
    sizes = tuple(size.model_copy(update={"usd_per_h": None}) for size in SPEC.sizes)
    listed = provider(arm, tmp_path, spec=SPEC.model_copy(update={"sizes": sizes}), find_price=lambda _: None).list()
    assert {vm.usd_per_h for vm in listed} == {None}


@pytest.mark.parametrize("ahead_s", [-3600.0, 86400.0])
def test_a_vms_paid_time_does_not_depend_on_the_local_clock(arm: FakeArm, tmp_path: Path, ahead_s: float) -> None:
    arm.ahead_s = ahead_s
    begin_s = time.time()
    (vm,) = provider(arm, tmp_path).request("a", 1)
    assert vm.paid_since_s is not None
    assert begin_s - 1.0 <= vm.paid_since_s <= time.time()  # an answer's date has whole seconds


def test_larger_vms_fill_what_smaller_ones_leave_missing(arm: FakeArm, tmp_path: Path) -> None:
    arm.shortages = {("Standard_NC6", zone): "AllocationFailed" for zone in ("2", "3")}
    azure = provider(arm, tmp_path, spec=SPEC.model_copy(update={"zones": ("2", "3")}))
    assert [(vm.size, vm.num_devices) for vm in azure.request("a", 6)] == [("Standard_NC24", 4)] * 2
    del arm.shortages["Standard_NC6", "2"]
    vms = provider(arm, tmp_path).request("b", 3)
    assert sum(vm.num_devices for vm in vms) == 3
    made = [body["tags"]["morph-devices"] for body in arm.bodies if body["tags"].get("morph-request") == "b"]
    assert made
    assert set(made) == {"1"}


def test_larger_vms_come_first_where_the_smaller_ones_would_be_too_many(arm: FakeArm, tmp_path: Path) -> None:
    azure = provider(arm, tmp_path)
    assert [vm.num_devices for vm in azure.request("a", 8, 2)] == [4, 4]
    assert [vm.num_devices for vm in azure.request("b", 2, 2)] == [1, 1]
    arm.shortages = {("Standard_NC24", zone): "AllocationFailed" for zone in SPEC.zones}
    assert [vm.num_devices for vm in azure.request("c", 8, 2)] == [1, 1]


def test_a_vm_that_another_manager_made_larger_counts_with_its_devices(arm: FakeArm, tmp_path: Path) -> None:
    class Dying(Line):
        """Killed once a larger VM has been begun."""

        def on_response(self, request: Any, response: Any) -> None:
            self.dead = self.dead or any(vm["tags"]["morph-devices"] == "4" for vm in arm.machines.values())
            super().on_response(request, response)

    arm.shortages = {("Standard_NC6", zone): "AllocationFailed" for zone in SPEC.zones}
    with pytest.raises(Killed):
        provider(arm, tmp_path, Dying()).request("a", 6)
    before = {name for name, vm in arm.machines.items() if vm["tags"]["morph-devices"] == "4"}
    arm.settle_all()
    arm.shortages = {}
    vms = provider(arm, tmp_path).request("a", 6)
    assert len(before) == 1
    assert before <= {vm.name for vm in vms}
    assert 6 <= sum(vm.num_devices for vm in vms) <= 8
    assert set(arm.machines) == {vm.name for vm in vms}


def test_some_of_what_was_asked_for_is_granted(arm: FakeArm, tmp_path: Path) -> None:
    arm.shortages = {(size.name, zone): "AllocationFailed" for size in SPEC.sizes for zone in ("1", "2", "3")}
    del arm.shortages["Standard_NC6", "2"]
    azure, grant = provider(arm, tmp_path, spec=SPEC.model_copy(update={"zones": ("1", "2")})), "a"
    assert len(azure.request(grant, 1)) == 1
    again = provider(arm, tmp_path)
    arm.shortages["Standard_NC6", "2"] = "AllocationFailed"
    assert names(again.request(grant, 1)) == ["a-0"]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT", "virtualMachines/", 500),
        Fault("PUT", "virtualMachines/", 503),
        Fault("PUT", "virtualMachines/", 409, "Conflict"),
        Fault("PUT", "virtualMachines/", drop=True),
        Fault("PUT", "virtualMachines/", drop=True, carried_out=True),
        Fault("PUT", "virtualMachineScaleSets/", 500, carried_out=True),
        Fault("GET", "virtualMachines", 502),
        Fault("PUT", "virtualMachines/", slow_s=20, carried_out=True, status=0),
    ],
    ids=lambda fault: f"{fault.method} {fault.kind} {fault.status} {fault.drop} {fault.slow_s}",
)
def test_after_an_error_the_same_request_makes_no_second_vm(arm: FakeArm, tmp_path: Path, fault: Fault) -> None:
    arm.faults = [fault]
    azure = provider(arm, tmp_path, Hasty() if fault.slow_s else None)
    assert isinstance(trouble(azure, "a", 2), Transient)
    assert sorted(names(azure.request("a", 2))) == ["a-0", "a-1"]
    assert set(arm.machines) == {"a-0", "a-1"}


def test_the_file_with_operations_is_for_its_owner_alone_and_is_emptied(arm: FakeArm, tmp_path: Path) -> None:
    path = tmp_path / "operations-tiny-1.json"
    line = Line(kill_at=7)
    with pytest.raises(Killed):
        provider(arm, tmp_path, line).request("a", 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["tokens"]
    provider(arm, tmp_path).request("a", 2)
    assert json.loads(path.read_text())["tokens"] == {}
    path.write_text("no")
    with pytest.raises(Misconfigured, match="damaged"):
        Operations(path)


def test_operations_are_noted_and_forgotten_by_two_threads_at_once(tmp_path: Path) -> None:
    path = tmp_path / "operations.json"
    kept = Operations(path)
    for number in range(50):
        kept.begun(f"old-{number}", "token")

    def end() -> None:
        for number in range(50):
            kept.ended(f"old-{number}")

    ends = threading.Thread(target=end)
    ends.start()
    for number in range(50):
        kept.begun(f"new-{number}", "token")
        kept.answered(f"r-{number}", (f"new-{number}",))
    ends.join()
    again = Operations(path)
    assert [again.token(f"old-{number}") for number in range(50)] == [None] * 50
    assert [again.token(f"new-{number}") for number in range(50)] == ["token"] * 50
    assert [again.answer(f"r-{number}") for number in range(50)] == [(f"new-{number}",) for number in range(50)]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_reconcile_ends_whatever_a_killed_manager_left(arm: FakeArm, tmp_path: Path, after: bool) -> None:
    for kill_at in range(100):
        directory = tmp_path / str(kill_at)
        directory.mkdir()
        line = Line(kill_at, after=after)
        azure = provider(arm, directory, line)
        try:
            azure.request("a", 2)
            azure.delete(["a-0"])
            done = not line.dead
        except Killed:
            done = False
        arm.settle_all()
        provider(arm, directory).dismantle()
        assert arm.machines == {}, f"killed at call {kill_at}"
        if done:
            break
    assert kill_at > 10


def test_another_manager_continues_wherever_the_first_was_killed(arm: FakeArm, tmp_path: Path) -> None:
    for kill_at in range(100):
        directory = tmp_path / str(kill_at)
        directory.mkdir()
        line = Line(kill_at, after=True)
        try:
            provider(arm, directory, line).request("a", 2)
            done = not line.dead
        except Killed:
            done = False
        second = provider(arm, directory)
        assert sorted(names(second.request("a", 2))) == ["a-0", "a-1"]
        assert set(arm.machines) == {"a-0", "a-1"}, f"killed at call {kill_at}"
        second.delete(["a-0", "a-1"])
        if done:
            break
    assert kill_at > 5


def test_an_evicted_vm_disappears_and_another_can_be_requested(arm: FakeArm, tmp_path: Path) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 2)
    assert azure.evict("a-1")
    assert "POST virtualMachines/a-1/simulateEviction" in arm.calls
    assert names(azure.list()) == ["a-0"]
    assert names(azure.request("b", 1)) == ["b-0"]
    with pytest.raises(Misconfigured, match="not there"):
        azure.evict("a-1")


def test_azure_evicts_only_spot_vms_and_only_those_of_the_run(arm: FakeArm, tmp_path: Path) -> None:
    provider(arm, tmp_path, run="tiny-2").request("b", 1)
    with pytest.raises(Misconfigured, match="not of this run: it is left alone"):
        provider(arm, tmp_path).evict("b-0")
    assert not provider(arm, tmp_path, run="tiny-2", spec=SPEC.model_copy(update={"spot": False})).evict("b-0")
    assert not any(call.endswith("simulateEviction") for call in arm.calls)
    assert set(arm.machines) == {"b-0"}


def test_no_secret_is_logged_or_kept(arm: FakeArm, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    azure = provider(arm, tmp_path)
    azure.request("a", 1)
    arm.faults = [Fault("PUT", "virtualMachines/", 400, "InvalidParameter")]
    with pytest.raises(Misconfigured) as raised:
        azure.request("b", 1)
    kept = "".join(path.read_text() for path in tmp_path.iterdir())
    for secret in (RAY_TOKEN, NODE_SECRET):
        for text in (caplog.text, str(raised.value), kept, json.dumps(arm.machines)):
            assert secret not in text
    assert caplog.text


UNKNOWN = {
    "404 of the group": Fault("GET", "virtualMachines", 404, "ResourceGroupNotFound", times=9),
    "404": Fault("GET", "virtualMachines", 404, "ResourceNotFound", times=9),
    "401": Fault("GET", "virtualMachines", 401, "InvalidAuthenticationToken", times=9),
    "403": Fault("GET", "virtualMachines", 403, "AuthorizationFailed", times=9),
    "503": Fault("GET", "virtualMachines", 503, times=9),
    "a page of a proxy": Fault("GET", "virtualMachines", text="<html>Sign in</html>", carried_out=True, times=9),
    "no list": Fault("GET", "virtualMachines", text="{}", carried_out=True, times=9),
    "a list of something else": Fault("GET", "virtualMachines", text='{"value": [1]}', carried_out=True, times=9),
    "a VM without tags that say what it is": Fault(
        "GET",
        "virtualMachines",
        text='{"value": [{"name": "a-0", "tags": {"morph-run": "tiny-1", "morph-job": "tiny", "morph-devices": "x"}}]}',
        carried_out=True,
        times=9,
    ),
}


@pytest.mark.parametrize("fault", UNKNOWN)
def test_an_answer_without_a_list_is_an_error(arm: FakeArm, tmp_path: Path, fault: str) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 2)
    known = UNKNOWN[fault]
    arm.faults = [Fault(**{**known.__dict__})]
    for ask in (azure.list, azure.dismantle, lambda: azure.delete(["a-0", "a-1"])):
        with pytest.raises(ProviderError):
            ask()
    arm.faults = []
    assert set(arm.machines) == {"a-0", "a-1"}
    assert len(azure.list()) == 2


def test_a_second_page_that_fails_makes_the_whole_list_unknown(arm: FakeArm, tmp_path: Path) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 5)
    first = Fault("GET", "virtualMachines", carried_out=True)
    arm.faults = [first, Fault("GET", "virtualMachines", 404, "ResourceNotFound")]
    with pytest.raises(ProviderError):
        azure.list()
    assert len(azure.list()) == 5


def test_a_foreign_vm_in_the_runs_scale_set_survives(arm: FakeArm, tmp_path: Path) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 2)
    arm.put_by_others("stranger", scale_set="tiny-1")
    arm.put_by_others("cousin", run="tiny-2", scale_set="tiny-1")
    with pytest.raises(Misconfigured, match="scale set tiny-1 is left: it holds cousin, stranger"):
        azure.dismantle()
    assert set(arm.machines) == {"cousin", "stranger"}
    assert set(arm.sets) == {"tiny-1"}
    for name in ("cousin", "stranger"):
        del arm.machines[name]
    azure.dismantle()
    assert arm.sets == {}


def test_a_foreign_vm_under_our_name_is_left_alone(arm: FakeArm, tmp_path: Path) -> None:
    arm.put_by_others("a-0")
    azure = provider(arm, tmp_path)
    with pytest.raises(Misconfigured, match="a-0 exists without the tags of this run"):
        azure.request("a", 2)
    azure.delete(["a-0", "a-1"])
    assert arm.machines["a-0"]["tags"] == {"owner": "somebody"}


def test_vms_of_the_same_run_name_and_another_job_are_left_alone(arm: FakeArm, tmp_path: Path) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 1)
    arm.put_by_others("other", run="tiny-1")
    arm.machines["other"]["tags"]["morph-job"] = "another"
    azure.delete(["a-0", "other"])
    assert set(arm.machines) == {"other"}


@pytest.mark.parametrize(
    ("status", "code", "again"),
    [(409, "ScopeLocked", False), (403, "AuthorizationFailed", False), (409, "Conflict", True), (503, "Busy", True)],
)
def test_a_vm_that_may_not_be_ended_keeps_none_of_the_others(
    arm: FakeArm, tmp_path: Path, status: int, code: str, again: bool
) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 4)
    for end in (lambda: azure.delete(["a-0", "a-1"]), azure.dismantle):
        arm.faults = [Fault("DELETE", "virtualMachines/a-0", status, code)]
        with pytest.raises(Transient if again else Misconfigured, match=f"a-0 is left: {code}: injected") as raised:
            end()
        assert "a-1" not in str(raised.value)
    assert set(arm.machines) == {"a-0"}
    assert set(arm.sets) == {"tiny-1"}
    azure.dismantle()
    assert (arm.machines, arm.sets) == ({}, {})


def test_every_end_is_begun_before_any_is_waited_for(arm: FakeArm, tmp_path: Path) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 4)
    arm.calls.clear()
    arm.num_polls = 3
    azure.delete([f"a-{index}" for index in range(4)])
    deletes = [index for index, call in enumerate(arm.calls) if call.startswith("DELETE")]
    assert len(deletes) == 4
    assert arm.machines == {}
    assert not any("virtualMachines/" in call for call in arm.calls[deletes[-1] + 1 :])


def test_the_longest_wait_that_azure_asks_for_applies(arm: FakeArm, tmp_path: Path) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 3)
    arm.faults = [
        Fault("DELETE", "virtualMachines/a-0", 429, "TooManyRequests", {"Retry-After": "600"}),
        Fault("DELETE", "virtualMachines/a-1", 429, "TooManyRequests", {"Retry-After": "170"}),
    ]
    with pytest.raises(Transient) as raised:
        azure.dismantle()
    assert raised.value.retry_after_s == 600
    assert set(arm.machines) == {"a-0", "a-1"}


def test_a_refused_token_is_replaced_and_the_call_repeated(arm: FakeArm, tmp_path: Path) -> None:
    tokens = iter(["old", "new", "newer", "newest"])
    azure = provider(arm, tmp_path, Line(), next_token=lambda: next(tokens))
    azure.request("a", 1)
    arm.expired = {"old"}
    azure.dismantle()
    assert arm.machines == {}
    arm.expired |= {"new", "newer"}  # one new token is tried for each call
    with pytest.raises(Transient, match="ExpiredAuthenticationToken"):
        azure.list()
    assert azure.list() == ()


@pytest.mark.parametrize("num_good", [3, 0])
def test_a_vm_taken_while_it_is_made_costs_none_of_the_others(arm: FakeArm, tmp_path: Path, num_good: int) -> None:
    arm.evicted = {f"a-{index}" for index in range(4 - num_good)}
    azure = provider(arm, tmp_path)
    if num_good:
        assert sorted(names(azure.request("a", 4))) == ["a-1", "a-2", "a-3"]
    else:
        with pytest.raises(Transient, match=r"a-[0-3] was made, and was gone at once"):
            azure.request("a", 4)
    assert len(arm.machines) == num_good
    assert not any(call.startswith("DELETE") for call in arm.calls)


@pytest.mark.parametrize("begun", [True, False])
def test_an_error_to_fix_for_one_vm_leaves_the_others(arm: FakeArm, tmp_path: Path, begun: bool) -> None:
    if begun:
        arm.shortages = {("Standard_NC6", "2"): "RequestDisallowedByPolicy"}
    else:
        arm.faults = [Fault("PUT", "virtualMachines/a-1", 403, "RequestDisallowedByPolicy")]
    vms = provider(arm, tmp_path).request("a", 3)
    assert names(vms) == (["a-0", "a-2"] if begun else ["a-0"])  # the rest would be refused for the same reason
    arm.settle_all()
    assert set(arm.machines) == set(names(vms))


def test_the_end_of_a_vms_boot_log_is_known_where_azure_has_one(arm: FakeArm, tmp_path: Path) -> None:
    azure = provider(arm, tmp_path)
    azure.request("a", 1)
    arm.boot_logs = {"a-0": "." * 5000 + "\na-0: no space left on device\n"}
    assert azure.boot_log("a-0").endswith("...\na-0: no space left on device\n")
    assert len(azure.boot_log("a-0")) <= 2000
    assert azure.boot_log("a-1") == ""
    arm.boot_logs["a-0"] = ""  # it has no output yet
    assert azure.boot_log("a-0") == ""


def test_leftovers_of_vms_are_deleted_and_named_with_their_price(arm: FakeArm, tmp_path: Path) -> None:
    arm.staying = {"a-0-nic", "a-1_OsDisk_1_5f2c", "b-0_OsDisk_1_5f2c", "users-own"}
    arm.parts[DISKS, "users-own"] = {"vm": "a-0", "tags": {}}
    azure = provider(arm, tmp_path, find_disk_price=lambda sku, gib: {("Premium_LRS", 128): 0.027}.get((sku, gib)))
    azure.request("a", 2)
    provider(arm, tmp_path, run="another").request("b", 1)
    provider(arm, tmp_path, run="another").delete(["b-0"])
    azure.delete(["a-0"])
    assert sorted(azure.dismantle()) == [
        "disk a-1_OsDisk_1_5f2c (128 GiB, Premium_LRS), 0.0270 dollars an hour",
        "network interface a-0-nic, 0.0000 dollars an hour",
    ]
    assert [name for _, name in arm.parts] == ["users-own", "b-0_OsDisk_1_5f2c"]
    assert azure.dismantle() == ()
    assert provider(arm, tmp_path, run="another").dismantle() == (
        "disk b-0_OsDisk_1_5f2c (128 GiB, Premium_LRS), its price is not known",
    )


@pytest.mark.parametrize("code", ["NicReservedForAnotherVm", "AuthorizationFailed"])
def test_an_orphan_that_stays_is_named_and_others_are_removed(arm: FakeArm, tmp_path: Path, code: str) -> None:
    arm.staying = {"a-0-nic", "a-1-nic"}
    azure = provider(arm, tmp_path)
    azure.request("a", 2)
    arm.faults = [Fault("DELETE", "networkInterfaces/a-0", 400, code)]
    with pytest.raises(
        Transient if code.startswith("Nic") else Misconfigured, match=f"network interface a-0-nic.* is left: {code}"
    ):
        azure.dismantle()
    assert (arm.machines, arm.sets) == ({}, {})
    assert [name for _, name in arm.parts] == ["a-0-nic"]
    assert len(azure.dismantle()) == 1


def test_every_second_call_may_be_throttled(arm: FakeArm, tmp_path: Path) -> None:
    """The sequence of calls goes on after each pause instead of beginning anew."""
    arm.throttled = lambda number: number % 2 == 0
    paused_s: list[float] = []
    refusals: list[Any] = []

    class Keeping(Line):
        def on_response(self, request: Any, response: Any) -> None:
            super().on_response(request, response)
            if response.http_response.status_code == 429:
                refusals.append(response.http_response)

    azure = provider(arm, tmp_path, Keeping(), pause=paused_s.append)
    assert names(azure.request("a", 2)) == ["a-0", "a-1"]
    assert set(paused_s) == {DEFAULT_PAUSE_S}
    assert len(paused_s) <= len(arm.calls) / 2
    azure.dismantle()
    assert (arm.machines, arm.sets) == ({}, {})
    assert len(refusals) == len(paused_s)
    assert all(refusal.is_closed for refusal in refusals), "an answer that is not read keeps its connection"


def test_a_pause_ends_with_the_provider_and_then_lasts_its_time(arm: FakeArm, tmp_path: Path) -> None:
    """Nothing more is made for a run that is over, but its VMs are ended although Azure asks to wait."""
    stopped = threading.Event()
    pause = until_stopped(stopped)
    arm.faults = [Fault("PUT", "virtualMachines/", 429, "TooManyRequests", {"Retry-After": "40"})]

    def stop_and_pause(pause_s: float) -> object:
        stopped.set()
        return stopped.wait(pause_s)

    with pytest.raises(Throttled):
        provider(arm, tmp_path, pause=stop_and_pause).request("a", 1)
    assert puts(arm) == ["PUT virtualMachines/a-0"]
    assert not pause(0.0)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET", "/operations/", 500),
        Fault("GET", "/operations/", drop=True),
        Fault("GET", "/operations/", 429, "TooManyRequests", {"Retry-After": "600"}, times=3),
    ],
    ids=["500", "no answer", "429"],
)
def test_a_failed_look_at_an_operation_is_repeated_alone(arm: FakeArm, tmp_path: Path, fault: Fault) -> None:
    arm.faults, times, pauses = [fault], fault.times, list[float]()
    assert names(provider(arm, tmp_path, pause=pauses.append).request("a", 2)) == ["a-0", "a-1"]
    assert len(puts(arm)) == 2
    assert len(pauses) == times
    assert max(pauses) <= 60.0


ZONES = len(SPEC.zones)
SIZES = len(SPEC.sizes)
MAX_PRICE = "Unable to perform 'Create VM' since the provided max price '0.1 USD' is lower than the spot price"
REFUSED: list[tuple[int, str, str, type[ProviderError], int]] = [
    (409, "SkuNotAvailable", "not available in zone 1", CapacityShort, SIZES * ZONES),
    (409, "ZonalAllocationFailed", "no capacity", CapacityShort, SIZES * ZONES),
    (400, "AvailabilityZoneNotSupported", "supported zones are 2,3", CapacityShort, SIZES * ZONES),
    (409, "SpotPriceGreaterThanProvidedMaxPrice", MAX_PRICE, CapacityShort, SIZES),
    (409, "OperationNotAllowed", MAX_PRICE, CapacityShort, SIZES),
    (400, "AzureSpotIsNotSupportedForThisVMSize", "this size is not for spot", CapacityShort, SIZES),
    (403, "NotAvailableForSubscription", "this size is not for you", CapacityShort, SIZES),
    (409, "OperationNotAllowed", "exceeding approved LowPriorityCores Quota", QuotaExceeded, SIZES),
    (409, "OperationNotAllowed", "Azure Spot is not supported for this offer type.", Misconfigured, 1),
    (403, "AzureSpotFeatureNotEnabledForSubscription", "not enabled", Misconfigured, 1),
    (409, "MissingSubscriptionRegistration", "register Microsoft.Compute", Misconfigured, 1),
    (409, "SubscriptionNotRegistered", "register Microsoft.Network", Misconfigured, 1),
    (409, "ScopeLocked", "the following scopes are locked", Misconfigured, 1),
    (409, "ReadOnlyDisabledSubscription", "the subscription is marked as read only", Misconfigured, 1),
    (409, "ResourceGroupBeingDeleted", "the group is being deleted", Misconfigured, 1),
    (403, "RequestDisallowedByPolicy", "a policy forbids it", Misconfigured, 1),
    (400, "MaxPriceValueInvalid", "-1 or above 0", Misconfigured, 1),
]


@pytest.mark.parametrize(("status", "code", "text", "kind", "num_puts"), REFUSED, ids=lambda value: str(value)[:40])
def test_each_refusal_leads_to_the_next_zone_or_size_or_ends(
    arm: FakeArm, tmp_path: Path, status: int, code: str, text: str, kind: type[ProviderError], num_puts: int
) -> None:
    arm.at_once = {size.name: (status, code, text) for size in SPEC.sizes}
    with pytest.raises(kind, match=f"{code}: ") as raised:
        provider(arm, tmp_path).request("a", 1)
    assert text in str(raised.value)
    assert sum(call.startswith("PUT virtualMachines/") for call in arm.calls) == num_puts
    assert arm.machines == {}


@pytest.mark.parametrize("code", ["ScopeLocked", "RequestDisallowedByPolicy", "ReadOnlyDisabledSubscription"])
def test_errors_that_the_user_must_fix_are_reported_as_such(arm: FakeArm, tmp_path: Path, code: str) -> None:
    arm.shortages = {(size.name, zone): code for size in SPEC.sizes for zone in SPEC.zones}
    with pytest.raises(Misconfigured, match=f"{code}: no Standard_NC6"):
        provider(arm, tmp_path).request("a", 1)


def test_a_price_above_the_users_for_one_size_leaves_the_others(arm: FakeArm, tmp_path: Path) -> None:
    arm.at_once = {"Standard_NC6": (409, "SpotPriceGreaterThanProvidedMaxPrice", MAX_PRICE)}
    (vm,) = provider(arm, tmp_path).request("a", 1)
    assert vm.size == "Standard_NC24"


@pytest.mark.parametrize("state", ["Updating", "Migrating", "SomethingNew", ""])
def test_a_vm_in_an_unknown_state_is_granted_and_lives(arm: FakeArm, tmp_path: Path, state: str) -> None:
    arm.made_as = {"a-1": state}
    for directory in ("first", "another manager"):
        (tmp_path / directory).mkdir()
        vms = provider(arm, tmp_path / directory, make_s=5).request("a", 2)
        assert [vm.name for vm in vms] == ["a-0", "a-1"]
    assert set(arm.machines) == {"a-0", "a-1"}
    assert not any(call.startswith("DELETE") for call in arm.calls)


@pytest.mark.parametrize("state", ["Failed", "Canceled", "Deleting"])
def test_remains_of_a_vm_are_ended_before_it_is_made_anew(arm: FakeArm, tmp_path: Path, state: str) -> None:
    provider(arm, tmp_path).request("a", 2)
    (tmp_path / "operations-tiny-1.json").unlink()  # the manager was killed before the answer
    arm.machines["a-0"]["properties"]["provisioningState"] = state
    vms = provider(arm, tmp_path).request("a", 2)
    assert [vm.name for vm in vms] == ["a-0", "a-1"]
    assert {vm["properties"]["provisioningState"] for vm in arm.machines.values()} == {"Succeeded"}


def test_a_vm_that_never_gets_made_does_not_hold_up_the_others(arm: FakeArm, tmp_path: Path) -> None:
    arm.stuck = {"a-0"}
    azure = provider(arm, tmp_path, make_s=5)  # the others are made in less time, however busy this machine is
    assert [vm.name for vm in azure.request("a", 3)] == ["a-1", "a-2"]
    assert "DELETE virtualMachines/a-0" in arm.calls
    assert [vm.name for vm in azure.request("b", 1)] == ["b-0"]
    arm.stuck = {"c-0"}
    with pytest.raises(CapacityShort, match="VM c-0: not made within 5 s"):
        azure.request("c", 1)
    assert sum(call.startswith("PUT virtualMachines/c-") for call in arm.calls) == 1


def test_an_earlier_managers_unfinished_vm_is_not_awaited_for_ever(arm: FakeArm, tmp_path: Path) -> None:
    class Dying(Line):
        """Killed once the VM has been begun, before its operation is noted."""

        def on_response(self, request: Any, response: Any) -> None:
            self.dead = self.dead or bool(arm.machines)
            super().on_response(request, response)

    arm.stuck = {"a-0"}
    with pytest.raises(Killed):
        provider(arm, tmp_path, Dying()).request("a", 1)
    assert set(arm.machines) == {"a-0"}
    with pytest.raises(CapacityShort, match="VM a-0: not made within 5 s"):
        provider(arm, tmp_path, make_s=5).request("a", 1)


@pytest.mark.parametrize(
    ("status", "code", "kind"), [(503, "ServerBusy", Transient), (429, "TooManyRequests", Throttled)]
)
@pytest.mark.parametrize("as_date", [False, True], ids=["seconds", "date"])
@pytest.mark.parametrize("ahead_s", [0.0, 3600.0])
def test_azures_wait_is_read_in_seconds_and_as_a_date(
    arm: FakeArm, tmp_path: Path, status: int, code: str, kind: type[ProviderError], as_date: bool, ahead_s: float
) -> None:
    arm.ahead_s, began = ahead_s, time.monotonic()
    after = formatdate(time.time() + ahead_s + 140, usegmt=True) if as_date else "140"
    arm.faults = [Fault("PUT", "virtualMachines/", status, code, {"Retry-After": after})]
    with pytest.raises(kind) as raised:
        provider(arm, tmp_path).request("a", 1)
    took_s = time.monotonic() - began if as_date else 0.0  # a date comes closer meanwhile, and has whole seconds
    found = raised.value.retry_after_s
    assert found is not None
    assert 140 - math.ceil(took_s) - as_date <= found <= 140 + as_date


@pytest.mark.parametrize("after", ["soon", "-3", "", "Wed, 32 Oct"])
def test_an_unreadable_wait_is_ignored(arm: FakeArm, tmp_path: Path, after: str) -> None:
    arm.faults = [Fault("PUT", "virtualMachines/", 503, "ServerBusy", {"Retry-After": after})]
    with pytest.raises(Transient) as raised:
        provider(arm, tmp_path).request("a", 1)
    assert raised.value.retry_after_s is None

"""What Azure says of spot VMs, and the states in which it has them."""

from __future__ import annotations

import math
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from manager.providers.interface.provider import (
    CapacityShort,
    Misconfigured,
    ProviderError,
    QuotaExceeded,
    Throttled,
    Transient,
)
from tests.providers.azure_world import SPEC, Killed, Line, provider
from tests.providers.fake_arm import FakeArm, Fault

pytestmark = pytest.mark.slow

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
def test_each_refusal_is_followed_by_the_next_zone_or_size_or_ends_the_request_with_azures_sentence(
    arm: FakeArm, tmp_path: Path, status: int, code: str, text: str, kind: type[ProviderError], num_puts: int
) -> None:
    arm.at_once = {size.name: (status, code, text) for size in SPEC.sizes}
    with pytest.raises(kind, match=f"{code}: ") as raised:
        provider(arm, tmp_path).request("a", 1)
    assert text in str(raised.value)
    assert sum(call.startswith("PUT virtualMachines/") for call in arm.calls) == num_puts
    assert arm.machines == {}


@pytest.mark.parametrize("code", ["ScopeLocked", "RequestDisallowedByPolicy", "ReadOnlyDisabledSubscription"])
def test_what_the_user_must_mend_is_told_as_such_also_where_an_operation_ends_with_it(
    arm: FakeArm, tmp_path: Path, code: str
) -> None:
    arm.shortages = {(size.name, zone): code for size in SPEC.sizes for zone in SPEC.zones}
    with pytest.raises(Misconfigured, match=f"{code}: no Standard_NC6"):
        provider(arm, tmp_path).request("a", 1)


def test_a_price_above_the_users_for_one_size_leaves_the_others(arm: FakeArm, tmp_path: Path) -> None:
    arm.at_once = {"Standard_NC6": (409, "SpotPriceGreaterThanProvidedMaxPrice", MAX_PRICE)}
    (vm,) = provider(arm, tmp_path).request("a", 1)
    assert vm.size == "Standard_NC24"


@pytest.mark.parametrize("state", ["Updating", "Migrating", "SomethingNew", ""])
def test_a_vm_in_a_state_that_is_not_known_to_be_its_end_is_granted_and_lives(
    arm: FakeArm, tmp_path: Path, state: str
) -> None:
    arm.made_as = {"a-1": state}
    for directory in ("first", "another manager"):
        (tmp_path / directory).mkdir()
        vms = provider(arm, tmp_path / directory, make_s=5).request("a", 2)
        assert [vm.name for vm in vms] == ["a-0", "a-1"]
    assert set(arm.machines) == {"a-0", "a-1"}
    assert not any(call.startswith("DELETE") for call in arm.calls)


@pytest.mark.parametrize("state", ["Failed", "Canceled", "Deleting"])
def test_what_is_left_of_a_vm_is_ended_and_the_vm_made_anew(arm: FakeArm, tmp_path: Path, state: str) -> None:
    provider(arm, tmp_path).request("a", 2)
    (tmp_path / "operations-tiny-1.json").unlink()  # the manager was killed before it was answered
    arm.machines["a-0"]["properties"]["provisioningState"] = state
    vms = provider(arm, tmp_path).request("a", 2)
    assert [vm.name for vm in vms] == ["a-0", "a-1"]
    assert {vm["properties"]["provisioningState"] for vm in arm.machines.values()} == {"Succeeded"}


def test_a_vm_that_is_being_made_for_ever_is_given_up_and_the_others_of_its_request_are_granted(
    arm: FakeArm, tmp_path: Path
) -> None:
    arm.stuck = {"a-0"}
    azure = provider(arm, tmp_path, make_s=5)  # the others are made in less, however busy this machine is
    assert [vm.name for vm in azure.request("a", 3)] == ["a-1", "a-2"]
    assert "DELETE virtualMachines/a-0" in arm.calls
    assert [vm.name for vm in azure.request("b", 1)] == ["b-0"]
    arm.stuck = {"c-0"}
    with pytest.raises(CapacityShort, match="VM c-0: not made within 5 s"):
        azure.request("c", 1)
    assert sum(call.startswith("PUT virtualMachines/c-") for call in arm.calls) == 1


def test_a_vm_that_an_earlier_manager_began_is_not_waited_for_for_ever(arm: FakeArm, tmp_path: Path) -> None:
    class Dying(Line):
        """Killed once the VM is begun, before it is noted how to go on."""

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
def test_how_long_azure_asks_to_wait_is_known_in_seconds_and_as_a_date_by_its_own_clock(
    arm: FakeArm, tmp_path: Path, status: int, code: str, kind: type[ProviderError], as_date: bool, ahead_s: float
) -> None:
    arm.ahead_s, began = ahead_s, time.monotonic()
    after = formatdate(time.time() + ahead_s + 40, usegmt=True) if as_date else "40"
    arm.faults = [Fault("PUT", "virtualMachines/", status, code, {"Retry-After": after})]
    with pytest.raises(kind) as raised:
        provider(arm, tmp_path).request("a", 1)
    took_s = time.monotonic() - began if as_date else 0.0  # a date comes nearer meanwhile, and is in whole seconds
    found = raised.value.retry_after_s
    assert found is not None
    assert 40 - math.ceil(took_s) - as_date <= found <= 40 + as_date


@pytest.mark.parametrize("after", ["soon", "-3", "", "Wed, 32 Oct"])
def test_a_wait_that_cannot_be_read_is_none(arm: FakeArm, tmp_path: Path, after: str) -> None:
    arm.faults = [Fault("PUT", "virtualMachines/", 503, "ServerBusy", {"Retry-After": after})]
    with pytest.raises(Transient) as raised:
        provider(arm, tmp_path).request("a", 1)
    assert raised.value.retry_after_s is None

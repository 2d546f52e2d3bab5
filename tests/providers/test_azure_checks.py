"""`morph cloud check` for Azure on the fake resource manager: every row of the guide's list, and each in failure."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from manager.providers.azure.checks import Checks
from manager.providers.azure.spec import ACTIONS
from tests.providers.azure_world import SPEC, client_of
from tests.providers.fake_arm import FakeArm, Fault

GUIDES = Path(__file__).parents[2] / "docs/guides"


def sku(name: str, gpus: int, vcpus: int) -> dict[str, Any]:
    capabilities = {"GPUs": str(gpus), "vCPUs": str(vcpus), "LowPriorityCapable": "True"}
    return {
        "name": name,
        "resourceType": "virtualMachines",
        "family": "standardNCFamily",
        "locationInfo": [{"location": "westus2", "zones": ["1", "2"]}],
        "capabilities": [{"name": key, "value": value} for key, value in capabilities.items()],
        "restrictions": [],
    }


def usage(name: str, limit: int) -> dict[str, Any]:
    return {"name": {"value": name}, "limit": limit, "currentValue": 6}


TOLD: dict[str, Any] = {
    "/resourceGroups/train": {"name": "train", "location": "westus2"},
    "/Microsoft.Compute/skus": {"value": [sku("Standard_NC6", 1, 6), sku("Standard_NC24", 4, 24)]},
    "/offers/ubuntu-hpc/skus/2204/versions": [{"name": "22.04.2025"}],
    "/subnets/nodes": {"name": "nodes"},
    "/userAssignedIdentities/nodes": {"name": "nodes"},
    "/Microsoft.Authorization/permissions": {"value": [{"actions": ["*"], "notActions": []}]},
    "/locations/westus2/usages": {"value": [usage("lowPriorityCores", 48), usage("cores", 48)]},
}


def checked(arm: FakeArm, count: int = 4, **changes: Any) -> list[tuple[bool, str]]:
    spec = SPEC.model_copy(update=changes)
    return [
        (found.is_well, found.sentence)
        for found in Checks(spec, client_of(arm, spec=spec), count, lambda _: None).run()
    ]


def test_a_cloud_file_is_checked_by_reading_alone(arm: FakeArm) -> None:
    arm.told = copy.deepcopy(TOLD)
    assert checked(arm) == [
        (True, "Azure knows you, and resource group train is in westus2"),
        (True, "Standard_NC24 in westus2 has 4 GPUs, in zones 1, 2"),
        (True, "Standard_NC6 in westus2 has 1 GPUs, in zones 1, 2"),
        (True, "image microsoft-dsvm:ubuntu-hpc:2204:latest is there"),
        (True, "subnet_id: nodes is there"),
        (True, "identity_id: nodes is there"),
        (True, "you may do all that a run does in the group"),
        (True, "4 workers on Standard_NC6 take 24 vCPUs; quota lowPriorityCores: 48, 6 in use"),
        (True, "a VM costs 1.4 dollars an hour at most (the cluster file)"),
    ]
    assert {call.split()[0] for call in arm.calls} == {"GET"}


def test_every_thing_that_is_wrong_on_azure_is_found_at_once(arm: FakeArm) -> None:
    arm.told = copy.deepcopy(TOLD)
    small, large = arm.told["/Microsoft.Compute/skus"]["value"]
    large["restrictions"] = [{"type": "Location", "reasonCode": "NotAvailableForSubscription"}]
    small["restrictions"] = [{"type": "Zone", "restrictionInfo": {"zones": ["1", "2"]}}]
    arm.told["/Microsoft.Authorization/permissions"]["value"] = [
        {"actions": ["Microsoft.Compute/*", "Microsoft.Network/*"], "notActions": ["*/disks/delete"]},
    ]
    arm.told["/offers/ubuntu-hpc/skus/2204/versions"] = []
    arm.told["/locations/westus2/usages"]["value"] = [usage("lowPriorityCores", 29)]
    arm.faults = [Fault("GET", "/subnets/nodes", 404, "ResourceNotFound")]
    assert [said for is_well, said in checked(arm) if not is_well] == [
        "Standard_NC24 in westus2 is not available to the subscription: NotAvailableForSubscription",
        "Standard_NC6 in westus2 is offered in none of your zones",
        "image microsoft-dsvm:ubuntu-hpc:2204:latest: westus2 has no such version",
        "subnet_id: ResourceNotFound: injected",
        "you may not: Microsoft.Compute/disks/delete, Microsoft.ManagedIdentity/userAssignedIdentities/assign/action",
        "4 workers on Standard_NC6 take 24 vCPUs; quota lowPriorityCores: 29, 6 in use",
    ]
    small["capabilities"] = [{"name": "vCPUs", "value": "6"}]
    sizes = tuple(size.model_copy(update={"usd_per_h": None}) for size in SPEC.sizes[1:])
    wrong = [said for is_well, said in checked(arm, sizes=sizes) if not is_well]
    assert (wrong[0], wrong[-1][:29]) == ("Standard_NC6 has 0 GPUs, and num_gpus is 1", "a size's price is not known: ")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault("GET", "resourceGroups/train", 404, "ResourceGroupNotFound"), "ResourceGroupNotFound: injected"),
        (Fault("GET", "resourceGroups/train", 403, "AuthorizationFailed"), "AuthorizationFailed: injected"),
        (Fault("GET", "resourceGroups/train", text="[]", carried_out=True), "cannot be read"),
    ],
    ids=["no group", "no rights", "no answer"],
)
def test_without_the_group_nothing_else_is_checked(arm: FakeArm, fault: Fault, told: str) -> None:
    arm.told, arm.faults = copy.deepcopy(TOLD), [fault]
    ((is_well, said),) = checked(arm)
    assert not is_well
    assert told in said


def test_the_guide_lists_the_rights_that_are_checked() -> None:
    guide = (GUIDES / "azure.md").read_text(encoding="utf-8")
    role = re.search(r"```json\n(.*?)```", guide, re.DOTALL)
    assert role is not None
    assert json.loads(role[1])["Actions"] == list(ACTIONS)


@pytest.mark.parametrize("market", ["aws", "azure"])
def test_the_guide_of_markets_lists_every_check(market: str) -> None:
    """A row per check of the code, in the code's order; the others have no checks that ask a cloud."""
    code = (GUIDES.parents[1] / f"manager/providers/{market}/checks.py").read_text(encoding="utf-8")
    names = set(re.findall(r"def _(\w+)\(self(?:, \w+: \w+)?\) -> Iterator\[Finding\]", code)) - {"found"}
    guide = (GUIDES / "markets.md").read_text(encoding="utf-8")
    (header,) = [line for line in guide.splitlines() if line.startswith("| check |")]
    column = [cell.strip().lower() for cell in header.strip("|").split("|")].index(market)
    table = guide.partition(header)[2].split("\n\n")[0].strip().splitlines()[1:]
    listed = {cells[0].strip(" `"): cells[column].strip() for line in table if (cells := line.strip("|").split("|"))}
    assert {name for name, told in listed.items() if told != "-"} - {"price"} == names

"""The cloud file for Azure, and the documents that are sent to Azure: pure, no SDK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field, field_validator, model_validator

from manager.providers.interface.cloud import (
    DEVICES_TAG,
    JOB_TAG,
    REQUEST_TAG,
    RUN_TAG,
    Size,
    check_types,
    dearest,
    of_type,
    turns,
)
from manager.providers.interface.provider import Price, vm_name
from morph.contract.base import Value
from morph.contract.cluster import UsdPerHourAtMost

PUBLIC_AZURE = "https://management.azure.com"
NETWORK_API_VERSION = "2022-07-01"
ACTIONS = tuple(
    f"Microsoft.{action}"
    for action in (
        "Compute/virtualMachines/read", "Compute/virtualMachines/write", "Compute/virtualMachines/delete",
        "Compute/virtualMachines/retrieveBootDiagnosticsData/action", "Compute/virtualMachineScaleSets/read",
        "Compute/virtualMachineScaleSets/write", "Compute/virtualMachineScaleSets/delete", "Compute/disks/read",
        "Compute/disks/write", "Compute/disks/delete", "Network/networkInterfaces/read",
        "Network/networkInterfaces/write", "Network/networkInterfaces/join/action", "Network/networkInterfaces/delete",
        "Network/virtualNetworks/subnets/join/action", "Network/networkSecurityGroups/join/action",
        "ManagedIdentity/userAssignedIdentities/assign/action",
    )
)  # fmt: skip
"""What the manager's identity does in the resource group."""
RESERVED_USERS = frozenset(
    {
        "administrator", "admin", "user", "user1", "test", "user2", "test1", "user3", "admin1", "1", "123", "a",
        "actuser", "adm", "admin2", "aspnet", "backup", "console", "david", "guest", "john", "owner", "root", "server",
        "sql", "support", "support_388945a0", "sys", "test2", "test3", "user4", "user5",
    }
)  # fmt: skip
"""Names of accounts that Azure refuses, as ``azure.mgmt.compute.models.OSProfile`` lists them."""
_RESOURCE_ID = r"^/subscriptions/[^/]+/resourceGroups/[^/]+/providers/.+$"


class AzureSize(Size):
    """A VM size that may be used; its default price comes from Azure's price list."""

    name: str = Field(pattern=r"^[A-Za-z0-9_]+$", description="such as Standard_NC4as_T4_v3")


class AzureSpec(Value):
    """The cloud file for Azure. Everything named here must exist; ``docs/guides/azure.md`` says how to make it."""

    subscription_id: str = Field(pattern=r"^[0-9a-fA-F-]{36}$")
    resource_group: str = Field(pattern=r"^[-\w._()]{1,90}$")
    location: str = Field(pattern=r"^[a-z0-9]+$")
    zones: tuple[str, ...] = Field(default=(), description="VMs are spread over these; none: Azure chooses")
    sizes: tuple[AzureSize, ...] = Field(min_length=1)
    spot: bool = True
    max_usd_per_h: UsdPerHourAtMost | None = Field(
        default=None, description="highest price of a spot VM; None: the normal price"
    )
    image: str = Field(description="publisher:offer:sku:version, or the id of an image")
    subnet_id: str = Field(pattern=_RESOURCE_ID)
    security_group_id: str | None = Field(default=None, pattern=_RESOURCE_ID)
    identity_id: str | None = Field(
        default=None, pattern=_RESOURCE_ID, description="managed identity with which a forgotten VM deletes itself"
    )
    admin_username: str = Field(default="morph", pattern=r"^[a-z][a-z0-9_-]{0,30}$")
    ssh_public_key: str = Field(pattern=r"^(ssh-|ecdsa-)\S+ \S+")
    os_disk: str = "Premium_LRS"
    os_disk_gib: int | None = Field(default=None, ge=1, le=4095, description="size; None: as large as the image")
    resource_manager: str = Field(
        default=PUBLIC_AZURE,
        pattern=r"^(https://[^\s'\"]+|http://(localhost|127\.\d+\.\d+\.\d+)(:\d+)?/?)$",
        description="URL of a cloud other than the public one; without TLS only on this machine",
    )
    authority: str | None = Field(
        default=None, pattern=r"^https://[^\s'\"]+$", description="URL for logins there; absent: the public cloud's"
    )

    @model_validator(mode="after")
    def _image_is_one(self) -> AzureSpec:
        if not self.image.startswith("/") and len(self.image.split(":")) != 4:
            raise ValueError("image: neither publisher:offer:sku:version nor the id of an image")
        return self

    @field_validator("admin_username")
    @classmethod
    def _is_not_reserved(cls, name: str) -> str:
        if name in RESERVED_USERS:
            raise ValueError(f"Azure does not allow the name {name}; allowed: another one, such as morph")
        return name

    @property
    def provider(self) -> str:
        """The name under which the history keeps the VMs: emulators on this machine are kept apart from the cloud."""
        return "azure" if self.resource_manager.startswith("https:") else "local"

    def price(self, find: Callable[[AzureSize], float | None]) -> Price | None:
        """Return the price of one hour of the most expensive size; see ``dearest``."""
        return dearest(self.sizes, find, "Azure's retail price list")

    @model_validator(mode="after")
    def _types_of_all(self) -> AzureSpec:
        check_types(self.sizes, self.zones, "sizes")
        return self

    def of_type(self, node_type: str) -> AzureSpec:
        """Return the spec with the sizes that have one type of GPU; empty: with all."""
        return self.model_copy(update={"sizes": of_type(self.sizes, node_type)})

    def offers_of(self, index: int, num_devices: int) -> list[tuple[AzureSize, str | None]]:
        """Return offers with this many devices for VM number ``index``: consecutive VMs begin in different zones."""
        turn = index % max(1, len(self.zones))
        zones = (self.zones[turn:] + self.zones[:turn]) or (None,)
        sizes = sorted(self.sizes, key=lambda size: size.num_gpus)
        sizes = [size for size in sizes if size.num_devices == num_devices]
        return [(size, zone) for size in sizes for zone in zones if size.may_be_in(zone)]


def scale_set_name(run: str) -> str:
    """Return the name of a run's flexible scale set."""
    return vm_name(run, 0).rsplit("-", 1)[0]


def scale_set_id(spec: AzureSpec, run: str) -> str:
    """Return the resource id of a run's scale set."""
    group = f"/subscriptions/{spec.subscription_id}/resourceGroups/{spec.resource_group}"
    return f"{group}/providers/Microsoft.Compute/virtualMachineScaleSets/{scale_set_name(run)}"


def scale_set_body(spec: AzureSpec, run: str, job: str) -> dict[str, Any]:
    """Return a flexible scale set without a profile, into which VMs are put by name, spread over fault domains."""
    zones = {"zones": list(spec.zones)} if spec.zones else {}
    return {
        "location": spec.location,
        "tags": {RUN_TAG: run, JOB_TAG: job},
        **zones,
        "properties": {"orchestrationMode": "Flexible", "platformFaultDomainCount": 1, "singlePlacementGroup": False},
    }


def vm_body(
    spec: AzureSpec, names: dict[str, str], name: str, offer: tuple[AzureSize, str | None], custom_data: Any
) -> dict[str, Any]:
    """Return the description of one VM whose disk and network interface are deleted with it."""
    size, zone = offer
    body: dict[str, Any] = {
        "location": spec.location,
        "tags": {**_tags(names), DEVICES_TAG: str(size.num_devices)},
        "properties": {
            "virtualMachineScaleSet": {"id": scale_set_id(spec, names["run"])},
            "hardwareProfile": {"vmSize": size.name},
            "storageProfile": {"imageReference": _image(spec.image), "osDisk": _disk(spec)},
            "osProfile": _os_profile(spec, name, custom_data),
            "networkProfile": _network(spec, name, names),
            "diagnosticsProfile": {"bootDiagnostics": {"enabled": True}},  # kept in Azure's own storage
        },
    }
    if zone is not None:
        body["zones"] = [zone]
    if spec.spot:
        body["properties"] |= {
            "priority": "Spot",
            "evictionPolicy": "Delete",
            "billingProfile": {"maxPrice": -1 if spec.max_usd_per_h is None else spec.max_usd_per_h},
        }
    if spec.identity_id is not None:
        body["identity"] = {"type": "UserAssigned", "userAssignedIdentities": {spec.identity_id: {}}}
    return body


def _tags(names: dict[str, str]) -> dict[str, str]:
    return {RUN_TAG: names["run"], JOB_TAG: names["job"], REQUEST_TAG: names["request"]}


def planned(
    spec: AzureSpec,
    run: str,
    job: str,
    request: str,
    count: int,
    cloud_config: Callable[[str, int], Any] = lambda _node, _num_devices: "(the cloud-config; it holds secrets)",
) -> list[dict[str, Any]]:
    """Return what a request for ``count`` devices would create, in order; for the user, without secrets."""
    group = scale_set_id(spec, run).rsplit("/", 2)[0]
    calls = [{"put": scale_set_id(spec, run), "body": scale_set_body(spec, run, job)}]
    num_devices = turns(spec.sizes, count, count)[0]
    for index in range(-(-count // num_devices)):
        name = vm_name(request, index)
        names = {"run": run, "job": job, "request": request}
        offer = spec.offers_of(index, num_devices)[0]
        body = vm_body(spec, names, name, offer, cloud_config(name, num_devices))
        calls.append({"put": f"{group}/virtualMachines/{name}", "body": body})
    return calls


def _image(image: str) -> dict[str, str]:
    if image.startswith("/"):
        return {"id": image}
    return dict(zip(("publisher", "offer", "sku", "version"), image.split(":"), strict=True))


def _disk(spec: AzureSpec) -> dict[str, Any]:
    size = {} if spec.os_disk_gib is None else {"diskSizeGB": spec.os_disk_gib}
    return {
        "createOption": "FromImage",
        "deleteOption": "Delete",
        "managedDisk": {"storageAccountType": spec.os_disk},
        **size,
    }


def _os_profile(spec: AzureSpec, name: str, custom_data: Any) -> dict[str, Any]:
    key = {"path": f"/home/{spec.admin_username}/.ssh/authorized_keys", "keyData": spec.ssh_public_key}
    return {
        "computerName": name,
        "adminUsername": spec.admin_username,
        "customData": custom_data,
        "linuxConfiguration": {"disablePasswordAuthentication": True, "ssh": {"publicKeys": [key]}},
    }


def _network(spec: AzureSpec, name: str, names: dict[str, str]) -> dict[str, Any]:
    interface: dict[str, Any] = {
        "primary": True,
        "deleteOption": "Delete",
        "ipConfigurations": [{"name": "main", "properties": {"primary": True, "subnet": {"id": spec.subnet_id}}}],
    }
    if spec.security_group_id is not None:
        interface["networkSecurityGroup"] = {"id": spec.security_group_id}
    return {
        "networkApiVersion": NETWORK_API_VERSION,
        "networkInterfaceConfigurations": [
            {"name": f"{name}-nic", "tags": _tags(names), "properties": interface},
        ],
    }

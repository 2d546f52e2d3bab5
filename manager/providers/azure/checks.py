"""Checks a cloud file for Azure before a run, by reading alone."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode

from azure.core.rest import HttpRequest

from manager.providers.azure.errors import translating
from manager.providers.azure.spec import ACTIONS, NETWORK_API_VERSION, AzureSize, AzureSpec
from manager.providers.interface.cloud import Finding, turns
from manager.providers.interface.provider import Misconfigured, ProviderError, Transient

GROUP_API_VERSION, RIGHTS_API_VERSION, COMPUTE_API_VERSION = "2021-04-01", "2022-04-01", "2022-03-01"
SKUS_API_VERSION, GALLERY_API_VERSION, IDENTITY_API_VERSION = "2021-07-01", "2022-03-03", "2023-01-31"


class Checks:
    """Checks of one cloud file, which make and change nothing; ``count``: the devices that the run should have."""

    def __init__(
        self, spec: AzureSpec, client: Any, count: int, find_price: Callable[[AzureSize], float | None]
    ) -> None:
        self._spec, self._client, self._count, self._find_price = spec, client, count, find_price
        self._subscription = f"/subscriptions/{spec.subscription_id}"
        self._group = f"{self._subscription}/resourceGroups/{spec.resource_group}"
        self._compute = f"{self._subscription}/providers/Microsoft.Compute"
        self._sizes: dict[str, dict[str, Any]] = {}

    def run(self) -> Iterator[Finding]:
        """Yield the findings, one sentence each; without a login or the resource group, nothing else is checked."""
        first = list(self._found(self._login))
        yield from first
        if not first[-1].is_well:
            return
        for check in (self._type, self._image, self._network, self._rights, self._quota):
            yield from self._found(check)
        price = self._spec.price(self._find_price)
        if price is None:
            yield Finding(False, "a size's price is not known: give usd_per_h, or limits in dollars cannot be kept")
        else:
            yield Finding(True, f"a VM costs {price.usd_per_h:.4g} dollars an hour at most ({price.source})")

    def _found(self, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
        try:
            yield from check()
        except ProviderError as error:
            yield Finding(False, str(error))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            yield Finding(False, f"the {check.__name__.strip('_')}: Azure's answer cannot be read: {error!r}")

    def _get(self, what: str, path: str, version: str, **query: str) -> Any:
        with translating(what):
            url = f"{path}?{urlencode({'api-version': version, **query})}"
            answer = self._client.send_request(HttpRequest("GET", url))
            answer.raise_for_status()
            return answer.json()

    def _list(self, what: str, path: str, version: str, **query: str) -> list[dict[str, Any]]:
        answer = self._get(what, path, version, **query)
        values: list[dict[str, Any]] = [*answer["value"]]
        seen = set[str]()
        while url := answer.get("nextLink"):
            if url in seen:
                raise Transient(f"{what}: the answer's pages do not end")
            seen.add(url)
            with translating(what):
                page = self._client.send_request(HttpRequest("GET", url))
                page.raise_for_status()
                answer = page.json()
            values += answer["value"]
        return values

    def _login(self) -> Iterator[Finding]:
        group = self._get("the resource group", self._group, GROUP_API_VERSION)
        yield Finding(True, f"Azure knows you, and resource group {group['name']} is in {group['location']}")

    def _type(self) -> Iterator[Finding]:
        query = {"$filter": f"location eq '{self._spec.location}'"}
        listed = self._list("the sizes of the region", f"{self._compute}/skus", SKUS_API_VERSION, **query)
        machines = {entry["name"]: entry for entry in listed if entry["resourceType"] == "virtualMachines"}
        if not machines:
            raise Misconfigured(f"location: {self._spec.location} has no VMs: such as westus2")
        for size in self._spec.sizes:
            yield self._offered(size, machines.get(size.name))

    def _offered(self, size: AzureSize, offered: dict[str, Any] | None) -> Finding:
        spec, where = self._spec, f"{size.name} in {self._spec.location}"
        if offered is None:
            return Finding(False, f"{where} is not offered")
        limits = offered.get("restrictions") or []
        if any(limit["type"] == "Location" for limit in limits):
            return Finding(False, f"{where} is not available to the subscription: {limits[0].get('reasonCode')}")
        self._sizes[size.name] = has = {entry["name"]: entry["value"] for entry in offered["capabilities"]}
        has["family"] = offered["family"]
        num_gpus = int(has.get("GPUs", 0))
        if size.num_gpus > num_gpus:
            return Finding(False, f"{size.name} has {num_gpus} GPUs, and num_gpus is {size.num_gpus}")
        if spec.spot and has.get("LowPriorityCapable") != "True":
            return Finding(False, f"{size.name} is not for spot VMs")
        closed = {zone for limit in limits for zone in limit.get("restrictionInfo", {}).get("zones", [])}
        has_zones = {zone for info in offered["locationInfo"] for zone in info.get("zones", [])} - closed
        zones = [zone for zone in spec.zones if zone in has_zones and size.may_be_in(zone)]
        if spec.zones and not zones:
            return Finding(False, f"{where} is offered in none of your zones")
        return Finding(True, f"{where} has {num_gpus} GPUs" + (f", in zones {', '.join(zones)}" if zones else ""))

    def _image(self) -> Iterator[Finding]:
        image = self._spec.image
        if image.startswith("/"):
            version = GALLERY_API_VERSION if "galleries" in image.lower() else COMPUTE_API_VERSION
            self._get(f"image {image}", image, version)
        else:
            publisher, offer, sku, version = image.split(":")
            kind = f"locations/{self._spec.location}/publishers/{publisher}/artifacttypes/vmimage/offers/{offer}"
            listed = self._get(f"image {image}", f"{self._compute}/{kind}/skus/{sku}/versions", COMPUTE_API_VERSION)
            if not [entry for entry in listed if version in ("latest", entry["name"])]:
                raise Misconfigured(f"image {image}: {self._spec.location} has no such version")
        yield Finding(True, f"image {image} is there")

    def _network(self) -> Iterator[Finding]:
        for field, version in {
            "subnet_id": NETWORK_API_VERSION,
            "security_group_id": NETWORK_API_VERSION,
            "identity_id": IDENTITY_API_VERSION,
        }.items():
            if (known := getattr(self._spec, field)) is not None:
                try:
                    yield Finding(True, f"{field}: {self._get(field, known, version)['name']} is there")
                except ProviderError as error:
                    yield Finding(False, str(error))

    def _rights(self) -> Iterator[Finding]:
        path = f"{self._group}/providers/Microsoft.Authorization/permissions"
        roles = self._list("your rights", path, RIGHTS_API_VERSION)

        def may(action: str) -> bool:
            return any(
                _fits(action, role.get("actions", [])) and not _fits(action, role.get("notActions", []))
                for role in roles
            )

        missing = [action for action in ACTIONS if not may(action)]
        sentence = f"you may not: {', '.join(missing)}" if missing else "you may do all that a run does in the group"
        yield Finding(not missing, sentence)

    def _quota(self) -> Iterator[Finding]:
        number = turns(self._spec.sizes, self._count, self._count)[0]
        first = next(size for size in self._spec.sizes if size.num_devices == number)
        has = self._sizes.get(first.name)
        if has is None:  # reported above
            return
        place = f"{self._compute}/locations/{self._spec.location}/usages"
        usages = {usage["name"]["value"]: usage for usage in self._list("the quotas", place, COMPUTE_API_VERSION)}
        vcpus = int(has["vCPUs"]) * -(-self._count // number)
        for name in ("lowPriorityCores",) if self._spec.spot else ("cores", has["family"]):
            if name not in usages:
                yield Finding(False, f"no quota {name} is known for {first.name}")
                continue
            limit, used = int(usages[name]["limit"]), int(usages[name]["currentValue"])
            said = f"{self._count} workers on {first.name} take {vcpus} vCPUs; quota {name}: {limit}, {used} in use"
            yield Finding(vcpus + used <= limit, said)


def _fits(action: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns)

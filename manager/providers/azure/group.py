"""Lists and ends a run's VMs and scale set in a resource group: those with the tags of this run and of this job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from azure.core.exceptions import DecodeError, HttpResponseError, ResourceNotFoundError
from azure.core.rest import HttpRequest

from manager.providers.azure.errors import is_gone, translating
from manager.providers.azure.spec import AzureSize, AzureSpec, scale_set_body, scale_set_name
from manager.providers.interface.cloud import (
    DEVICES_TAG,
    JOB_TAG,
    REQUEST_TAG,
    RUN_TAG,
    Bounds,
    Identity,
    paid_since_s,
    priced,
)
from manager.providers.interface.provider import Misconfigured, ProviderError, Transient, Vm, not_ended

STOP_WITHIN_S = 0.5
INTERFACE, DISK = "Microsoft.Network/networkInterfaces", "Microsoft.Compute/disks"
PART_API_VERSIONS = {INTERFACE: "2022-07-01", DISK: "2023-04-02"}


@dataclass(frozen=True)
class Look:
    """The VMs in a group: the run's, by provisioning state in lower case, and others, by name.

    ``guests``: others in the run's scale set; ``runs``: other runs of Morph, each with its job.
    """

    vms: tuple[tuple[Vm, str], ...]
    others: frozenset[str]
    guests: tuple[str, ...]
    runs: tuple[str, ...]


@dataclass(frozen=True)
class DiskOrInterface:
    """A network interface or a disk of ``vm``, or of none ("")."""

    id: str
    kind: str
    tags: Mapping[str, str]
    vm: str
    sku: str = ""
    gib: int = 0
    boots: bool = False

    @property
    def shown(self) -> str:
        """The description for a user."""
        word = "disk" if self.kind == DISK else "network interface"
        size = f" ({self.gib} GiB, {self.sku})" if self.gib else ""
        return f"{word} {self.id.rsplit('/', 1)[-1]}{size}"


class Group:
    """Lists a run's resources in the group, and ends them; prices are in dollars an hour, None: not known."""

    def __init__(
        self,
        client: Any,
        spec: AzureSpec,
        identity: Identity,
        bounds: Bounds,
        usd_per_h: Callable[[AzureSize], float | None],
        disk_usd_per_h: Callable[[str, int], float | None] = lambda _sku, _gib: None,
    ) -> None:
        self._client, self._disk_usd_per_h = client, disk_usd_per_h
        self._machines, self._sets = client.virtual_machines, client.virtual_machine_scale_sets
        self._spec, self._identity, self._bounds, self._usd_per_h = spec, identity, bounds, usd_per_h
        self.stopped = threading.Event()
        self.set_name = scale_set_name(identity.run)

    def look(self) -> Look:
        """List the group's VMs; ProviderError: the answer is not reliable: VMs that it omits may exist."""
        answered: list[str | None] = [None]

        def check(response: Any) -> None:
            answered[0] = response.http_response.headers.get("Date")
            if response.http_response.status_code == 200:
                document = response.http_response.json()
                if not isinstance(document, dict) or not isinstance(document.get("value"), list):
                    raise DecodeError("the answer is not a list of VMs")

        vms, others, guests, runs = [], set[str](), [], set[str]()
        try:
            with translating("the list of VMs"):
                machines = [*self._machines.list(self._spec.resource_group, raw_response_hook=check)]
            now_s = time.time()
            for machine in machines:
                tags = machine.tags or {}
                if self._identity.owns(tags):
                    vms.append((self._vm(machine, answered[0], now_s), str(machine.provisioning_state or "").lower()))
                    continue
                others.add(str(machine.name))
                inside = machine.virtual_machine_scale_set
                if inside is not None and str(inside.id).rsplit("/", 1)[-1].lower() == self.set_name.lower():
                    guests.append(str(machine.name))
                if RUN_TAG in tags:
                    runs.add(f"{tags[RUN_TAG]} of job {tags.get(JOB_TAG)}")
        except (ValueError, TypeError, AttributeError) as error:
            raise Transient(f"the list of VMs: the answer cannot be read: {error}") from error
        return Look(tuple(vms), frozenset(others), tuple(sorted(guests)), tuple(sorted(runs)))

    def owns_set(self) -> bool | None:
        """Whether the scale set with the run's name belongs to the run; None: there is none."""
        with translating(f"scale set {self.set_name}"):
            try:
                return self._identity.owns(self._sets.get(self._spec.resource_group, self.set_name).tags)
            except ResourceNotFoundError as error:
                if is_gone(error):
                    return None
                raise

    def make_set(self) -> None:
        """Make the run's scale set; an existing one stays as it is."""
        until_s = time.monotonic() + self._bounds.make_s
        if self.owns_set() is False:
            raise Misconfigured(f"scale set {self.set_name} exists without the tags of this run: it is left alone")
        body = scale_set_body(self._spec, self._identity.run, self._identity.job)
        with translating("the scale set"):
            poller = self._sets.begin_create_or_update(
                self._spec.resource_group, self.set_name, body, polling_interval=self._bounds.poll_s
            )
        self.wait(poller, "the scale set", until_s)

    def end(self, names: Iterable[str], until_s: float, *, always: bool = True) -> None:
        """End VMs that ``look`` listed, all at once; ``until_s``: by the monotonic clock. ProviderError: some left."""
        pollers, left = self.begin_ends(names, until_s)
        for name, poller in pollers.items():
            try:
                self.wait(poller, "", until_s, always=always)
            except ProviderError as error:
                left[name] = error
        if left:
            raise not_ended(left)

    def begin_ends(
        self, names: Iterable[str], until_s: float | None = None
    ) -> tuple[dict[str, Any], dict[str, ProviderError]]:
        """Begin to delete VMs; returns the operations to wait for, and the errors of those that failed, by name."""
        pollers: dict[str, Any] = {}
        left: dict[str, ProviderError] = {}
        for name in names:
            try:
                pollers[name] = self._begin_end(name, until_s)
            except ProviderError as error:
                left[name] = error
        return pollers, left

    def end_all(self, until_s: float) -> tuple[str, ...]:
        """End every VM of the run, what they left behind, and the scale set, unless it also holds other VMs.

        Returns descriptions of what was left behind, with prices. ProviderError: the error names what is left.
        """
        self.end([vm.name for vm, _ in self.look().vms], until_s)
        look = self.look()
        if look.vms:
            raise not_ended({vm.name: Transient("it is still listed") for vm, _ in look.vms})
        wrong: ProviderError | None = None
        orphans: tuple[str, ...] = ()
        try:
            orphans = self._end_orphans(until_s)
        except ProviderError as error:
            wrong = error
        if self.owns_set():
            self._end_set(look, until_s)
        if wrong is not None:
            raise wrong
        return orphans

    def _end_set(self, look: Look, until_s: float) -> None:
        name = f"scale set {self.set_name}"
        if look.guests:
            held = f"{name} is left: it holds {', '.join(look.guests)}, without the tags of this run"
            raise Misconfigured(held)
        with translating(name):
            poller = self._sets.begin_delete(
                self._spec.resource_group, self.set_name, polling_interval=self._bounds.poll_s
            )
        self.wait(poller, name, until_s, always=True)

    def parts(self) -> list[DiskOrInterface]:
        """List all network interfaces and disks in the group."""
        return [part for kind in PART_API_VERSIONS for part in self._parts_of(kind)]

    def tag_disks(self, vms: Collection[Vm]) -> None:
        """Give the run's tags to the boot disks of VMs, not to other disks, which the run must not delete."""
        requests = {vm.name: vm.request for vm in vms}
        for part in self._parts_of(DISK):
            if part.boots and part.vm in requests and not self._identity.owns(part.tags):
                own = self._identity.tags(requests[part.vm])
                self._send("PATCH", part, {"tags": {**part.tags, **own}})

    def _parts_of(self, kind: str) -> Iterator[DiskOrInterface]:
        group = f"/subscriptions/{self._spec.subscription_id}/resourceGroups/{self._spec.resource_group}"
        url = f"{group}/providers/{kind}?api-version={PART_API_VERSIONS[kind]}"
        with translating(f"the list of {kind.rsplit('/', 1)[-1]}"):
            while url:
                answer = self._client.send_request(HttpRequest("GET", url))
                answer.raise_for_status()
                document = answer.json()
                try:
                    for item in document["value"]:
                        inside = item.get("properties") or {}
                        vm = item.get("managedBy") or (inside.get("virtualMachine") or {}).get("id") or ""
                        yield DiskOrInterface(
                            id=item["id"],
                            kind=kind,
                            tags=item.get("tags") or {},
                            vm=vm.rsplit("/", 1)[-1],
                            sku=(item.get("sku") or {}).get("name", ""),
                            gib=int(inside.get("diskSizeGB") or 0),
                            boots=bool(inside.get("osType")),
                        )
                    url = document.get("nextLink") or ""
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise Transient(f"the list of {kind}: the answer cannot be read: {error}") from error

    def _send(self, method: str, part: DiskOrInterface, body: object = None) -> None:
        url = f"{part.id}?api-version={PART_API_VERSIONS[part.kind]}"
        with translating("" if method == "DELETE" else part.shown), _passing_over_gone():
            self._client.send_request(HttpRequest(method, url, json=body)).raise_for_status()

    def owns(self, part: DiskOrInterface) -> bool:
        """Whether a resource belongs to the run."""
        return self._identity.owns(part.tags)

    def _orphans(self) -> list[DiskOrInterface]:
        return [part for part in self.parts() if self.owns(part) and not part.vm]

    def _end_orphans(self, until_s: float) -> tuple[str, ...]:
        """Delete interfaces and disks of the run whose VM is gone; returns their descriptions with prices."""
        names: dict[str, str] = {}
        left = self._orphans()
        while left:
            errors: dict[str, ProviderError] = {}
            for part in left:
                names[part.id] = names.get(part.id) or self._priced(part)
                try:
                    self._send("DELETE", part)
                except ProviderError as error:
                    errors[names[part.id]] = error
            if errors:
                raise not_ended(errors)
            left = self._orphans()
            if left and time.monotonic() >= until_s:
                raise not_ended({names.get(part.id, part.shown): Transient("it is still listed") for part in left})
            if left:
                time.sleep(self._bounds.poll_s)
        return tuple(names.values())

    def _priced(self, part: DiskOrInterface) -> str:
        usd_per_h = self._disk_usd_per_h(part.sku, part.gib) if part.kind == DISK else 0.0
        return priced(part.shown, usd_per_h)

    def wait(self, poller: Any, what: str, until_s: float, *, always: bool = False) -> None:
        """Wait for an operation; unless ``always``, until the run is over. Raises NotInTime or ProviderError."""
        if poller is None:
            return
        with translating(what), _passing_over_gone():  # the resource was there and is gone
            while not poller.done():
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise NotInTime(f"{what}: not done in time" if what else "its end was not done in time")
                if self.stopped.is_set() and not always:
                    raise Transient(f"{what}: no longer waited for")
                poller.wait(min(left_s, STOP_WITHIN_S))
            poller.result(0)

    def _begin_end(self, name: str, until_s: float | None) -> Any:
        if until_s is not None and time.monotonic() >= until_s:
            raise Transient("there was no time to begin its end")
        with translating(""), _passing_over_gone():
            return self._machines.begin_delete(
                self._spec.resource_group, name, force_deletion=True, polling_interval=self._bounds.poll_s
            )
        return None

    def _vm(self, machine: Any, answered: str | None, now_s: float) -> Vm:
        size = machine.hardware_profile.vm_size if machine.hardware_profile else ""
        size = str(getattr(size, "value", size) or "")  # an enumeration if the SDK knows the size
        zone = (machine.zones or ["unknown"])[0]
        sizes = [known for known in self._spec.sizes if known.name == size]
        known = next((known for known in sizes if known.may_be_in(zone)), None)
        return Vm(
            name=machine.name,
            request=machine.tags.get(REQUEST_TAG, ""),
            provider=self._spec.provider,
            region=self._spec.location,
            zone=zone,
            size=size,
            usd_per_h=None if known is None else self._usd_per_h(known),
            paid_since_s=paid_since_s(machine.time_created, answered, now_s),
            num_devices=int(machine.tags.get(DEVICES_TAG) or 1),
            node_type=(known.node_type if known is not None else None) or "",
        )


class NotInTime(Transient):
    """An operation was not done within the time limit."""


@contextmanager
def _passing_over_gone() -> Iterator[None]:
    """Ignore errors because the resource does not exist: it is deleted, or was taken after it was made."""
    try:
        yield
    except HttpResponseError as error:  # the SDK's final read of a new resource raises no narrower class
        if error.status_code != 404 or not is_gone(error):
            raise

"""Spot VMs on Azure, in a flexible scale set, found by their tags; a repeated request makes no second VM."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from azure.core.exceptions import AzureError

from manager.host.plain_http import HttpFailed, fetch
from manager.providers.azure.client import azure_client
from manager.providers.azure.errors import SizeRefused, translating
from manager.providers.azure.group import Group, NotInTime
from manager.providers.azure.prices import disk_price
from manager.providers.azure.spec import AzureSize, AzureSpec, vm_body
from manager.providers.interface.cloud import Bounds, Identity, gone_at_once, larger, missing, outcome, turns
from manager.providers.interface.operations import Operations
from manager.providers.interface.provider import (
    BOOT_LOG_CHARACTERS,
    RETRYABLE,
    Capabilities,
    CapacityShort,
    Misconfigured,
    Price,
    ProviderError,
    QuotaExceeded,
    Refused,
    Throttled,
    Vm,
    end_all,
)

Offer = tuple[AzureSize, str | None]
BEING_MADE = ("accepted", "creating")
BOOT_LOG_TIMEOUT_S = 20.0
LOST = ("failed", "canceled", "deleting")
"""States of VMs that will not run. A VM in any other state exists: Azure may be updating or moving it."""


@dataclass(eq=False)
class _Making:
    """A VM that is being made: the remaining offers, and the operation under way."""

    name: str
    offers: list[Offer]
    num_devices: int
    poller: Any = None
    error: ProviderError | None = None
    offer: Offer | None = field(default=None)


class AzureProvider:
    """The ``Provider`` of VMs on Azure; ``client``: one that does not retry by itself, see ``azure_client``.

    ``custom_data``: makes the encoded cloud-config for a VM's name and number of devices. The prices of one hour are of
    a size, or of a disk's kind and GiB; None: not known.
    """

    def __init__(
        self,
        client: Any,
        spec: AzureSpec,
        identity: Identity,
        operations: Operations,
        custom_data: Callable[[str, int], str],
        *,
        find_price: Callable[[AzureSize], float | None] = lambda _size: None,
        find_disk_price: Callable[[str, int], float | None] = lambda _sku, _gib: None,
        bounds: Bounds | None = None,
        ending: str = "",
    ) -> None:
        self._machines = client.virtual_machines
        self._spec = spec
        self._identity = identity
        self._operations = operations
        self._custom_data = custom_data
        self._find_price = find_price
        self._bounds = bounds or Bounds()
        self.group = Group(client, spec, identity, self._bounds, self._usd_per_h, find_disk_price)
        self._ending = ending
        self._has_set = False
        self._taken: frozenset[str] = frozenset()
        self._prices: dict[str, Price] = {}

    def request(self, request: str, count: int, max_vms: int | None = None, *, node_type: str = "") -> tuple[Vm, ...]:
        """See ``Provider``. After a refusal the next zone is tried, then the next size; more devices come last."""
        answer = self._operations.answer(request)
        if answer is not None:
            return tuple(vm for vm in self.list() if vm.name in answer)
        if not self._has_set:
            self.group.make_set()
            self._has_set = True
        until_s, spec = time.monotonic() + self._bounds.make_s, self._spec.of_type(node_type)
        most = count if max_vms is None else max_vms
        listed = self._of(request)
        there = {vm.name: vm.num_devices for vm, state in listed if state not in (*BEING_MADE, *LOST)}
        making = [_Making(vm.name, [], vm.num_devices) for vm, state in listed if state in BEING_MADE]
        states = {vm.name: state for vm, state in listed}
        errors: dict[str, ProviderError] = {}
        decisions: list[str] = []
        for num_devices in turns(spec.sizes, count, most):
            if time.monotonic() >= until_s or not all(isinstance(error, Refused) for error in errors.values()):
                break
            known = there | {vm_made.name: vm_made.num_devices for vm_made in making}
            new = missing(request, known, count, most, num_devices)
            if new and errors:
                decisions.append(larger(request, len(new), spec.sizes, num_devices, errors))
            making += [_Making(name, spec.offers_of(index, num_devices), num_devices) for index, name in new]
            given_up = self._make(making, request, states, until_s)
            there |= {vm_made.name: vm_made.num_devices for vm_made in making if vm_made not in given_up}
            errors = {vm_made.name: vm_made.error for vm_made in given_up if vm_made.error is not None}
            making = []
        listed = self._of(request)
        made = [vm for vm, state in listed if state not in (*BEING_MADE, *LOST)]
        gone = gone_at_once(there.keys() - {vm.name for vm in made})
        if not any(isinstance(error, RETRYABLE) for error in (gone | errors).values()):  # nothing waits for the others
            self.group.begin_ends([vm.name for vm, _ in listed if vm not in made])
        granted = outcome(request, made, gone | errors, decisions)
        with contextlib.suppress(ProviderError):  # no permission: the disks will not be found later
            self.group.tag_disks(granted)
        if not isinstance(granted.missing, RETRYABLE):
            self._operations.answered(request, tuple(vm.name for vm in granted))
        return granted

    def list(self) -> tuple[Vm, ...]:
        return tuple(vm for vm, _ in self.group.look().vms)

    def delete(self, names: Sequence[str]) -> None:
        """See ``Provider``: blocks until Azure reports that the VMs are gone."""
        ours = [vm.name for vm in self.list() if vm.name in names]
        for name in ours:
            self._operations.ended(name)
        self.group.end(ours, time.monotonic() + self._bounds.delete_s)

    def evict(self, name: str) -> bool:
        """See ``Provider``: Azure simulates the eviction of a spot VM, and decides about time and notice."""
        if not self._spec.spot:
            return False
        if name not in [vm.name for vm in self.list()]:
            raise Misconfigured(f"VM {name} is not there, or is not of this run: it is left alone")
        with translating(f"the eviction of {name}"):
            self._machines.simulate_eviction(self._spec.resource_group, name)
        return True

    def boot_log(self, name: str) -> str:
        """See ``Provider``: the log of the serial console, which Azure keeps in a blob."""
        try:
            diagnostics = self._machines.retrieve_boot_diagnostics_data(self._spec.resource_group, name)
            where = diagnostics.serial_console_log_blob_uri
            if not where:  # there is no log yet
                return ""
            log = fetch(str(where), timeout_s=BOOT_LOG_TIMEOUT_S)
        except (AzureError, HttpFailed, ValueError):
            return ""
        return log.text[-BOOT_LOG_CHARACTERS:] if log.status == 200 else ""

    def stop(self) -> None:
        """See ``Provider``: Azure continues operations that were begun, and lists their VMs."""
        self.group.stopped.set()

    def dismantle(self) -> tuple[str, ...]:
        """See ``Provider``: also deletes the scale set, if there is one."""
        self._has_set = False
        return self.group.end_all(time.monotonic() + self._bounds.delete_s)

    def price(self, node_type: str = "") -> Price | None:
        """See ``Provider``. If the price of any size is unknown, so is the result."""
        price = self._prices.get(node_type) or self._spec.of_type(node_type).price(self._find_price)
        if price is not None:
            self._prices[node_type] = price
        return price

    def capabilities(self) -> Capabilities:
        return Capabilities(spot=self._spec.spot, zones=self._spec.zones, notices="azure", ending=self._ending)

    def _usd_per_h(self, size: AzureSize) -> float | None:
        return size.usd_per_h if size.usd_per_h is not None else self._find_price(size)

    def _of(self, request: str) -> Sequence[tuple[Vm, str]]:
        """Return the VMs of a request, and their states."""
        look = self.group.look()
        self._taken = look.others
        return [(vm, state) for vm, state in look.vms if vm.request == request]

    def _make(
        self, making: Sequence[_Making], request: str, states: dict[str, str], until_s: float
    ) -> Sequence[_Making]:
        """Make VMs at the same time, each by its first offer that succeeds; return VMs without an offer left."""
        given_up: list[_Making] = []
        while making:
            same: ProviderError | None = None
            for vm in making:
                if same is not None:
                    vm.error = same
                    continue
                try:
                    self._begin(vm, request, states.pop(vm.name, None), until_s)
                except (Misconfigured, Throttled) as error:  # the others would be answered in the same way
                    same = vm.error = error
                except ProviderError as error:
                    vm.error = error
            making, without = self._round(making, until_s)
            given_up += without
        return given_up

    def _begin(self, vm: _Making, request: str, state: str | None, until_s: float) -> None:
        """Begin to make a VM, or continue what an earlier manager began."""
        if state in BEING_MADE:
            vm.poller = self._resumed(vm)
            return
        if vm.name in self._taken:
            raise Misconfigured(f"VM {vm.name} exists without the tags of this run: it is left alone")
        if state is not None:  # remains of a failed VM block its name
            self.group.end([vm.name], until_s, always=False)
        vm.offer = vm.offers.pop(0)
        names = {"run": self._identity.run, "job": self._identity.job, "request": request}
        body = vm_body(self._spec, names, vm.name, vm.offer, self._custom_data(vm.name, vm.num_devices))
        with translating(f"VM {vm.name}"):
            vm.poller = self._machines.begin_create_or_update(
                self._spec.resource_group, vm.name, body, polling_interval=self._bounds.poll_s
            )
        self._operations.begun(vm.name, vm.poller.continuation_token())

    def _resumed(self, vm: _Making) -> Any:
        """Return an earlier manager's operation, or a watch on its VM if the operation was not stored."""
        token = self._operations.token(vm.name)
        if token is not None:
            with contextlib.suppress(ValueError), translating(f"VM {vm.name}"):  # ValueError: not a valid token
                return self._machines.begin_create_or_update(
                    self._spec.resource_group,
                    vm.name,
                    {},
                    continuation_token=token,
                    polling_interval=self._bounds.poll_s,
                )
        return _Watched(self.group, vm.name, self._bounds.poll_s)

    def _round(self, making: Sequence[_Making], until_s: float) -> tuple[Sequence[_Making], Sequence[_Making]]:
        """Wait for operations (a late VM counts as unavailable); return failed VMs with and without another offer."""
        left: list[_Making] = []
        given_up: list[_Making] = []
        remains: list[str] = []
        for vm in making:
            try:
                self.group.wait(vm.poller, f"VM {vm.name}", until_s)
            except NotInTime:
                vm.error, vm.offers = CapacityShort(f"VM {vm.name}: not made within {self._bounds.make_s:g} s"), []
            except (Refused, Misconfigured) as error:
                vm.error = error
                remains.append(vm.name)
            except ProviderError as error:  # it may exist: the request is repeated under its name
                vm.error = error
            self._operations.ended(vm.name)
            why, vm.poller, vm.error = vm.error, None, None
            if why is None:
                continue
            if not isinstance(why, Refused):
                vm.offers = []
            if isinstance(why, QuotaExceeded | SizeRefused) and vm.offer is not None:  # this applies to all zones
                vm.offers = [offer for offer in vm.offers if offer[0] != vm.offer[0]]
            if vm.offers:
                left.append(vm)
            else:
                vm.error = why
                given_up.append(vm)
        try:
            self.group.end(remains, until_s, always=False)
        except ProviderError as error:  # remains of failed VMs block their names
            kept = [vm for vm in left if vm.name in remains]
            for vm in kept:
                vm.error = error
            return [vm for vm in left if vm not in kept], [*given_up, *kept]
        return left, given_up


class _Watched:
    """Replaces an operation of which only the VM is known: it is done once that VM is no longer being made."""

    def __init__(self, group: Group, name: str, every_s: float) -> None:
        self._group, self._name, self._every_s = group, name, every_s
        self._look_at_s, self._done = 0.0, False

    def done(self) -> bool:
        if not self._done and (now_s := time.monotonic()) >= self._look_at_s:
            self._look_at_s = now_s + self._every_s
            states = {vm.name: state for vm, state in self._group.look().vms}
            self._done = states.get(self._name) not in BEING_MADE
        return self._done

    def wait(self, timeout_s: float) -> None:
        self._group.stopped.wait(min(timeout_s, self._every_s))

    def result(self, _timeout_s: float) -> None:
        """Return nothing: the list of VMs shows whether the VM was made."""


def end_run(
    spec: AzureSpec,
    run: str,
    job: str,
    client: Any = None,
    say: Callable[[str], None] = lambda _sentence: None,
    bounds: Bounds | None = None,
) -> tuple[Vm, ...]:
    """End every VM of a run, and its scale set; blocks until they are gone. Returns the VMs that existed.

    ``client``: used in place of one with the user's login. ``say``: called with a sentence for what is left alone, and
    for what is tried again. ProviderError: nothing of this run exists, or what is left.
    """
    with tempfile.TemporaryDirectory(prefix="morph-") as directory:
        provider = AzureProvider(
            client or azure_client(spec.subscription_id, base_url=spec.resource_manager, authority=spec.authority),
            spec,
            Identity(run=run, job=job),
            Operations(Path(directory) / "operations.json"),
            _none_is_made,
            find_disk_price=partial(disk_price, spec.location),
            bounds=bounds,
        )
        look, owns_set = provider.group.look(), provider.group.owns_set()
        is_left = False
        with contextlib.suppress(ProviderError):  # an account that may not list them: reported after the VMs are ended
            is_left = any(provider.group.owns(part) for part in provider.group.parts())
        if owns_set is False:
            name = provider.group.set_name
            say(f"scale set {name} does not have the tags of this run: it is left alone, with what it holds")
        if not look.vms and not owns_set and not is_left:
            runs = f"runs whose VMs are there: {', '.join(look.runs)}" if look.runs else "no run of Morph has VMs there"
            raise Misconfigured(
                f"nothing in resource group {spec.resource_group} has the tags of run {run} of job {job}: it was ended "
                f"before, or a name is misspelt; {runs}"
            )
        for left in end_all(provider, say=say):
            say(f"ended what a VM had left behind: {left}")
    return tuple(vm for vm, _ in look.vms)


def _none_is_made(node: str, _num_devices: int) -> str:
    raise AssertionError(f"{node} is to be ended, not made")

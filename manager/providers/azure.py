"""Spot VMs on Azure: made by name, put into a flexible scale set, found again by their tags.

Names are made from the request, so that a request that comes again, from whoever, makes no second VM.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from azure.core.exceptions import ResourceNotFoundError

from manager.providers.azure_errors import translating
from manager.providers.azure_operations import Operations
from manager.providers.azure_spec import (
    DEVICES_TAG,
    JOB_TAG,
    REQUEST_TAG,
    RUN_TAG,
    AzureSize,
    AzureSpec,
    scale_set_body,
    scale_set_name,
    vm_body,
)
from manager.providers.azure_times import paid_since_s
from manager.providers.provider import (
    Capabilities,
    Price,
    QuotaExceeded,
    Refused,
    Transient,
    Vm,
    vm_name,
)

Offer = tuple[AzureSize, str | None]
STOP_WITHIN_S = 0.5
ENDED = ("succeeded", "failed", "canceled")


@dataclass(frozen=True)
class Bounds:
    """How long to wait, in seconds. ``poll_s``: between two looks at an operation, where Azure names no time."""

    make_s: float = 900.0
    delete_s: float = 600.0
    poll_s: float = 5.0


@dataclass(frozen=True)
class Identity:
    """Whose VMs they are: the tags."""

    run: str
    job: str


@dataclass(eq=False)
class _Making:
    """A VM on its way: offers that are left, and the operation under way."""

    name: str
    offers: list[Offer]
    num_devices: int
    poller: Any = None
    error: Refused | None = None
    offer: Offer | None = field(default=None)


class AzureProvider:
    """See ``Provider``.

    Args:
        client: A ``ComputeManagementClient`` that does not retry by itself; see ``azure_client``.
        spec: Where and what.
        identity: Whose VMs they are.
        operations: What is under way.
        custom_data: The encoded cloud-config for a VM of this name, with so many devices.
        find_price: The price of one hour of a size whose price the user does not give; None when it is not known.
        bounds: How long to wait.
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
        bounds: Bounds | None = None,
    ) -> None:
        self._machines = client.virtual_machines
        self._sets = client.virtual_machine_scale_sets
        self._spec = spec
        self._identity = identity
        self._operations = operations
        self._custom_data = custom_data
        self._find_price = find_price
        self._bounds = bounds or Bounds()
        self._has_set = False
        self._price: Price | None = None
        self._stopped = threading.Event()

    def request(self, request: str, count: int, max_vms: int | None = None) -> tuple[Vm, ...]:
        """See ``Provider``. Offers that Azure refuses are followed by the next zone, and then by the next size.

        Sizes with more devices are tried once those with fewer are refused, for what is then missing.
        """
        answer = self._operations.answer(request)
        if answer is not None:
            return tuple(vm for vm in self.list() if vm.name in answer)
        self._make_set()
        until_s = time.monotonic() + self._bounds.make_s
        most = count if max_vms is None else max_vms
        found = [(vm, state) for vm, state in self._found() if vm.request == request]
        states = {vm.name: state for vm, state in found}
        there = {vm.name: vm.num_devices for vm, state in found if state == "succeeded"}
        making = [_Making(vm.name, [], vm.num_devices) for vm, state in found if state not in ENDED]
        refused: list[Refused] = []
        for num_devices in self._spec.turns(count, most):
            known = there | {one.name: one.num_devices for one in making}
            num_vms = max(0, min(-(-(count - sum(known.values())) // num_devices), most - len(known)))
            free = (index for index in itertools.count() if vm_name(request, index) not in known)
            making += [
                _Making(vm_name(request, index), self._spec.offers_of(index, num_devices), num_devices)
                for index in itertools.islice(free, num_vms)
            ]
            given_up = self._make(making, request, states, until_s)
            there |= {one.name: one.num_devices for one in making if one not in given_up}
            refused += [one.error for one in given_up if one.error is not None]
            making = []
        found = [(vm, state) for vm, state in self._found() if vm.request == request]
        made = tuple(vm for vm, state in found if state == "succeeded")
        for vm, state in found:
            if state != "succeeded":
                self._discard(vm.name, until_s)
        if not made:
            evicted = Transient(f"{request}: its VMs were made and are gone")
            raise next((error for error in refused if isinstance(error, QuotaExceeded)), [*refused, evicted][0])
        self._operations.answered(request, tuple(vm.name for vm in made))
        return made

    def list(self) -> tuple[Vm, ...]:
        """See ``Provider``."""
        return tuple(vm for vm, _ in self._found())

    def delete(self, names: Sequence[str]) -> None:
        """See ``Provider``: blocks until Azure says that they are gone."""
        until_s = time.monotonic() + self._bounds.delete_s
        pollers = [(vm.name, self._begin_delete(vm.name)) for vm in self.list() if vm.name in names]
        for name, poller in pollers:
            self._operations.ended(name)
            if poller is not None:
                self._wait(poller, f"the end of {name}", until_s, always=True)

    def stop(self) -> None:
        """See ``Provider``: Azure goes on with what was begun, and the VM is listed."""
        self._stopped.set()

    def dismantle(self) -> None:
        """See ``Provider``: the scale set too; one that is not there is no error."""
        self.delete([vm.name for vm in self.list()])
        until_s = time.monotonic() + self._bounds.delete_s
        with translating("the end of the scale set"), contextlib.suppress(ResourceNotFoundError):
            poller = self._sets.begin_delete(
                self._spec.resource_group, scale_set_name(self._identity.run), polling_interval=self._bounds.poll_s
            )
            self._wait(poller, "the end of the scale set", until_s, always=True)
        self._has_set = False

    def price(self) -> Price | None:
        """See ``Provider``. A size without a price makes the whole unknown."""
        if self._price is None:
            figures = [self._usd_per_h(size) for size in self._spec.sizes]
            known = [figure for figure in figures if figure is not None]
            if len(known) < len(figures):
                return None
            theirs = any(size.usd_per_h is None for size in self._spec.sizes)
            source = "Azure's retail price list" if theirs else "the cluster file"
            self._price = Price(usd_per_h=max(known), source=source)
        return self._price

    def capabilities(self) -> Capabilities:
        """See ``Provider``."""
        return Capabilities(spot=self._spec.spot, zones=self._spec.zones, notices="azure")

    def simulate_eviction(self, name: str) -> None:
        """Have Azure evict a spot VM as if it needed the room: for trying things out."""
        with translating(f"the eviction of {name}"):
            self._machines.simulate_eviction(self._spec.resource_group, name)

    def _found(self) -> Sequence[tuple[Vm, str]]:
        """Every VM with this run's tag, and its provisioning state in small letters."""
        answered: list[str | None] = [None]

        def note(response: Any) -> None:
            answered[0] = response.http_response.headers.get("Date")

        with translating("the list of VMs"):
            try:
                machines = [*self._machines.list(self._spec.resource_group, raw_response_hook=note)]
            except ResourceNotFoundError:
                return []
        found, now_s = [], time.time()
        sizes = {size.name: size for size in self._spec.sizes}
        for machine in machines:
            tags = machine.tags or {}
            if tags.get(RUN_TAG) != self._identity.run or tags.get(JOB_TAG) != self._identity.job:
                continue
            size = machine.hardware_profile.vm_size if machine.hardware_profile else ""
            size = str(getattr(size, "value", size) or "")  # an enumeration where the SDK knows the size
            vm = Vm(
                name=machine.name,
                request=tags.get(REQUEST_TAG, ""),
                zone=(machine.zones or ["unknown"])[0],
                size=size,
                usd_per_h=self._usd_per_h(sizes[size]) if size in sizes else None,
                paid_since_s=paid_since_s(machine.time_created, answered[0], now_s),
                num_devices=int(tags.get(DEVICES_TAG) or 1),
            )
            found.append((vm, str(machine.provisioning_state or "").lower()))
        return found

    def _usd_per_h(self, size: AzureSize) -> float | None:
        return size.usd_per_h if size.usd_per_h is not None else self._find_price(size)

    def _make_set(self) -> None:
        if self._has_set:
            return
        body = scale_set_body(self._spec, self._identity.run, self._identity.job)
        until_s = time.monotonic() + self._bounds.make_s
        with translating("the scale set"):
            poller = self._sets.begin_create_or_update(
                self._spec.resource_group,
                scale_set_name(self._identity.run),
                body,
                polling_interval=self._bounds.poll_s,
            )
        self._wait(poller, "the scale set", until_s)
        self._has_set = True

    def _make(
        self, making: Sequence[_Making], request: str, states: dict[str, str], until_s: float
    ) -> Sequence[_Making]:
        """Make VMs at once, each by the first of its offers that is taken; returns those without a further one."""
        given_up: list[_Making] = []
        while making:
            for one in making:
                self._begin(one, request, states.pop(one.name, None), until_s)
            making, without = self._round(making, until_s)
            given_up += without
        return given_up

    def _begin(self, one: _Making, request: str, state: str | None, until_s: float) -> None:
        """Begin to make a VM, or go on with what an earlier manager began."""
        if state == "succeeded":
            one.poller = None
            return
        if state is not None and state not in ENDED:
            one.poller = self._resumed(one, until_s)
            return
        if state is not None:
            self._discard(one.name, until_s)
        one.offer = one.offers.pop(0)
        names = {"run": self._identity.run, "job": self._identity.job, "request": request}
        body = vm_body(self._spec, names, one.name, one.offer, self._custom_data(one.name, one.num_devices))
        try:
            with translating(f"VM {one.name}"):
                one.poller = self._machines.begin_create_or_update(
                    self._spec.resource_group, one.name, body, polling_interval=self._bounds.poll_s
                )
        except Refused as error:
            one.error = error
            return
        self._operations.begun(one.name, one.poller.continuation_token())

    def _resumed(self, one: _Making, until_s: float) -> Any:
        """The operation of an earlier manager; None once the VM is there by other ways."""
        token = self._operations.token(one.name)
        if token is not None:
            with contextlib.suppress(ValueError), translating(f"VM {one.name}"):  # ValueError: not such a token
                return self._machines.begin_create_or_update(
                    self._spec.resource_group,
                    one.name,
                    {},
                    continuation_token=token,
                    polling_interval=self._bounds.poll_s,
                )
        while time.monotonic() < until_s:  # it was killed before it noted the token
            state = {vm.name: state for vm, state in self._found()}.get(one.name, "failed")
            if state in ENDED:
                return None
            if self._stopped.wait(self._bounds.poll_s):
                break
        raise Transient(f"VM {one.name} is still being made")

    def _round(self, making: Sequence[_Making], until_s: float) -> tuple[Sequence[_Making], Sequence[_Making]]:
        """Wait for what was begun; returns those with a further offer, and those without, with their errors."""
        left: list[_Making] = []
        given_up: list[_Making] = []
        for one in making:
            if one.poller is not None:
                try:
                    self._wait(one.poller, f"VM {one.name}", until_s)
                except Refused as error:
                    one.error = error
                    self._discard(one.name, until_s)
            self._operations.ended(one.name)
            why, one.poller, one.error = one.error, None, None
            if why is None:
                continue
            if isinstance(why, QuotaExceeded) and one.offer is not None:  # no zone has another quota
                one.offers = [offer for offer in one.offers if offer[0] != one.offer[0]]
            if one.offers:
                left.append(one)
            else:
                one.error = why
                given_up.append(one)
        return left, given_up

    def _discard(self, name: str, until_s: float) -> None:
        """End a VM that failed: Azure keeps what is left of it under its name."""
        poller = self._begin_delete(name)
        if poller is not None:
            self._wait(poller, f"the end of {name}", until_s)

    def _begin_delete(self, name: str) -> Any:
        with translating(f"the end of {name}"):
            try:
                return self._machines.begin_delete(
                    self._spec.resource_group, name, force_deletion=True, polling_interval=self._bounds.poll_s
                )
            except ResourceNotFoundError:
                return None

    def _wait(self, poller: Any, what: str, until_s: float, *, always: bool = False) -> None:
        """Wait for an operation; unless ``always``, no longer than until ``stop``."""
        with translating(what), contextlib.suppress(ResourceNotFoundError):  # it was there and is gone
            while not poller.done():
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise Transient(f"{what}: not done in time")
                if self._stopped.is_set() and not always:
                    raise Transient(f"{what}: not waited for any more")
                poller.wait(min(left_s, STOP_WITHIN_S))
            poller.result(0)

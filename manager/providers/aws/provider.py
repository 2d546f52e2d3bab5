"""Spot instances on AWS: each is an instant fleet, which AWS makes at once or not at all, and is found by its tags.

The client token of its request is on disk before AWS is called, so repeating the request makes no second instance.
"""

from __future__ import annotations

import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from manager.providers.aws.account import Account, Instance
from manager.providers.aws.client import Aws, aws_client, code_of, reading
from manager.providers.aws.errors import MISMATCH, fleet_error
from manager.providers.aws.prices import Prices, prices_of
from manager.providers.aws.spec import AwsSpec, fleet_body, version_body
from manager.providers.interface.cloud import Bounds, Identity, gone_at_once, larger, missing, outcome, turns
from manager.providers.interface.operations import Operations
from manager.providers.interface.provider import (
    BOOT_LOG_CHARACTERS,
    ENDED,
    RETRYABLE,
    Capabilities,
    CapacityShort,
    Misconfigured,
    Price,
    ProviderError,
    QuotaExceeded,
    Refused,
    Throttled,
    Transient,
    Vm,
    end_all,
)
from morph.contract.base import Value

NUM_AT_ONCE = 8
"""The number of fleets that are requested at the same time: AWS takes seconds for each."""
OF_A_FLEET = (Throttled, Transient, QuotaExceeded, CapacityShort, Misconfigured)


class _Made(Value):
    """An instance that AWS has confirmed, and ``version``, that of its launch template, until it is listed."""

    id: str
    vm: Vm
    version: str = ""


class AwsProvider:
    """The ``Provider`` of instances on AWS; ``operations`` keeps each VM's client token, and then its instance.

    ``user_data``: makes the encoded cloud-config for a VM's name and number of devices.
    """

    def __init__(
        self,
        ec2: Aws,
        spec: AwsSpec,
        identity: Identity,
        operations: Operations,
        user_data: Callable[[str, int], str],
        *,
        prices: Prices,
        bounds: Bounds | None = None,
        ending: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ec2, self._spec, self._identity, self._operations = ec2, spec, identity, operations
        self._user_data, self._prices, self._bounds = user_data, prices, bounds or Bounds()
        self._ending, self._clock = ending, clock
        self.account = Account(ec2, spec, identity, self._bounds, prices.of, prices.volume)
        self._has_template = False
        self.ended: dict[str, Vm] = {}
        self._new_since_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def request(self, request: str, count: int, max_vms: int | None = None, *, node_type: str = "") -> tuple[Vm, ...]:
        """See ``Provider``. Types with more devices are tried for VMs that were refused, not for those that died."""
        answer = self._operations.answer(request)
        if answer is not None:
            return tuple(vm for vm in self.list() if vm.name in answer)
        if not self._has_template:
            self.account.make_template()
            self._has_template = True
        most, spec = count if max_vms is None else max_vms, self._spec.of_type(node_type)
        made: dict[str, int] = {}
        errors: dict[str, ProviderError] = {}
        decisions: list[str] = []
        for num_devices in turns(spec.types, count, most):
            there = {vm.name: vm.num_devices for vm in self.list() if vm.request == request}
            names = [name for _, name in missing(request, made | there, count, most, num_devices)]
            if names and errors:
                decisions.append(larger(request, len(names), spec.types, num_devices, errors))
            errors = self._make(names, request, num_devices, spec)
            made |= {name: num_devices for name in names if name not in errors}
            if not all(isinstance(error, Refused) for error in errors.values()):
                break
        instances = self._instances()
        vms = [vm for vm in self._listed(instances) if vm.request == request]
        died = gone_at_once(made.keys() - {vm.name for vm in vms})
        died |= {each.vm.name: each.why for each in instances if each.vm.name in died and each.why is not None}
        granted = outcome(request, vms, errors | died, decisions)
        if not isinstance(granted.missing, RETRYABLE):
            self._operations.answered(request, tuple(vm.name for vm in granted))
        return granted

    def _make(self, names: Sequence[str], request: str, num_devices: int, spec: AwsSpec) -> dict[str, ProviderError]:
        """Make VMs, some at the same time, until an error applies to all; return the errors of the others, by name."""
        errors: dict[str, ProviderError] = {}

        def make(name: str) -> None:
            same = next((error for error in [*errors.values()] if not isinstance(error, Transient)), None)
            if self.account.stopped.is_set():
                same = Transient(f"{request}: no longer waited for")
            try:
                if same is None:
                    self._make_one(name, request, num_devices, spec)
            except ProviderError as error:
                same = error
            if same is not None:
                errors[name] = same

        if names:
            with ThreadPoolExecutor(min(NUM_AT_ONCE, len(names)), "morph-fleet") as pool:
                list(pool.map(make, names))
        return errors

    def _make_one(self, name: str, request: str, num_devices: int, spec: AwsSpec) -> None:
        """Request one VM, or repeat an earlier manager's request under the same client token."""
        kept = self._operations.token(name) or ""
        version = ""
        token = str(uuid.uuid4()) if not kept or kept.startswith("{") else kept
        self._operations.begun(name, token)
        user_data = self._user_data(name, num_devices)
        wanted = version_body(self._spec, self._identity, user_data, token)
        try:
            made_version = self._ec2.call("create_launch_template_version", f"VM {name}", **wanted)
            with reading(f"VM {name}"):
                version = str(made_version["LaunchTemplateVersion"]["VersionNumber"])
            body = fleet_body(spec, self._identity, request, name, num_devices, version, token)
            answer = self._ec2.call("create_fleet", f"VM {name}", **body)
        except (Refused, Misconfigured):
            self._operations.ended(name)
            self._drop_version(version)
            raise
        except ProviderError as error:
            if code_of(error) == MISMATCH:  # the request differs from the first, whose instances AWS lists
                self._operations.ended(name)
            raise
        with reading(f"VM {name}"):
            made = [(fleet, instance) for fleet in answer.get("Instances", []) for instance in fleet["InstanceIds"]]
            errors = [(str(each["ErrorCode"]), str(each.get("ErrorMessage", ""))) for each in answer.get("Errors", [])]
            if made:
                fleet, instance = made[0]
                chosen = fleet["LaunchTemplateAndOverrides"]["Overrides"]
                zones = [zone for zone, subnet in self._spec.subnets.items() if subnet == chosen.get("SubnetId")]
                zone = fleet.get("AvailabilityZone") or next(iter(zones), "unknown")
                vm = self.account.vm(name, request, str(fleet["InstanceType"]), zone, num_devices, time.time())
                self._operations.begun(name, _Made(id=instance, vm=vm, version=version).model_dump_json())
                return
        self._operations.ended(name)
        self._drop_version(version)
        if not errors:
            raise Transient(f"VM {name}: its fleet has neither an instance nor an error")
        typed = [fleet_error(code, message, f"VM {name}") for code, message in errors]  # each type and zone has its own
        raise min(typed, key=lambda error: OF_A_FLEET.index(type(error)))

    def _drop_version(self, version: str) -> None:
        """Delete a version whose instance is listed, ended or refused: it holds secrets, and 10,000 are allowed."""
        with suppress(ProviderError):  # the version is deleted with the template
            if version:
                known = {"LaunchTemplateName": self.account.template, "Versions": [version]}
                self._ec2.call("delete_launch_template_versions", "", **known)

    def _new(self) -> list[_Made]:
        """Return instances that were made recently."""
        return [_Made.model_validate_json(kept) for kept in self._operations.tokens() if kept.startswith("{")]

    def _instances(self) -> list[Instance]:
        """Return every instance of the run that AWS lists, also ending ones, and new ones that it may not list yet."""
        instances, _ = self.account.look()
        states = {instance.id: instance for instance in instances}
        for made in self._new():
            with self._lock:
                since_s = self._new_since_s.setdefault(made.id, self._clock())
            listed = states.get(made.id)
            if listed is not None and made.version:
                self._drop_version(made.version)
                self._operations.begun(made.vm.name, made.model_copy(update={"version": ""}).model_dump_json())
            if (listed is not None and not listed.is_there) or self._clock() - since_s > self._bounds.list_s:
                self._operations.ended(made.vm.name)
            elif listed is None:
                instances.append(Instance(made.id, made.vm, "pending"))
        return instances

    def list(self) -> tuple[Vm, ...]:
        return self._listed(self._instances())

    @staticmethod
    def _listed(instances: Sequence[Instance]) -> tuple[Vm, ...]:
        vms = {instance.vm.name: instance.vm for instance in instances if instance.is_there}
        return tuple(vms[name] for name in sorted(vms, key=lambda name: (len(name), name)))

    def delete(self, names: Sequence[str]) -> None:
        """See ``Provider``: returns once AWS reports that the instances are ending and no longer billed."""
        self._end([instance for instance in self._instances() if instance.is_there and instance.vm.name in names])

    def _end(self, instances: Sequence[Instance]) -> None:
        new = {made.id: made for made in self._new()}
        self.account.end({instance.id: instance.vm.name for instance in instances}, may_be_new=new)
        for instance in instances:
            self._operations.ended(instance.vm.name)
            self._drop_version(new[instance.id].version if instance.id in new else "")
            self.ended[instance.vm.name] = instance.vm

    def evict(self, _name: str) -> bool:
        """See ``Provider``: EC2 cannot do this, and the service that can do it needs a role of its own."""
        return False

    def boot_log(self, name: str) -> str:
        """See ``Provider``: the console output."""
        try:
            of_name = [instance for instance in self._instances() if instance.vm.name == name]
        except ProviderError:
            return ""
        if not of_name:
            return ""
        why = "" if of_name[-1].why is None else f"{ENDED}{of_name[-1].why}\n"
        return why + self.account.console(of_name[-1].id)[-BOOT_LOG_CHARACTERS + len(why) :]

    def stop(self) -> None:
        """See ``Provider``: requested instances are still made, and listed."""
        self.account.stopped.set()

    def dismantle(self) -> tuple[str, ...]:
        """See ``Provider``: also deletes the launch template, if there is one."""
        self._has_template = False
        self._end([instance for instance in self._instances() if instance.is_there])
        return self.account.end_rest(time.monotonic() + self._bounds.delete_s)

    def price(self, node_type: str = "") -> Price | None:
        """See ``Provider``. If the price of any type is unknown, so is the result."""
        return self._spec.of_type(node_type).price(self._prices.dearest)

    def capabilities(self) -> Capabilities:
        return Capabilities(spot=self._spec.spot, zones=self._spec.zones, notices="aws", ending=self._ending)


def open_aws(
    spec: AwsSpec,
    identity: Identity,
    operations: Operations,
    user_data: Callable[[str, int], str],
    *,
    open_client: Callable[[str], Any] | None = None,
    **options: Any,
) -> AwsProvider:
    """Open a provider with the user's login; makes no call yet."""
    opened = open_client or (lambda service: aws_client(spec, service))
    ec2 = Aws(lambda: opened("ec2"))
    return AwsProvider(ec2, spec, identity, operations, user_data, prices=prices_of(spec, opened), **options)


def end_run(
    spec: AwsSpec,
    run: str,
    job: str,
    say: Callable[[str], None],
    pause: Callable[[float], object] | None = None,
    **options: Any,
) -> tuple[Vm, ...]:
    """End every instance of a run, what they left behind, and its launch template; blocks until they are gone.

    Returns the VMs that existed. ProviderError: nothing of this run exists, or what is left.
    """
    with tempfile.TemporaryDirectory(prefix="morph-") as directory:
        operations = Operations(Path(directory) / "operations.json")
        provider = open_aws(spec, Identity(run=run, job=job), operations, _none_is_made, **options)
        account = provider.account
        instances, runs = account.look()
        if account.owns_template() is False:
            say(f"launch template {account.template} does not have the tags of this run: it is left alone")
        if not any(instance.is_there for instance in instances) and not account.owns_template() and not account.parts():
            known = f"runs whose instances are there: {', '.join(runs)}" if runs else "no run of Morph has any there"
            raise Misconfigured(
                f"nothing in {spec.region} has the tags of run {run} of job {job}: it was ended before, or a name is "
                f"misspelt; {known}"
            )
        for left in end_all(provider, say=say, pause=pause):
            say(f"ended what an instance had left behind: {left}")
    return tuple(
        ({instance.vm.name: instance.vm for instance in instances if instance.is_there} | provider.ended).values()
    )


def _none_is_made(node: str, _num_devices: int) -> str:
    raise AssertionError(f"{node} is to be ended, not made")

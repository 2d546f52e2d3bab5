"""Spot instances on AWS: one instant fleet for each, which AWS makes at once or not at all; found again by their tags.

An instance has its VM's name as a tag from the beginning, and a request for it has a client token that is on disk
before AWS is asked: the same request again, from whoever, makes no second one.
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
from manager.providers.interface.cloud import Bounds, Identity, missing, turns, why_none
from manager.providers.interface.operations import Operations
from manager.providers.interface.provider import (
    BOOT_LOG_CHARACTERS,
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
"""Fleets that are asked for beside each other: AWS takes seconds for each."""
SETTLE_S = 600.0
"""For so long an instance that was made is believed to be there, unless AWS tells that it ends."""


class _Made(Value):
    """An instance that AWS said it made: for a while, a list may leave it out."""

    id: str
    vm: Vm


class AwsProvider:
    """See ``Provider``.

    Args:
        ec2: The service.
        spec: Where and what.
        identity: Whose instances they are.
        operations: What is under way: the client token of each VM, and then for a while the VM itself.
        user_data: The encoded cloud-config for a VM of this name, with so many devices.
        prices: What the user does not say.
        bounds: How long to wait.
        ending: The command that ends what is left of the run.
        clock: Seconds, never going back.
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
        self._new_since_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def request(self, request: str, count: int, max_vms: int | None = None, *, node_type: str = "") -> tuple[Vm, ...]:
        """See ``Provider``. Which type, in which zone, is AWS's choice among those with as many devices.

        Types with more devices are tried once those with fewer are refused, for what is then missing. What the user
        must mend for one VM ends the request, with those VMs that came.
        """
        answer = self._operations.answer(request)
        if answer is not None:
            return tuple(vm for vm in self.list() if vm.name in answer)
        if not self._has_template:
            self.account.make_template()
            self._has_template = True
        most, spec = count if max_vms is None else max_vms, self._spec.of_type(node_type)
        refused: list[Refused | Misconfigured] = []
        for num_devices in turns(spec.types, count, most):
            if any(isinstance(error, Misconfigured) for error in refused):
                break
            there = {vm.name: vm.num_devices for vm in self.list() if vm.request == request}
            names = [name for _, name in missing(request, there, count, most, num_devices)]
            refused += self._make(names, request, num_devices, spec)
        made = tuple(vm for vm in self.list() if vm.request == request)
        if not made:
            raise why_none(request, refused)
        self._operations.answered(request, tuple(vm.name for vm in made))
        return made

    def _make(
        self, names: Sequence[str], request: str, num_devices: int, spec: AwsSpec
    ) -> list[Refused | Misconfigured]:
        """Make VMs, some at once; the first that is refused keeps those from being asked for that were not yet."""
        refused: list[Refused | Misconfigured] = []
        failed: list[ProviderError] = []

        def make(name: str) -> None:
            if refused or failed or self.account.stopped.is_set():
                return
            try:
                self._make_one(name, request, num_devices, spec)
            except (Refused, Misconfigured) as error:
                refused.append(error)
            except ProviderError as error:
                failed.append(error)

        if names:
            with ThreadPoolExecutor(min(NUM_AT_ONCE, len(names)), "morph-fleet") as pool:
                list(pool.map(make, names))
        if failed:
            raise failed[0]
        if self.account.stopped.is_set():
            raise Transient(f"{request}: not waited for any more")
        return refused

    def _make_one(self, name: str, request: str, num_devices: int, spec: AwsSpec) -> None:
        """Ask for one VM, or ask again, under the same client token, what an earlier manager asked."""
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
            if code_of(error) == MISMATCH:  # what is asked for was changed since: AWS tells of what there is by then
                self._operations.ended(name)
            raise
        with reading(f"VM {name}"):
            made = [(one, instance) for one in answer.get("Instances", []) for instance in one["InstanceIds"]]
            errors = [(str(one["ErrorCode"]), str(one.get("ErrorMessage", ""))) for one in answer.get("Errors", [])]
            if made:
                told, instance = made[0]
                chosen = told["LaunchTemplateAndOverrides"]["Overrides"]
                zones = [zone for zone, subnet in self._spec.subnets.items() if subnet == chosen.get("SubnetId")]
                zone = told.get("AvailabilityZone") or next(iter(zones), "unknown")
                vm = self.account.vm(name, request, str(told["InstanceType"]), zone, num_devices, time.time())
                self._operations.begun(name, _Made(id=instance, vm=vm).model_dump_json())
                self._drop_version(version)
                return
        self._operations.ended(name)
        self._drop_version(version)
        if not errors:
            raise Transient(f"VM {name}: its fleet has neither an instance nor an error")
        raise _chief([fleet_error(code, message, f"VM {name}") for code, message in errors])

    def _drop_version(self, version: str) -> None:
        """Delete a version that no fleet needs: it holds a node's secrets, and a template may have 10,000."""
        with suppress(ProviderError):  # it goes with the template
            if version:
                known = {"LaunchTemplateName": self.account.template, "Versions": [version]}
                self._ec2.call("delete_launch_template_versions", "", **known)

    def _new(self) -> list[_Made]:
        """Those that were made lately."""
        return [_Made.model_validate_json(kept) for kept in self._operations.tokens() if kept.startswith("{")]

    def _instances(self) -> list[Instance]:
        """Every instance of the run that AWS tells of, ending ones too, and those that it may yet leave out."""
        found, _ = self.account.look()
        states = {instance.id: instance for instance in found}
        for made in self._new():
            with self._lock:
                since_s = self._new_since_s.setdefault(made.id, self._clock())
            told = states.get(made.id)
            if (told is not None and not told.is_there) or self._clock() - since_s > SETTLE_S:
                self._operations.ended(made.vm.name)
            elif told is None:
                found.append(Instance(made.id, made.vm, "pending"))
        return found

    def list(self) -> tuple[Vm, ...]:
        vms = {one.vm.name: one.vm for one in self._instances() if one.is_there}
        return tuple(vms[name] for name in sorted(vms, key=lambda name: (len(name), name)))

    def delete(self, names: Sequence[str]) -> None:
        """See ``Provider``: returns once AWS says that they are ending, from when on they are not paid."""
        self._end([one for one in self._instances() if one.is_there and one.vm.name in names])

    def _end(self, instances: Sequence[Instance]) -> None:
        may_be_new = [made.id for made in self._new()]
        self.account.end({one.id: one.vm.name for one in instances}, may_be_new=may_be_new)
        for one in instances:
            self._operations.ended(one.vm.name)

    def evict(self, _name: str) -> bool:
        """See ``Provider``: EC2 has no call for it, and the service that has one needs a role of its own."""
        return False

    def boot_log(self, name: str) -> str:
        """See ``Provider``: of the console."""
        try:
            found = [one.id for one in self._instances() if one.vm.name == name]
        except ProviderError:
            return ""
        return self.account.console(found[-1])[-BOOT_LOG_CHARACTERS:] if found else ""

    def stop(self) -> None:
        """See ``Provider``: what was asked for is made, and listed."""
        self.account.stopped.set()

    def dismantle(self) -> tuple[str, ...]:
        """See ``Provider``: the launch template too; one that is not there is no error."""
        self._has_template = False
        self._end([one for one in self._instances() if one.is_there])
        return self.account.end_rest(time.monotonic() + self._bounds.delete_s)

    def price(self, node_type: str = "") -> Price | None:
        """See ``Provider``. A type without a price makes the whole unknown."""
        return self._spec.of_type(node_type).price(self._prices.dearest)

    def capabilities(self) -> Capabilities:
        return Capabilities(spot=self._spec.spot, zones=self._spec.zones, notices="aws", ending=self._ending)


CHIEF = (Throttled, Transient, QuotaExceeded, CapacityShort, Misconfigured)


def _chief(errors: Sequence[ProviderError]) -> ProviderError:
    """Return which of a fleet's errors counts: each of its types and zones is refused for reasons of its own."""
    return min(errors, key=lambda error: CHIEF.index(type(error)))


def open_aws(
    spec: AwsSpec,
    identity: Identity,
    operations: Operations,
    user_data: Callable[[str, int], str],
    *,
    open_client: Callable[[str], Any] | None = None,
    **options: Any,
) -> AwsProvider:
    """Open a provider with clients of whoever is logged in; nothing is asked yet."""
    opened = open_client or (lambda service: aws_client(spec, service))
    ec2 = Aws(lambda: opened("ec2"))
    return AwsProvider(ec2, spec, identity, operations, user_data, prices=prices_of(spec, opened), **options)


def end_run(spec: AwsSpec, run: str, job: str, told: Callable[[str], None], **options: Any) -> tuple[Vm, ...]:
    """End every instance of a run, what they left behind, and its launch template; blocks until they are gone.

    Returns the VMs that were there. ``options``: as of ``open_aws``.

    Raises:
        ProviderError: nothing of this run is there, AWS does not say what is, or something is left: which.
    """
    with tempfile.TemporaryDirectory(prefix="morph-") as directory:
        operations = Operations(Path(directory) / "operations.json")
        provider = open_aws(spec, Identity(run=run, job=job), operations, _none_is_made, **options)
        account = provider.account
        instances, runs = account.look()
        if account.owns_template() is False:
            told(f"launch template {account.template} does not have the tags of this run: it is left alone")
        if not any(one.is_there for one in instances) and not account.owns_template() and not account.parts():
            known = f"runs whose instances are there: {', '.join(runs)}" if runs else "no run of Morph has any there"
            raise Misconfigured(
                f"nothing in {spec.region} has the tags of run {run} of job {job}: it was ended before, or a name is "
                f"misspelt; {known}"
            )
        for left in end_all(provider, told=told):
            told(f"ended what an instance had left behind: {left}")
    return tuple(one.vm for one in instances if one.is_there)


def _none_is_made(node: str, _num_devices: int) -> str:
    raise AssertionError(f"{node} is to be ended, not made")

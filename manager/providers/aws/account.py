"""An account's region as a run sees it: which instances and what beside them are the run's own, and their end.

Only what has the tags of this run and of this job is the run's. What was just made may not be told of for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from manager.providers.aws.client import MAX_PER_PAGE, Aws, code_of, reading
from manager.providers.aws.errors import TEMPLATE_EXISTS
from manager.providers.aws.spec import VM_TAG, AwsSpec, template_body, template_name
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
from manager.providers.interface.provider import Misconfigured, ProviderError, Throttled, Transient, Vm, not_ended

GONE, ENDING = "terminated", "shutting-down"
"""Neither is paid for; what belongs to an instance goes when it is terminated. Any other state: it is there."""


@dataclass(frozen=True)
class Instance:
    """An instance of the run. ``state``: AWS's word."""

    id: str
    vm: Vm
    state: str

    @property
    def is_there(self) -> bool:
        """Whether it is paid for."""
        return self.state not in (GONE, ENDING)


@dataclass(frozen=True)
class Part:
    """A volume or a network interface of the run that goes with no instance."""

    id: str
    kind: str
    gib: int = 0

    @property
    def shown(self) -> str:
        """As a user knows it."""
        return f"volume {self.id} ({self.gib} GiB, {self.kind})" if self.gib else f"network interface {self.id}"


class Account:
    """Looks at the region, and ends what is the run's there.

    Args:
        ec2: The service.
        spec: Where and what.
        identity: Whose instances they are.
        bounds: How long to wait.
        usd_per_h: What an hour of a type costs in a zone; None: not known.
        volume_usd_per_h: What a volume costs, by its kind and GiB; None: not known.
    """

    def __init__(
        self,
        ec2: Aws,
        spec: AwsSpec,
        identity: Identity,
        bounds: Bounds,
        usd_per_h: Callable[[str, str], float | None],
        volume_usd_per_h: Callable[[str, int], float | None] = lambda _kind, _gib: None,
    ) -> None:
        self._ec2, self._spec, self._identity, self._bounds = ec2, spec, identity, bounds
        self._usd_per_h, self._volume_usd_per_h = usd_per_h, volume_usd_per_h
        self.stopped = threading.Event()
        self.template = template_name(identity.run)

    def look(self) -> tuple[list[Instance], list[str]]:
        """Ask which instances the run has, those that are ending too, and which other runs of Morph have some.

        Raises:
            ProviderError: the answer does not say; what it leaves out may well be there.
        """
        found, runs = list[Instance](), set[str]()
        filters = [{"Name": "tag-key", "Values": [RUN_TAG]}]
        with reading(what := "the list of instances"):
            for reservation, date in self._ec2.pages(
                "describe_instances", "Reservations", what, Filters=filters, MaxResults=MAX_PER_PAGE
            ):
                now_s = time.time()
                for told in reservation["Instances"]:
                    tags = tags_of(told)
                    if self._identity.owns(tags):
                        found.append(self._instance(told, tags, date, now_s))
                    elif told["State"]["Name"] != GONE:
                        runs.add(f"{tags[RUN_TAG]} of job {tags.get(JOB_TAG)}")
        return found, sorted(runs)

    def _instance(self, told: dict[str, Any], tags: Mapping[str, str], date: str, now_s: float) -> Instance:
        created = told["LaunchTime"]
        if not isinstance(created, datetime):
            raise TypeError(f"no time: {created!r}")
        vm = self.vm(
            tags.get(VM_TAG) or str(told["InstanceId"]),  # somebody took its tag away: it is the run's all the same
            tags.get(REQUEST_TAG, ""),
            str(told["InstanceType"]),
            str(told["Placement"]["AvailabilityZone"]),
            int(tags.get(DEVICES_TAG) or 1),
            paid_since_s(created, date or None, now_s),
        )
        return Instance(str(told["InstanceId"]), vm, str(told["State"]["Name"]))

    def vm(self, name: str, request: str, size: str, zone: str, num_devices: int, since_s: float | None) -> Vm:
        """Describe one."""
        return Vm(
            name=name,
            request=request,
            provider=self._spec.provider,
            region=self._spec.region,
            zone=zone,
            size=size,
            usd_per_h=self._usd_per_h(size, zone),
            paid_since_s=since_s,
            num_devices=num_devices,
            node_type=(known.node_type if (known := self._spec.type_of(size)) is not None else None) or "",
        )

    def owns_template(self) -> bool | None:
        """Whether the launch template of the run's name is the run's; None: there is none."""
        filters = [{"Name": "launch-template-name", "Values": [self.template]}]
        with reading(what := f"launch template {self.template}"):
            for told, _ in self._ec2.pages("describe_launch_templates", "LaunchTemplates", what, Filters=filters):
                return self._identity.owns(tags_of(told))
        return None

    def make_template(self) -> None:
        """Make the run's launch template; one that an earlier manager made stays: each instance has its own version."""
        what = f"launch template {self.template}"
        owned = self.owns_template()
        if owned is None:
            try:
                self._ec2.call("create_launch_template", what, **template_body(self._spec, self._identity))
                return
            except ProviderError as error:
                if code_of(error) != TEMPLATE_EXISTS:
                    raise
                owned = self.owns_template()
        if owned is None:
            raise Transient(f"{what}: it is there, and not told of yet")
        if not owned:
            raise Misconfigured(f"{what} is there without the tags of this run: it is left alone")

    def end(self, ids: Mapping[str, str], *, may_be_new: Collection[str] = ()) -> None:
        """End instances, by their ids; returns once AWS says that they are ending, and no longer paid.

        Args:
            ids: And the VM's name of each.
            may_be_new: Those of them that AWS may not know everywhere yet.

        Raises:
            ProviderError: naming those that are left.
        """
        if not ids:
            return
        try:
            self._terminate(list(ids))
            return
        except Throttled:
            raise
        except ProviderError:  # of one of them, and then none may be ended
            left: dict[str, ProviderError] = {}
        for instance in ids:
            try:
                self._terminate([instance])
            except ProviderError as error:
                left[instance] = error
        there = {found.id for found in self.look()[0] if found.is_there} | {*may_be_new}
        if left := {f"{ids[known]} ({known})": error for known, error in left.items() if known in there}:
            raise not_ended(left)

    def _terminate(self, ids: list[str]) -> None:
        answer = self._ec2.call("terminate_instances", "", InstanceIds=ids)
        with reading(what := "the end of instances"):
            states = {told["InstanceId"]: told["CurrentState"]["Name"] for told in answer["TerminatingInstances"]}
        if not all(states.get(instance) in (GONE, ENDING) for instance in ids):
            raise Transient(f"{what}: AWS does not say that they are ending")

    def end_rest(self, until_s: float) -> tuple[str, ...]:
        """End what is left beside the instances, once all these are terminated: parts of theirs, and the template.

        Returns what parts there were, in words, with their prices.

        Raises:
            ProviderError: naming what is left.
        """
        while not all(found.state == GONE for found in self.look()[0]):
            if time.monotonic() >= until_s:
                raise Transient("instances are shutting down, and what belongs to them is not known to be gone")
            time.sleep(self._bounds.poll_s)
        shown: dict[str, str] = {}
        left: dict[str, ProviderError] = {}
        for part in self.parts():
            cost = self._volume_usd_per_h(part.kind, part.gib) if part.gib else 0.0
            shown[part.id] = priced(part.shown, cost)
            try:
                if part.gib:
                    self._ec2.call("delete_volume", "", VolumeId=part.id)
                else:
                    self._ec2.call("delete_network_interface", "", NetworkInterfaceId=part.id)
            except ProviderError as error:
                if "NotFound" not in code_of(error):
                    left[shown[part.id]] = error
        if self.owns_template():
            try:
                self._ec2.call("delete_launch_template", "", LaunchTemplateName=self.template)
            except ProviderError as error:
                if "NotFound" not in code_of(error):
                    left[f"launch template {self.template}"] = error
        if left:
            raise not_ended(left)
        return tuple(shown.values())

    def parts(self) -> list[Part]:
        """Ask which volumes and network interfaces of the run go with no instance."""
        filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in self._identity.tags().items()]
        filters.append({"Name": "status", "Values": ["available"]})
        parts = list[Part]()
        with reading(what := "the list of volumes"):
            for told, _ in self._ec2.pages("describe_volumes", "Volumes", what, Filters=filters):
                parts.append(Part(told["VolumeId"], str(told["VolumeType"]), int(told["Size"])))
        with reading(what := "the list of network interfaces"):
            for told, _ in self._ec2.pages("describe_network_interfaces", "NetworkInterfaces", what, Filters=filters):
                parts.append(Part(told["NetworkInterfaceId"], "interface"))
        return parts

    def console(self, instance: str) -> str:
        """Return what an instance wrote to its console; Nitro keeps the newest of it, others what was written once."""
        try:
            told = self._ec2.call("get_console_output", "", InstanceId=instance, Latest=True)
        except ProviderError as error:
            if code_of(error) != "UnsupportedOperation":
                return ""
            try:
                told = self._ec2.call("get_console_output", "", InstanceId=instance)
            except ProviderError:
                return ""
        return str(told.get("Output") or "")


def tags_of(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of something that AWS describes."""
    told: Iterable[Mapping[str, str]] = entry.get("Tags") or entry.get("TagSet") or ()
    return {tag["Key"]: tag["Value"] for tag in told}

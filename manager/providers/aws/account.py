"""Lists and ends the instances and other resources in a region that have the tags of this run and of this job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from manager.providers.aws.client import MAX_PER_PAGE, Aws, code_of, reading
from manager.providers.aws.errors import TEMPLATE_EXISTS, state_error
from manager.providers.aws.spec import TOKEN_TAG, VM_TAG, AwsSpec, template_body, template_name
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
"""States that are not billed; an instance's own resources go when it is terminated. In other states it exists."""


@dataclass(frozen=True)
class Instance:
    """An instance of the run; ``state``: AWS's name; ``why``: why it ended, if known; ``token``: of its fleet."""

    id: str
    vm: Vm
    state: str
    why: ProviderError | None = None
    token: str = ""

    @property
    def is_there(self) -> bool:
        """Whether the instance exists and is billed."""
        return self.state not in (GONE, ENDING)


@dataclass(frozen=True)
class VolumeOrInterface:
    """A volume or a network interface of the run that is not deleted together with an instance."""

    id: str
    kind: str
    gib: int = 0

    @property
    def shown(self) -> str:
        """The description for a user."""
        return f"volume {self.id} ({self.gib} GiB, {self.kind})" if self.gib else f"network interface {self.id}"


class Account:
    """Lists a run's resources in the region, and ends them; prices are in dollars an hour, None: not known."""

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
        """List the run's instances, also those that are ending, and other runs of Morph. ProviderError: unknown."""
        instances, runs = list[Instance](), set[str]()
        filters = [{"Name": "tag-key", "Values": [RUN_TAG]}]
        with reading(what := "the list of instances"):
            for reservation, date in self._ec2.pages(
                "describe_instances", "Reservations", what, Filters=filters, MaxResults=MAX_PER_PAGE
            ):
                now_s = time.time()
                for described in reservation["Instances"]:
                    tags = tags_of(described)
                    if self._identity.owns(tags):
                        instances.append(self._instance(described, tags, date, now_s))
                    elif described["State"]["Name"] != GONE:
                        runs.add(f"{tags[RUN_TAG]} of job {tags.get(JOB_TAG)}")
        return instances, sorted(runs)

    def _instance(self, described: dict[str, Any], tags: Mapping[str, str], date: str, now_s: float) -> Instance:
        created = described["LaunchTime"]
        if not isinstance(created, datetime):
            raise TypeError(f"no time: {created!r}")
        vm = self.vm(
            tags.get(VM_TAG) or str(described["InstanceId"]),  # its name tag was removed: it still belongs to the run
            tags.get(REQUEST_TAG, ""),
            str(described["InstanceType"]),
            str(described["Placement"]["AvailabilityZone"]),
            int(tags.get(DEVICES_TAG) or 1),
            paid_since_s(created, date or None, now_s),
        )
        state, reason = str(described["State"]["Name"]), described.get("StateReason") or {}
        ended = state in (GONE, ENDING) and reason.get("Code")
        why = state_error(str(reason["Code"]), str(reason.get("Message", "")), f"VM {vm.name}") if ended else None
        return Instance(str(described["InstanceId"]), vm, state, why, tags.get(TOKEN_TAG, ""))

    def vm(self, name: str, request: str, size: str, zone: str, num_devices: int, since_s: float | None) -> Vm:
        """Describe one instance as a VM."""
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
            node_type=(known.node_type if (known := self._spec.type_of(size, zone)) is not None else None) or "",
        )

    def owns_template(self) -> bool | None:
        """Whether the launch template with the run's name belongs to the run; None: there is none."""
        filters = [{"Name": "launch-template-name", "Values": [self.template]}]
        with reading(what := f"launch template {self.template}"):
            for template, _ in self._ec2.pages("describe_launch_templates", "LaunchTemplates", what, Filters=filters):
                return self._identity.owns(tags_of(template))
        return None

    def make_template(self) -> None:
        """Make the run's launch template, or keep an earlier manager's: each instance has its own version of it."""
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
            raise Transient(f"{what}: it exists, and AWS does not list it yet")
        if not owned:
            raise Misconfigured(f"{what} exists without the tags of this run: it is left alone")

    def end(self, ids: Mapping[str, str], *, may_be_new: Collection[str] = ()) -> None:
        """End instances (id: VM's name); returns once they are ending and no longer billed.

        ``may_be_new``: those that some of AWS's servers may not know yet. ProviderError: the error names the rest.
        """
        if not ids:
            return
        try:
            self._terminate(list(ids))
            return
        except Throttled:
            raise
        except ProviderError:  # an error about one instance may have kept all of them from ending
            left: dict[str, ProviderError] = {}
        for instance in ids:
            try:
                self._terminate([instance])
            except ProviderError as error:
                left[instance] = error
        there = {vm.id for vm in self.look()[0] if vm.is_there} | {*may_be_new}
        if left := {f"{ids[known]} ({known})": error for known, error in left.items() if known in there}:
            raise not_ended(left)

    def _terminate(self, ids: list[str]) -> None:
        answer = self._ec2.call("terminate_instances", "", InstanceIds=ids)
        with reading(what := "the end of instances"):
            states = {change["InstanceId"]: change["CurrentState"]["Name"] for change in answer["TerminatingInstances"]}
        if not all(states.get(instance) in (GONE, ENDING) for instance in ids):
            raise Transient(f"{what}: AWS does not say that they are ending")

    def end_rest(self, until_s: float) -> tuple[str, ...]:
        """End volumes, network interfaces and the template once all instances are terminated.

        Returns descriptions of the first two, with their prices. ProviderError: the error names what is left.
        """
        if owned := self.owns_template():
            self._check_listed()
        while not all(instance.state == GONE for instance in self.look()[0]):
            if time.monotonic() >= until_s:
                raise Transient("instances are shutting down, and it is not known whether their volumes are gone")
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
        if owned:
            try:
                self._ec2.call("delete_launch_template", "", LaunchTemplateName=self.template)
            except ProviderError as error:
                if "NotFound" not in code_of(error):
                    left[f"launch template {self.template}"] = error
        if left:
            raise not_ended(left)
        return tuple(shown.values())

    def _check_listed(self) -> None:
        """Check that AWS lists what was requested; one that is not listed after ``Bounds.list_s`` was not made.

        Transient: an instance of the last ``Bounds.list_s`` may be made and is not listed yet.
        """
        asked_s: dict[str, float] = {}
        with reading(what := f"versions of launch template {self.template}"):
            for version, date in self._ec2.pages(
                "describe_launch_template_versions", "LaunchTemplateVersions", what, LaunchTemplateName=self.template
            ):
                made_s = paid_since_s(version["CreateTime"], date or None, time.time())
                asked_s[version.get("VersionDescription", "")] = made_s or 0
        listed, since_s = {"", *(instance.token for instance in self.look()[0])}, time.time() - self._bounds.list_s
        left_s = [at_s - since_s for token, at_s in asked_s.items() if token not in listed and at_s > since_s]
        if left_s:
            most_s = max(left_s)
            raise Transient(
                f"{len(left_s)} of the run's instances were requested and are not listed by AWS, which may list new "
                f"ones late: looked for during {most_s:.0f} s more",
                min(most_s, max(self._bounds.poll_s, (self._bounds.list_s - most_s) / 2)),
            )

    def parts(self) -> list[VolumeOrInterface]:
        """List volumes and network interfaces of the run that are not deleted together with an instance."""
        filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in self._identity.tags().items()]
        filters.append({"Name": "status", "Values": ["available"]})
        parts = list[VolumeOrInterface]()
        with reading(what := "the list of volumes"):
            for item, _ in self._ec2.pages("describe_volumes", "Volumes", what, Filters=filters):
                parts.append(VolumeOrInterface(item["VolumeId"], str(item["VolumeType"]), int(item["Size"])))
        with reading(what := "the list of network interfaces"):
            for item, _ in self._ec2.pages("describe_network_interfaces", "NetworkInterfaces", what, Filters=filters):
                parts.append(VolumeOrInterface(item["NetworkInterfaceId"], "interface"))
        return parts

    def console(self, instance: str) -> str:
        """Return the console output of an instance; Nitro keeps the newest output, other hypervisors one snapshot."""
        try:
            answer = self._ec2.call("get_console_output", "", InstanceId=instance, Latest=True)
        except ProviderError as error:
            if code_of(error) != "UnsupportedOperation":
                return ""
            try:
                answer = self._ec2.call("get_console_output", "", InstanceId=instance)
            except ProviderError:
                return ""
        return str(answer.get("Output") or "")


def tags_of(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags in a description by AWS."""
    tags: Iterable[Mapping[str, str]] = entry.get("Tags") or entry.get("TagSet") or ()
    return {tag["Key"]: tag["Value"] for tag in tags}

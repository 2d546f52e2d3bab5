"""Which reductions go from device to device, by what each worker says of its device. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from morph.contract.base import Value
from morph.contract.cluster import RingSetting
from morph.contract.errors import ConfigError
from morph.runtime.groups.channels import GroupSpec


class DeviceFacts(Value):
    """What a worker says of its device: its ``uuid``, which no two devices share, and the version of its NCCL."""

    uuid: str
    nccl: str


def rings_over_nccl(
    setting: RingSetting, rings: Sequence[GroupSpec], facts: Mapping[str, DeviceFacts]
) -> tuple[GroupSpec, ...]:
    """Return the rings that NCCL reduces, in their order; each member comes to the same answer.

    Under ``auto`` those whose members have a device each (NCCL hangs with two ranks on one) and one NCCL version.

    Args:
        setting: What the cluster file says.
        rings: Each with at least two members.
        facts: Of each member.

    Raises:
        ConfigError: the setting is ``nccl``, and a ring cannot be reduced by it.
    """
    if setting == "gloo":
        return ()
    chosen = []
    for ring in rings:
        members = [facts[member] for member in ring.members]
        if len({one.uuid for one in members}) < len(members):
            why = "two workers of a reduction share a device"
        elif len({one.nccl for one in members}) > 1:
            why = "the workers of a reduction have different versions of NCCL"
        else:
            chosen.append(ring)
            continue
        if setting == "nccl":
            raise ConfigError(f"cannot be used: {why}", field="vms.rings", value="nccl", allowed="auto or gloo")
    return tuple(chosen)

"""The profile on one of its measured node types."""

from __future__ import annotations

import re

from morph.contract.errors import PlanError
from morph.contract.plan import Plan
from morph.contract.pool import type_and_zone
from morph.contract.profile import Profile


def of_node_type(profile: Profile, name: str | None) -> Profile:
    """Return the profile with a node type's times, links and contention; None: unchanged; PlanError: no such type."""
    if name is None:
        return profile
    if all(entry.name != name for entry in profile.node_types):
        known = ", ".join(entry.name for entry in profile.node_types) or "none: this profile has one type of node only"
        raise PlanError("was not measured", field="node_type", value=name, allowed=known)
    return profile.for_node_type(name)


def of_pool_type(profile: Profile, name: str) -> Profile:
    """Return the profile for the type of GPU, and the zone, with this name in a pool or plan.

    The type on which the profile was measured has no name of its own. It matches any word of the device's name in the
    profile's environment: "v100" or "V100" for a "Tesla V100 16 GB". Raises PlanError if the profile has no such type.
    """
    node_type, zone = type_and_zone(name)
    of_type = _of_type(profile, node_type)
    if zone == of_type.environment.zone:
        return of_type
    return of_type.model_copy(update={"environment": of_type.environment.model_copy(update={"zone": zone})})


def _of_type(profile: Profile, name: str) -> Profile:
    if any(entry.name == name for entry in profile.node_types):
        return of_node_type(profile, name)
    device = profile.environment.device
    words = re.findall(r"[a-z0-9]+", device.casefold())
    if all(word in words for word in re.findall(r"[a-z0-9]+", name.casefold())):
        return profile
    known = [f"a word of {device!r} (the profile's own)", *(entry.name for entry in profile.node_types)]
    raise PlanError("is not a type of this profile", field="pool", value=name, allowed=", ".join(known))


def check_made_for(profile: Profile, plan: Plan) -> None:
    """Refuse a plan not made for a profile's model, batch and micro-batch sizes; a PlanError names the field."""
    job, m, num = profile.job, plan.micro_batch_size, plan.num_micro_batches
    sizes = ", ".join(map(str, profile.micro_batch_sizes))
    batch = f"{job.batch_size // m}, for the profile's batch of {job.batch_size} in micro-batches of {m}"
    for is_wrong, problem, field, value, allowed in (
        (plan.fingerprint != job.fingerprint, "of another model", "fingerprint", plan.fingerprint, job.fingerprint),
        (m not in profile.micro_batch_sizes, "that the profile does not measure", "micro_batch_size", m, sizes),
        (m * num != job.batch_size, "of another batch", "num_micro_batches", num, batch),
    ):
        if is_wrong:
            raise PlanError(f"is {problem}", field=field, value=value, allowed=allowed)

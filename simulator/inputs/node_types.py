"""A profile as it is on one of the node types measured into it."""

from __future__ import annotations

from morph.contract.errors import PlanError
from morph.contract.profile import Profile


def of_node_type(profile: Profile, name: str | None) -> Profile:
    """The profile with the times, links and contention of a node type; None: as it is.

    Raises:
        PlanError: the profile has no such node type; names those that it has.
    """
    if name is None:
        return profile
    found = next((entry for entry in profile.node_types if entry.name == name), None)
    if found is None:
        known = ", ".join(entry.name for entry in profile.node_types) or "none: this profile has one type of node only"
        raise PlanError("was not measured", field="node_type", value=name, allowed=known)
    times = zip(profile.sections, found.forward, found.backward, found.optimizer_step, strict=True)
    sections = tuple(
        section.model_copy(update={"forward": forward, "backward": backward, "optimizer_step": optimizer_step})
        for section, forward, backward, optimizer_step in times
    )
    return profile.model_copy(
        update={
            "environment": found.environment,
            "sections": sections,
            "intra_node": found.intra_node or profile.intra_node,
            "inter_node": found.inter_node or profile.inter_node,
            "contention": found.contention,
        }
    )

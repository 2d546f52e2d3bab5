"""Add the links between two zones to a profile: only messages to a node in another zone are measured."""

from __future__ import annotations

from calibrate.computing.compute import Progress
from calibrate.links.network import NetworkSpec
from calibrate.links.two_nodes import OtherNode, PeerAddress
from calibrate.timing.clocks import devices_of
from calibrate.writing.measure import MAX_SAMPLES, silent
from morph.contract.profile import Profile


def add_zone_links(
    profile: Profile,
    peer: PeerAddress,
    *,
    num_samples: int = MAX_SAMPLES,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Profile:
    """Return the profile with the links between this node's zone and another one, in the sizes of its other links.

    ``peer``: in another zone, where ``morph calibrate-peer`` listens. ``device``: ``cpu`` or ``cuda``. Errors as of
    ``calibrate``.
    """
    progress = progress or silent
    spec = NetworkSpec(
        message_sizes=tuple(entry.size_bytes for entry in profile.inter_node.activation if entry.size_bytes),
        reduced_sizes=(),
        ring_sizes=(),
        in_flight=(1,),
        element="float32",
        devices=tuple(str(place) for place in devices_of(device)),
        most=num_samples,
    )
    with OtherNode(peer) as other:
        progress("sending messages to a node in another zone", 0.0)
        link = other.measure(spec).link
    sources = {**profile.sources, "between_zones": f"measured between {other.between}"}
    progress("done", 1.0)
    return profile.model_copy(update={"between_zones": link, "sources": sources})

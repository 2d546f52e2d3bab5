"""Adds another type of node, or the links between two zones, to a profile: only these are measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from calibrate.computing.compute import Progress, measure_compute
from calibrate.computing.subject import Subject, load_subject
from calibrate.links.network import NetworkSpec, measure_network
from calibrate.links.two_nodes import OtherNode, PeerAddress
from calibrate.timing.clocks import devices_of
from calibrate.timing.environment import describe_environment
from calibrate.writing.assemble import assemble_node_type
from calibrate.writing.measure import MAX_SAMPLES, one_thread, silent, started_helpers
from morph.contract.errors import ProfileError
from morph.contract.profile import LinkProfile, NodeTypeProfile, Profile, SendTime
from morph.jobs.files import imported_once

LINK_DIFFERS = 0.2
"""Links of another node are kept if a median differs by more than this share, and by more than the spreads."""


def add_node_type(
    profile: Profile,
    job_path: str,
    name: str,
    *,
    num_samples: int = MAX_SAMPLES,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Profile:
    """Measure the job on this machine as another type of node, replacing an earlier type of that name.

    Raises ProfileError if the profile is of another job, and as ``calibrate``.
    """
    progress = progress or silent
    progress("exporting the model", 0.0)
    devices = devices_of(device)
    with started_helpers(devices) as neighbours, one_thread(), imported_once(job_path):
        subject = load_subject(job_path, devices[0], profile.num_sections)
        _check_same_job(subject, profile)
        sizes = profile.micro_batch_sizes
        neighbours.load(subject)
        compute = measure_compute(
            subject, sizes, neighbours, stop_early=False, num_samples=num_samples, progress=progress
        )
        progress("sending messages between processes", 0.7)
        link = measure_network(_messages(profile.intra_node, devices, num_samples), neighbours.crew).link
    added = assemble_node_type(name, describe_environment(subject.device), compute)
    progress("done", 1.0)
    return with_node_type(profile, added, link)


def with_node_type(profile: Profile, added: NodeTypeProfile, link: LinkProfile) -> Profile:
    """Return the profile with the type of node added or replaced; the type's links are kept if they differ."""
    if links_differ(profile.intra_node, link):
        repeats = profile.inter_node == profile.intra_node
        added = added.model_copy(update={"intra_node": link, "inter_node": link if repeats else None})
    others = tuple(node_type for node_type in profile.node_types if node_type.name != added.name)
    return profile.model_copy(update={"node_types": (*others, added)})


def links_differ(known: LinkProfile, measured: LinkProfile) -> bool:
    """Return whether the time of any message clearly differs, in either direction."""
    return _differ(known.activation, measured.activation) or _differ(known.gradient, measured.gradient)


def _differ(known: Sequence[SendTime], measured: Sequence[SendTime]) -> bool:
    by_size = {entry.size_bytes: entry.time for entry in measured}
    for entry in known:
        timed = by_size.get(entry.size_bytes)
        if timed is None:
            continue
        away_s = abs(timed.median_s - entry.time.median_s)
        if away_s > LINK_DIFFERS * entry.time.median_s and away_s > timed.mad_s + entry.time.mad_s:
            return True
    return False


def _check_same_job(subject: Subject, profile: Profile) -> None:
    """Refuse a profile of another job before anything is measured."""
    model = subject.cut(profile.micro_batch_sizes[0])
    facts = {
        "fingerprint": (model.fingerprint[:12], profile.job.fingerprint[:12]),
        "batch_size": (subject.job.batch_size, profile.job.batch_size),
    }
    for field, (value, allowed) in facts.items():
        if value != allowed:
            raise ProfileError(
                "the profile belongs to another job; calibrate again without --add-node-type",
                source=subject.job_path,
                field=field,
                value=value,
                allowed=str(allowed),
            )


def add_zone_links(
    profile: Profile,
    peer: PeerAddress,
    *,
    num_samples: int = MAX_SAMPLES,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Profile:
    """Return the profile with the links between this node's zone and that of ``peer``, in the sizes of other links."""
    progress = progress or silent
    with OtherNode(peer) as peer_node:
        progress("sending messages to a node in another zone", 0.0)
        link = peer_node.measure(_messages(profile.inter_node, devices_of(device), num_samples)).link
    sources = {**profile.sources, "between_zones": f"measured between {peer_node.between}"}
    progress("done", 1.0)
    return profile.model_copy(update={"between_zones": link, "sources": sources})


def _messages(known: LinkProfile, devices: Sequence[torch.device], most: int) -> NetworkSpec:
    """Return what to measure of a link: messages of the sizes that are known, and no reductions."""
    return NetworkSpec(
        message_sizes=tuple(entry.size_bytes for entry in known.activation if entry.size_bytes),
        reduced_sizes=(),
        ring_sizes=(),
        in_flight=(1,),
        element="float32",
        devices=tuple(map(str, devices)),
        most=most,
    )

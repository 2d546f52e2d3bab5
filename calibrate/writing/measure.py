"""Measures one job and makes its profile (Varuna 4.3; docs/how-it-works/calibration.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from calibrate.computing.compute import Compute, Progress, checked_sizes, growing_sizes, measure_compute
from calibrate.computing.contention import Neighbours, busy_counts
from calibrate.computing.subject import Subject, load_subject
from calibrate.helpers.crew import Crew
from calibrate.links.network import Carriers, NetworkSpec, growing_in_flight, growing_rings, measure_network
from calibrate.links.two_nodes import OtherNode, PeerAddress
from calibrate.timing.clocks import devices_of
from calibrate.timing.environment import describe_environment
from calibrate.writing.assemble import MeasuredLinks, accumulator_bytes, assemble_profile, parameter_bytes, state_bytes
from calibrate.writing.storage import (
    StorageSpeeds,
    check_upload_url,
    measure_checkpoint_speed,
    measure_host_copy,
    measure_upload_speed,
)
from morph.contract.profile import Profile
from morph.jobs.files import imported_once
from morph.jobs.job import Job
from morph.machine import num_cores
from morph.runtime.step.kernels import kernels_now, set_kernels

MAX_SAMPLES = 100
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_REDUCED_BYTES = 64 << 20


def calibrate(
    job_path: str,
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    num_samples: int = MAX_SAMPLES,
    device: str = "cpu",
    checkpoint_url: str | None = None,
    peer: PeerAddress | None = None,
    carriers: Carriers = Carriers(),  # noqa: B008 (frozen)
    progress: Progress | None = None,
    check: Callable[[Subject], object] | None = None,
) -> Profile:
    """Measure a job on this machine; nothing depends on the number of GPUs that the job will get.

    ``micro_batch_sizes``: None: the job's own m if it is fixed, else 1, 2, 4, ... until F(m)/m improves by less than 3
    % or one section of the next size would fill half of the free memory. ``num_samples``: the most of each time, at
    least 5. ``device``: ``cpu`` (one thread) or ``cuda``. ``checkpoint_url``: where uploads are measured; files are
    removed. ``peer``: a node on which ``morph calibrate-peer`` listens; None: links between nodes repeat those within
    this one. ``check``: called with the exported job; may refuse it.

    Raises JobError or ExportError; ConfigError for a missing device, a checkpoint URL that cannot be written, or
    another secret of the peer; ClusterError or WaitTimeout if helper processes or the peer failed.
    """
    progress = progress or silent
    progress("exporting the model", 0.0)
    devices = devices_of(device)
    if checkpoint_url is not None:
        check_upload_url(checkpoint_url)
    with (
        started_helpers(devices) as neighbours,
        one_thread(),
        imported_once(job_path),
        nullcontext() if peer is None else OtherNode(peer) as peer_node,
    ):
        subject = load_subject(job_path, devices[0])
        job = subject.job
        sizes, stop_early = sizes_of(job, micro_batch_sizes)
        subject.cut(sizes[0])
        neighbours.load(subject)
        if check is not None:
            check(subject)
        compute = measure_compute(
            subject, sizes, neighbours, stop_early=stop_early, num_samples=num_samples, progress=progress
        )
        progress("sending messages and reducing gradients between processes", 0.65)
        spec = replace(network_spec(job, compute, devices, num_samples), links=carriers.links, rings=carriers.rings)
        network = _measure_links(spec, peer_node, neighbours.crew, progress)
        progress("writing a checkpoint", 0.95)
        size_bytes = state_bytes(compute)
        storage = StorageSpeeds(
            write_bytes_per_s=measure_checkpoint_speed(size_bytes),
            upload_bytes_per_s=measure_upload_speed(checkpoint_url, size_bytes) if checkpoint_url else None,
            host_copy_bytes_per_s=measure_host_copy(subject.device, size_bytes),
        )
        profile = assemble_profile(job, describe_environment(subject.device), compute, network, storage)
    progress("done", 1.0)
    return profile


@contextmanager
def started_helpers(devices: Sequence[torch.device]) -> Iterator[Neighbours]:
    """Start helpers, which compute beside this process and later send messages; they import while it loads the job."""
    num_slots = _num_slots(devices)
    busy = busy_counts(num_cores())[-1:] if devices[0].type == "cpu" else ()
    size = max(*growing_rings(num_slots), *(count - 1 for count in busy))
    with Crew("calibrate.computing.helper", size, "measuring beside others") as crew:
        yield Neighbours(crew, num_cores())


def _num_slots(devices: Sequence[torch.device]) -> int:
    return num_cores() if devices[0].type == "cpu" else len(devices)


def _measure_links(spec: NetworkSpec, peer_node: OtherNode | None, helpers: Crew, progress: Progress) -> MeasuredLinks:
    if peer_node is None:
        return MeasuredLinks(measure_network(spec, helpers))
    inside = measure_network(replace(spec, reduced_sizes=()), helpers)
    progress(f"sending and reducing between {peer_node.between}", 0.75)
    return MeasuredLinks(inside, peer_node.measure(spec), peer_node.between)


def silent(what: str, share: float) -> None:
    """Report nothing."""
    del what, share


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread in the block; afterwards threads and kernels are as before."""
    before, kernels = torch.get_num_threads(), kernels_now()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        set_kernels(kernels)


def sizes_of(job: Job, wanted: Sequence[int] | None) -> tuple[tuple[int, ...], bool]:
    """Return the micro-batch sizes to measure, and whether to stop at one that gains nothing or does not fit."""
    if wanted is not None:
        return checked_sizes(wanted, job.batch_size), False
    if job.micro_batch_size is not None:
        return (job.micro_batch_size,), False
    return growing_sizes(job.batch_size), True


def network_spec(job: Job, compute: Compute, devices: Sequence[torch.device], num_samples: int) -> NetworkSpec:
    """Return what to measure of the network: the sizes that the job sends and reduces, and sizes around these."""
    sent = {
        sum(spec.num_bytes for spec in section.outputs)
        for entry in compute.sizes
        for model in entry.model.every().values()
        for section in model.sections[:-1]
    }
    largest = max(sent, default=1 << 16)
    messages = sorted({1024, *sent, min(4 * largest, max(largest, _MAX_MESSAGE_BYTES))})
    model = compute.model
    wide = accumulator_bytes(job) // 4
    reduced = [wide * parameter_bytes(model, unit.names) for unit in model.units]
    sizes = {min(size, _MAX_REDUCED_BYTES) // 8 * 8 for size in (4096, max(reduced), sum(reduced))}
    num_slots = _num_slots(devices)
    return NetworkSpec(
        message_sizes=tuple(messages),
        reduced_sizes=tuple(sorted(sizes)),
        ring_sizes=growing_rings(num_slots),
        in_flight=growing_in_flight(num_slots),
        element="int64" if job.accumulation == "exact" else "float32",
        devices=tuple(map(str, devices)),
        most=num_samples,
    )

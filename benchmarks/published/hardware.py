"""The V100 VMs of Varuna's evaluation: constants with their sources, links, and rings.

NC6_v3 has one V100, NC24_v3 four of them joined by PCIe; VMs are joined by 10 Gbps ethernet (Varuna, section 7).
"""

from __future__ import annotations

from statistics import NormalDist, fmean, median

from calibrate.timing.environment import ALLOCATOR_PERMILLE, CONTEXT_BYTES, PROCESS_BYTES
from morph.contract.profile import AllReduceTime, Environment, LinkProfile, SendTime, Timing

GPU_MEMORY_BYTES = 16 * 2**30
"""Varuna, section 7: V100 with 16 GB."""
GPU_MEMORY_BYTES_PER_S = 900e9
"""NVIDIA, V100 data sheet."""
GPU_PEAK_FLOPS_PER_S = 112e12
"""NVIDIA, V100 data sheet: tensor cores, PCIe card. Only a unit for efficiencies: no time depends on it."""
GPUS_PER_LARGE_VM = 4
"""Varuna, section 7: NC24_v3."""
ETHERNET_BYTES_PER_S = 10e9 / 8
"""Varuna, section 7: 10 Gbps."""
ETHERNET_LATENCY_S = 0.5e-3
"""Assumed: neither paper gives one."""
ETHERNET_JITTER_S = 10e-3
"""Sigma of a message's extra in the simulator that Varuna's authors published (tools/simulator)."""
PCIE_BYTES_PER_S = 15.75e9
"""PCIe 3.0 x16. Varuna 3.1, observation 4: the GPUs of one VM are joined by PCIe."""
PCIE_LATENCY_S = 20e-6
"""Assumed."""
DISK_BYTES_PER_S = 500e6
"""Assumed: Varuna (section 4.5) writes to the VM's local SSD and gives no speed."""

_NUM_QUANTILES = 33
_NO_JITTER = (0.0,)
_MESSAGE_BYTES = (1_000, 1_000_000, 100_000_000)
_REDUCE_BYTES = (1_000_000, 1_000_000_000)
_RING_SIZES = (2, 4, 8, 16, 32)


def exact(time_s: float) -> Timing:
    """A computed time, to the nanosecond; no spread."""
    return Timing(median_s=round(time_s, 9), mad_s=0.0, num_samples=1)


def half_normal_quantiles_s(sigma_s: float) -> tuple[float, ...]:
    """Quantiles of |N(0, sigma)| in the middle of equal slices, so that their mean is nearly the distribution's."""
    normal = NormalDist()
    slices = range(_NUM_QUANTILES)
    return tuple(sigma_s * normal.inv_cdf(0.5 + (index + 0.5) / (2 * _NUM_QUANTILES)) for index in slices)


def link(latency_s: float, bytes_per_s: float, jitter_s: float) -> LinkProfile:
    """Latency, bytes at full speed, and a half-normal extra for each message; the same in both directions."""
    extras_s = half_normal_quantiles_s(jitter_s) if jitter_s else _NO_JITTER
    times = tuple(
        SendTime(size_bytes=size, time=_spread(latency_s + size / bytes_per_s, extras_s)) for size in _MESSAGE_BYTES
    )
    return LinkProfile(activation=times, gradient=times)


def ethernet(slower: float = 1.0) -> LinkProfile:
    """Between VMs; ``slower`` divides the bandwidth."""
    return link(ETHERNET_LATENCY_S, ETHERNET_BYTES_PER_S / slower, ETHERNET_JITTER_S)


def pcie() -> LinkProfile:
    """Between the GPUs of one VM."""
    return link(PCIE_LATENCY_S, PCIE_BYTES_PER_S, 0.0)


def message_s() -> float:
    """Median time of a message without a size, between VMs."""
    return ETHERNET_LATENCY_S + median(half_normal_quantiles_s(ETHERNET_JITTER_S))


def ring_s(ring_size: int, size_bytes: float, in_flight: int = 1, slower: float = 1.0) -> float:
    """2 (D - 1) messages of S / D bytes over a link that ``in_flight`` rings share (Patarasuk and Yuan 2009)."""
    bytes_s = size_bytes / ring_size * in_flight * slower / ETHERNET_BYTES_PER_S
    return 2 * (ring_size - 1) * (message_s() + bytes_s)


def rings(slower: float = 1.0) -> tuple[AllReduceTime, ...]:
    """AR(D) alone on a VM's link, and with as many at once as a large VM has GPUs (Varuna, section 4.3)."""
    return tuple(
        AllReduceTime(
            ring_size=ring_size,
            size_bytes=size,
            in_flight=in_flight,
            time=exact(ring_s(ring_size, size, in_flight, slower)),
        )
        for in_flight in (1, GPUS_PER_LARGE_VM)
        for ring_size in _RING_SIZES
        for size in _REDUCE_BYTES
    )


def _spread(least_s: float, extras_s: tuple[float, ...]) -> Timing:
    if len(extras_s) == 1:
        return exact(least_s)
    quantiles = tuple(round(least_s + extra, 9) for extra in extras_s)
    middle = median(quantiles)
    return Timing(
        median_s=middle,
        mad_s=round(median(abs(quantile - middle) for quantile in quantiles), 9),
        num_samples=len(quantiles),
        mean_s=round(fmean(quantiles), 9),
        quantiles_s=quantiles,
    )


ENVIRONMENT = Environment(
    python="none",
    torch="none",
    platform="Azure NC6_v3 and NC24_v3, as published",
    device="Tesla V100 16 GB, as published",
    num_cores=6,
    threads_per_worker=6,
    device_memory_bytes=GPU_MEMORY_BYTES,
    host_memory_bytes=112 * 2**30,
    context_bytes=CONTEXT_BYTES,
    allocator_permille=ALLOCATOR_PERMILLE,
    process_bytes=PROCESS_BYTES,
    estimated="computed from published figures; profile show lists the source of each",
    created="1970-01-01T00:00:00Z",
)
"""Nobody measured: the date says so too."""

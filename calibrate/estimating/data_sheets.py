"""Data sheets of GPUs and of the VMs that have them, and the shares of their speeds that programs reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from morph.contract.errors import ConfigError

_PCIE_3, _PCIE_4, _PCIE_5 = 15.75, 31.5, 63.0
"""GB/s of 16 lanes, one way."""


@dataclass(frozen=True)
class DataSheet:
    """One type of GPU. Its network and host memory are its share of its VM's; links and network are measured one way.

    Attributes:
        device: Its name, and the VM.
        flops_per_s: Peak of dense matrix products by type of the operands; a type that is missing is not supported.
            ``tf32``: float32 operands, if the job allows TF32.
        memory_bytes: As ``nvidia-smi`` shows it.
        link_bytes_per_s: To another GPU of the VM: half of NVLink's total, or PCIe.
    """

    device: str
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    memory_bytes: int
    gpus_per_node: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_memory_bytes: int
    host_link_bytes_per_s: float
    source: str


def _sheet(
    device: str,
    tflops: Mapping[str, float],
    *,
    memory: tuple[float, int],
    node: tuple[int, float, int],
    links: tuple[float, float],
    source: str,
) -> DataSheet:
    """``memory``: GB/s and MiB. ``node``: GPUs, Gbit/s and GiB of the VM. ``links``: GB/s to a GPU, to the host."""
    num, gbit_per_s, host_gib = node
    return DataSheet(
        device=device,
        flops_per_s={name: value * 1e12 for name, value in tflops.items()},
        memory_bytes_per_s=memory[0] * 1e9,
        memory_bytes=memory[1] << 20,
        gpus_per_node=num,
        link_bytes_per_s=links[0] * 1e9,
        network_bytes_per_s=gbit_per_s * 1e9 / 8 / num,
        host_memory_bytes=(host_gib << 30) // num,
        host_link_bytes_per_s=links[1] * 1e9,
        source=source,
    )


def _ampere(fp32: float, tf32: float, half: float) -> dict[str, float]:
    return {"float32": fp32, "tf32": tf32, "float16": half, "bfloat16": half}


DATA_SHEETS: Mapping[str, DataSheet] = {
    "a100": _sheet(
        "NVIDIA A100 SXM 80 GB in an AWS p4de.24xlarge",
        _ampere(19.5, 156, 312),
        memory=(2039, 81920),
        node=(8, 400, 1152),
        links=(300, _PCIE_4),
        source="NVIDIA, A100 data sheet (2021), without sparsity; AWS, EC2 P4 instances",
    ),
    "a100-40": _sheet(
        "NVIDIA A100 SXM 40 GB in an AWS p4d.24xlarge",
        _ampere(19.5, 156, 312),
        memory=(1555, 40960),
        node=(8, 400, 1152),
        links=(300, _PCIE_4),
        source="NVIDIA, A100 data sheet (2020), without sparsity; AWS, EC2 P4 instances",
    ),
    "h100": _sheet(
        "NVIDIA H100 SXM 80 GB in an AWS p5.48xlarge",
        _ampere(66.9, 494.7, 989.4),
        memory=(3350, 81559),
        node=(8, 3200, 2048),
        links=(450, _PCIE_5),
        source="NVIDIA, H100 data sheet (2023), without sparsity; AWS, EC2 P5 instances",
    ),
    "h200": _sheet(
        "NVIDIA H200 SXM 141 GB in an AWS p5en.48xlarge",
        _ampere(66.9, 494.7, 989.4),
        memory=(4800, 143771),
        node=(8, 3200, 2048),
        links=(450, _PCIE_5),
        source="NVIDIA, H200 data sheet (2024), without sparsity; AWS, EC2 P5 instances",
    ),
    "gh200": _sheet(
        "NVIDIA GH200 96 GB in a node of CSCS Alps",
        _ampere(66.9, 494.7, 989.4),
        memory=(4000, 97871),
        node=(4, 800, 512),
        links=(150, 450),
        source="NVIDIA, GH200 data sheet (2023), without sparsity; CSCS, Alps: four of them and 4 x 200 Gbit/s a node",
    ),
    "l4": _sheet(
        "NVIDIA L4 24 GB in an AWS g6.48xlarge",
        _ampere(30.3, 60, 121),
        memory=(300, 23034),
        node=(8, 100, 768),
        links=(_PCIE_4, _PCIE_4),
        source="NVIDIA, L4 data sheet (2023), halved where it states sparsity; AWS, EC2 G6 instances",
    ),
    "t4": _sheet(
        "NVIDIA T4 16 GB in an AWS g4dn.12xlarge",
        {"float32": 8.1, "float16": 65},
        memory=(320, 15360),
        node=(4, 50, 192),
        links=(_PCIE_3, _PCIE_3),
        source="NVIDIA, T4 data sheet (2019); AWS, EC2 G4 instances",
    ),
    "v100": _sheet(
        "NVIDIA V100 SXM2 16 GB in an AWS p3.16xlarge",
        {"float32": 15.7, "float16": 125},
        memory=(900, 16384),
        node=(8, 25, 488),
        links=(150, _PCIE_3),
        source="NVIDIA, V100 data sheet (2020); AWS, EC2 P3 instances",
    ),
}


@dataclass(frozen=True)
class Reached:
    """The shares of a data sheet's speeds that programs reach, and times that no data sheet states.

    Attributes:
        compute: Of the peak, in matrix products: 0.80 to 0.86 with the best shapes on an H100, GH200 and A100 (S.
            Bekman, Machine Learning Engineering, "Maximum Achievable Matmul FLOPS").
        memory: Of the bandwidth of memory: 0.9 (Calculon, Isaev et al. 2023, system a100_80g).
        links: Of NVLink or PCIe: 0.65 (the same).
        network: Of the network: 0.9 (the same).
    """

    compute: float = 0.8
    memory: float = 0.9
    links: float = 0.65
    network: float = 0.9

    launch_s = 5e-6
    """Least time of an operation: PyTorch needs 4 to 10 us to launch a kernel."""
    link_latency_s = 10e-6
    """Of a message within a node (Calculon)."""
    network_latency_s = 20e-6
    """Of a message between nodes (Calculon)."""

    @classmethod
    def parse(cls, text: str | None) -> Reached:
        """Read ``compute=0.7,memory=0.8``; None: the defaults."""
        names = [field.name for field in fields(cls)]
        shares = cls()
        for part in text.split(",") if text else ():
            name, _, number = part.strip().partition("=")
            try:
                value = float(number) if name in names else 0.0
            except ValueError:
                value = 0.0
            if not 0.01 <= value <= 1:
                allowed = f"{', '.join(f'{known}=SHARE' for known in names)}, each from 0.01 to 1"
                raise ConfigError("is not a share that is reached", field="--reach", value=part, allowed=allowed)
            shares = replace(shares, **{name: value})
        return shares

    def __str__(self) -> str:
        """Return the shares as a reader sees them."""
        shares = (self.compute, "its peak"), (self.memory, "memory"), (self.links, "links"), (self.network, "network")
        return ", ".join(f"{share:.0%} of {what}" for share, what in shares)


def sheet_of(name: str) -> DataSheet:
    """Return the data sheet of a type of GPU; ConfigError: there is none."""
    sheet = DATA_SHEETS.get(name.lower())
    if sheet is None:
        allowed = ", ".join(sorted(DATA_SHEETS))
        raise ConfigError("has no data sheet", field="--device", value=name, allowed=allowed)
    return sheet

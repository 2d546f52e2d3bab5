"""Lists the CUDA devices of this machine without opening one, and divides them among local VMs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from morph.contract.errors import ConfigError

_COMMAND = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_PARTS_COMMAND = ("nvidia-smi", "-L")
_PART = re.compile(r"^\s+MIG \S*?\.(\d+)gb\S*\s.*\(UUID: (MIG-[^)]+)\)", re.MULTILINE)
_ASK_S = 30.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class CudaDevice(NamedTuple):
    """One device; ``uuid`` identifies it in whatever order CUDA counts."""

    uuid: str
    memory_bytes: int


def _ask(command: Sequence[str] = _COMMAND) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=_ASK_S).stdout


def cuda_devices(
    ask: Callable[[], str] = _ask,
    environment: Mapping[str, str] = os.environ,
    ask_parts: Callable[[], str] = lambda: _ask(_PARTS_COMMAND),
) -> tuple[CudaDevice, ...]:
    """Return the devices for a process started here: all, or those of ``CUDA_VISIBLE_DEVICES``. Takes up to 30 s.

    ``ask`` returns a line for each device: number, UUID and memory in MiB, as nvidia-smi does; ``ask_parts`` the output
    of ``nvidia-smi -L``, for names of MIG instances. ConfigError: there is no device, or none of the named ones.
    """
    try:
        lines = [tuple(cell.strip() for cell in line.split(",")) for line in ask().splitlines() if line.strip()]
        known = [(number, CudaDevice(uuid, int(mebibytes) << 20)) for number, uuid, mebibytes in lines]
        wanted = environment.get(_VISIBLE)
        if wanted is not None and "MIG-" in wanted.upper():
            # a profile such as 1g.10gb has somewhat more than 10e9 bytes
            parts = [(uuid, int(size) * 10**9) for size, uuid in _PART.findall(ask_parts())]
            known += [(uuid, CudaDevice(uuid, num_bytes)) for uuid, num_bytes in parts]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise _none_there(f"nvidia-smi says: {error}") from error
    if wanted is not None:
        names = [name.strip() for name in wanted.split(",") if name.strip()]
        known = [entry for name in names for entry in known if _is(entry, name)]
    if not known:
        raise _none_there(f"{_VISIBLE} is {wanted!r}" if wanted is not None else "nvidia-smi lists none")
    return tuple(device for _, device in known)


def device_share_bytes(devices: Sequence[CudaDevice], num_vms: int) -> int:
    """Return each VM's share of its device's memory: that on the smallest device, with the largest number of VMs."""
    return min(device.memory_bytes for device in devices) // -(-num_vms // len(devices))


def device_slots(devices: Sequence[CudaDevice], num_vms: int, folder: Path) -> tuple[str, ...]:
    """Return a file for each VM, to be tried in order; whoever locks one has a share of the device in its name."""
    rounds = -(-num_vms // len(devices))
    return tuple(str(folder / f"{share}" / device.uuid) for share in range(rounds) for device in devices)


def _is(entry: tuple[str, CudaDevice], name: str) -> bool:
    number, device = entry
    return name == number or device.uuid.lower().startswith(name.lower())


def _none_there(why: str) -> ConfigError:
    allowed = "cpu, or a machine with one"
    return ConfigError(f"this machine has no such device ({why})", field="vms.device", value="cuda", allowed=allowed)

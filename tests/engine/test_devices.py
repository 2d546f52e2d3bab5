from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manager.host.devices import CudaDevice, cuda_devices, device_slots
from manager.run import session
from morph.contract.cluster import LocalVms
from morph.contract.errors import ClusterError, ConfigError
from morph.contract.messages import Failed
from morph.contract.trace import Trace, TraceEvent
from morph.runtime.process.worker import set_up, take_slot
from tests.worker_setup import SETUP

TWO = "0, GPU-aa, 16384\n1, GPU-bb, 8192\n"
A, B = CudaDevice("GPU-aa", 16 << 30), CudaDevice("GPU-bb", 8 << 30)


@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, (A, B)), ("1", (B,)), ("1,0", (B, A)), ("GPU-aa", (A,)), ("gpu-b", (B,))],
)
def test_the_devices_that_are_visible_are_listed_with_their_memory(
    visible: str | None, found: tuple[CudaDevice, ...]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert cuda_devices(lambda: TWO, environment) == found


def test_a_part_of_a_device_is_known_by_its_name() -> None:
    listed = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-11)\n"
        "  MIG 1g.5gb+me   Device  1: (UUID: MIG-22)\n"
    )
    environment = {"CUDA_VISIBLE_DEVICES": "MIG-22,MIG-11"}
    found = cuda_devices(lambda: TWO, environment, lambda: listed)
    assert found == (CudaDevice("MIG-22", 5 * 10**9), CudaDevice("MIG-11", 20 * 10**9))


def _missing() -> str:
    raise FileNotFoundError("nvidia-smi")


def _broken() -> str:
    raise subprocess.CalledProcessError(9, "nvidia-smi")


@pytest.mark.parametrize(("ask", "visible"), [(_missing, None), (_broken, None), (lambda: TWO, ""), (lambda: "", None)])
def test_a_machine_without_a_device_is_refused_with_the_requesting_field(ask, visible) -> None:  # type: ignore[no-untyped-def]
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(ConfigError, match=r"vms.device: this machine has no such device"):
        cuda_devices(ask, environment)


@pytest.mark.parametrize(("device", "count"), [("cpu", 0), ("cuda", 4)])
def test_local_vms_on_cuda_get_as_many_shares_as_planned(
    device: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "cuda_devices", lambda: (A, B))
    vms = LocalVms.model_validate({"num_vms": 2, "device": device})
    events = tuple(TraceEvent(time_s=0, event="add", node_id=f"vm{number}") for number in range(3))
    spec: Any = SimpleNamespace(cluster=SimpleNamespace(vms=vms), trace=Trace(events=events), emulation=None)
    assert len(session._device_slots(spec, SimpleNamespace(path=tmp_path))) == count  # type: ignore[arg-type]


def test_a_worker_takes_its_share_before_it_loads_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    slots = device_slots((A, B), 2, tmp_path)
    setup = SETUP.model_copy(update={"device_slots": slots})
    for device in (A, B):
        assert isinstance(set_up(setup), Failed)  # the job does not exist
        assert os.environ["CUDA_VISIBLE_DEVICES"] == device.uuid


def test_workers_spread_over_the_devices_and_a_dead_ones_share_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    slots = device_slots((A, B), 3, tmp_path)
    assert take_slot((), wait_s=0) is None
    held, seen = [], []
    for _ in range(4):
        held.append(take_slot(slots, wait_s=0))
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == ["GPU-aa", "GPU-bb", "GPU-aa", "GPU-bb"]
    with pytest.raises(ClusterError, match="all 4 shares are taken"):
        take_slot(slots, wait_s=0)
    gone = held.pop(1)
    assert gone is not None
    os.close(gone)  # as when its process ends
    held.append(take_slot(slots, wait_s=0))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-bb"
    for file in filter(None, held):
        os.close(file)

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from calibrate.timing.environment import describe_environment, machine_memory_bytes, num_cores

MIB = 1 << 20


def test_a_cpu_worker_has_its_cores_share_of_the_memory() -> None:
    found = describe_environment(torch.device("cpu")).device_memory_bytes
    assert found == machine_memory_bytes() // num_cores()
    assert found is not None
    assert found <= psutil.virtual_memory().total


def test_a_container_that_may_have_less_than_the_machine_is_believed(tmp_path: Path) -> None:
    limit, none, absent = tmp_path / "limit", tmp_path / "none", tmp_path / "absent"
    limit.write_text(f"{64 * MIB}\n", encoding="ascii")
    none.write_text("max\n", encoding="ascii")
    total = psutil.virtual_memory().total
    assert machine_memory_bytes((absent, limit)) == 64 * MIB
    assert machine_memory_bytes((absent, none)) == total
    limit.write_text(f"{2**63}\n", encoding="ascii")
    assert machine_memory_bytes((limit,)) == total

"""``morph spot-run`` on the virtual Azure: a plain script whose VM is evicted, with and without a notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.hosts import ROOT, not_permitted
from tests.cloud.image import bare_python
from tests.cloud.virtual_azure import CLOUD_FILE, GROUP, VirtualAzure
from tests.cloud.waiting import until

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(not_permitted()), reason=not_permitted() or "-"),
]
NOTICE_S, UID, END_BOUND_S = 120.0, 50506, 240.0
SCRIPTS = ROOT / "tests" / "spot"
OTHER: dict[str, Any] = {
    "id": f"{GROUP}/providers/Microsoft.Compute/virtualMachines/other-0",
    "name": "other-0",
    "tags": {"morph-run": "other-8810", "morph-job": "spot", "morph-request": "other-8810-0-1"},
    "zones": ["1"],
    "properties": {
        "hardwareProfile": {"vmSize": "Standard_NC6"},
        "provisioningState": "Succeeded",
        "timeCreated": "2026-01-01T00:00:00+00:00",
    },
}
"""A VM of another run."""


def job_of(directory: Path, address: str) -> Path:
    """The job's file and what it names; ``directory/out`` is for the VMs' user to write in."""
    (directory / "code").mkdir()
    for name in ("spot_model.py", "plain_script.py"):
        (directory / "code" / name).write_bytes((SCRIPTS / name).read_bytes())
    vms = {"kind": "azure", "cloud": "azure.yaml", "keep": 1, "memory_bytes": 10**9, "device": "cpu"}
    vms |= {"address": address, "shared_storage": True, "job_uid": UID, "limits": {"max_vms": 2, "budget_usd": 1.0}}
    vms |= {"environment": {"python": bare_python(directory / "image")}, "pass_variables": ["OUT", "PAUSES"]}
    files: dict[str, dict[str, Any]] = {"azure.yaml": CLOUD_FILE, "cluster.yaml": {"vms": vms}}
    files["job.yaml"] = {"storage": "out/backups", "vms": "cluster.yaml", "code": "code"}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))  # JSON is YAML
    directory.chmod(0o755)
    (directory / "out" / "backups").mkdir(parents=True)
    for path in (directory / "out", directory / "out" / "backups"):
        os.chown(path, UID, UID)
    return directory / "job.yaml"


def undisturbed(directory: Path) -> str:
    """The weights of the script by itself."""
    directory.mkdir()
    known = {**os.environ, "OUT": str(directory), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, SCRIPTS / "plain_script.py"], cwd=directory, env=known, check=True, timeout=END_BOUND_S
    )
    return (directory / "end").read_text()


def test_a_script_survives_evictions_and_leaves_no_vm(tmp_path: Path) -> None:
    out, taken = tmp_path / "out", list[str]()
    with VirtualAzure(tmp_path) as azure:
        azure.region.put_by_hand(OTHER, "#cloud-config\n{}")
        job = job_of(tmp_path, azure.manager_address)
        command = [sys.executable, "-m", "morph.cli.main", "spot-run", str(job), "--", "python", "plain_script.py"]
        with (tmp_path / "told").open("w") as told:
            process = azure.popen(command, told, OUT=str(out), PAUSES="25+,45")
        try:
            for files, notice_s in (("backups/*/manifest.json", NOTICE_S), ("stopped-45", None)):
                until(lambda: [*out.glob(files)] or process.poll() is not None, files, END_BOUND_S)  # noqa: B023
                taken += [vm for vm in azure.region.living() if vm not in (*taken, "other-0")][:1]
                assert azure.region.take(taken[-1], notice_s)
            process.wait(END_BOUND_S)
        finally:
            process.kill()
            process.wait()
            print((tmp_path / "told").read_text(), *azure.logs.values())
        assert process.returncode == 0
        assert azure.processes() == []
        assert azure.region.left() == {"VMs": ["other-0"], "scale sets": [], "NICs": [], "disks": []}
        assert (azure.region.troubles, azure.region.wrong) == ([], [])
        assert [call for call in azure.region.calls if "other" in call] == []
        ends = {entry.name: entry.end for entry in azure.region.bill}
    assert (ends.pop("other-0"), ends.pop(taken[0]), ends.pop(taken[1])) == ("", "deleted", "evicted")
    assert list(ends.values()) == ["deleted"]
    begins = [int(one) for one in (out / "begins").read_text().split()]
    assert begins[:2] == [0, 26]  # nothing is lost with a notice
    assert begins[2] in (26, 30, 40)
    assert [(out / name).stat().st_uid for name in ("begins", "end")] == [UID, UID]
    assert (out / "end").read_text() == undisturbed(tmp_path / "quiet")
    assert "all that was trained is in storage: the VM is released" in (tmp_path / "told").read_text()

"""The virtual hosts themselves: what a VM does stays in it, and goes with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from pydantic import SecretStr

from manager.engine.certificates import Tls, load_authority, make_certificates
from manager.engine.enrolment_desk import EnrolmentDesk
from manager.engine.inbox import Inbox
from manager.engine.notice_door import NoticeDoor
from manager.enrolment.authority import check_certificate
from manager.enrolment.files import Certificates
from manager.journal.records import Fact
from manager.providers.cloud_init import SECRET_PATH, TLS_DIRECTORY, NodeStart, cloud_init
from tests.cloud.hosts import ROOT, Host, Hosts, not_permitted
from tests.cloud.units import UnitError, read_unit
from tests.cloud.virtual_azure import VirtualAzure, in_namespace
from tests.cloud.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(not_permitted()), reason=not_permitted() or "-")]

START = NodeStart(
    ray_address="10.201.0.1:6379",
    manager_address="10.201.0.1:7070",
    ray_token=SecretStr("ray-t0ken-51c2"),
    node_secret=SecretStr("n0de-secret-77aa"),
    python=sys.executable,
    lonely_s=0.5,
)


def cloud_config(*lines: object, units: dict[str, str] | None = None) -> str:
    files = [{"path": f"/etc/systemd/system/{name}.service", "content": text} for name, text in (units or {}).items()]
    return "#cloud-config\n" + json.dumps({"write_files": files, "runcmd": list(lines)})


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts([tmp_path], {}) as hosts:
        yield hosts
    assert not hosts.directory.exists()
    assert not list(Path("/run/netns").glob(f"morph-{os.getpid()}-*"))


def booted(hosts: Hosts, config: str, name: str = "vm") -> Host:
    hosts.furnish(name)
    return hosts.boot(name, config)


def test_a_real_cloud_config_is_carried_out_and_leaves_nothing_on_this_machine(hosts: Hosts, tmp_path: Path) -> None:
    config = cloud_init(START, "vm-0", "azure").replace("systemctl", "true")  # its files; nothing is started
    look = [
        "sh",
        "-c",
        f"(stat -c %a {SECRET_PATH}; cat {SECRET_PATH}; echo; hostname; cat /proc/1/comm) > {tmp_path}/seen",
    ]
    document = json.loads(config.removeprefix("#cloud-config\n"))
    document["runcmd"].append(look)
    booted(hosts, "#cloud-config\n" + json.dumps(document))
    until(lambda: (tmp_path / "seen").exists() and "python" in (tmp_path / "seen").read_text(), "the first boot")
    assert (tmp_path / "seen").read_text().split() == ["600", "n0de-secret-77aa", "vm", "python"]
    assert not Path(SECRET_PATH).exists()


def test_a_service_is_started_again_until_it_cannot_run_at_all(hosts: Hosts, tmp_path: Path) -> None:
    unit = (
        "[Unit]\nStartLimitIntervalSec=60\nStartLimitBurst=3\nStartLimitAction=poweroff-force\n"
        f"[Service]\nEnvironment=WORD=again\nExecStart=/bin/sh -c 'echo $$WORD >> {tmp_path}/seen'\n"
        "Restart=always\nRestartSec=0.05\n"
    )
    host = booted(hosts, cloud_config(["systemctl", "start", "x.service"], units={"x": unit}))
    until(lambda: not host.is_on, "the host to switch itself off")
    assert (tmp_path / "seen").read_text().split() == ["again"] * 3


def test_killing_a_host_ends_everything_in_it_at_once(hosts: Hosts) -> None:
    unit = "[Service]\nExecStart=/bin/sh -c 'setsid sleep 1000 & sleep 1000'\n"
    host = booted(hosts, cloud_config(["systemctl", "start", "x.service"], units={"x": unit}))
    inside: list[psutil.Process] = []

    def both_sleep() -> bool:
        inside[:] = psutil.Process(host.pid).children(recursive=True)
        return sum(process.name() == "sleep" for process in inside) == 2

    until(both_sleep, "the service and the process that left its session")
    host.kill()
    assert not [process for process in inside if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_nothing_outlives_the_process_that_made_it(tmp_path: Path) -> None:
    program = (
        "import time\nfrom pathlib import Path\nfrom tests.cloud.hosts import Hosts\n"
        f"with Hosts([Path({str(tmp_path)!r})], {{}}) as hosts:\n"
        "    hosts.furnish('vm'); host = hosts.boot('vm', '')\n"
        "    print(host.pid, hosts.directory, flush=True)\n    time.sleep(1000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    ) as maker:
        assert maker.stdout is not None
        pid, directory = maker.stdout.readline().decode().split()
        process = psutil.Process(int(pid))
        maker.send_signal(signal.SIGKILL)
        maker.wait(30)
    until(lambda: not process.is_running(), "the host's end")
    with Hosts([], {}):  # removes what is left of processes that are gone
        assert not list(Path("/run/netns").glob(f"morph-{maker.pid}-*"))
        assert not Path(directory).exists()


def test_a_lonely_vm_deletes_itself_by_its_identity(tmp_path: Path) -> None:
    document = json.loads(cloud_init(START, "tiny-1-0", "azure").removeprefix("#cloud-config\n"))
    document["runcmd"] = [line for line in document["runcmd"] if "morph-node.service" not in line]  # no Ray here
    with VirtualAzure(tmp_path) as azure:
        machine = {"id": "/subscriptions/x/resourceGroups/train/providers/Microsoft.Compute/virtualMachines/tiny-1-0"}
        machine |= {"name": "tiny-1-0", "zones": ["1"]}
        machine["properties"] = {"hardwareProfile": {"vmSize": "Standard_NC6"}, "provisioningState": "Succeeded"}
        machine["properties"] |= {"timeCreated": datetime.now(UTC).isoformat()}
        azure.region.put_by_hand(machine, "#cloud-config\n" + json.dumps(document))
        until(lambda: azure.region.bill and azure.region.bill[0].until_s, "the VM to delete itself")
        assert azure.region.calls == ["DELETE virtualMachines/tiny-1-0"]
        assert azure.region.left()["VMs"] == []
        assert set(azure.region.tokens.values()) == {"node"}
        assert azure.region.troubles == []


def test_a_vm_has_its_key_certified_for_its_own_address_before_its_node_starts(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, Tls(enrols=True))
    inbox, secret, pem = Inbox(), START.node_secret.get_secret_value(), made.authority.read_text()
    with Hosts([tmp_path], {}) as hosts:
        desk = EnrolmentDesk(inbox, secret, load_authority(tmp_path))
        door = in_namespace(hosts.network.hub, lambda: NoticeDoor(inbox, secret, hosts.network.hub_address, desk=desk))
        try:
            manager = f"{hosts.network.hub_address}:{door.port}"
            start = START.model_copy(update={"authority": pem, "manager_address": manager, "lonely_s": 60.0})
            host = booted(hosts, cloud_init(start, "vm-0", "azure").replace("ray.scripts.scripts", "json.tool"))
            found = Certificates.below(host.directory / TLS_DIRECTORY.lstrip("/"))
            until(lambda: "json.tool: error" in host.log("morph-node"), "what stands for the node")
            key = load_pem_private_key(found.key.read_bytes(), None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            address = hosts.network.address(0)
            check_certificate(found.certificate.read_text(), pem.encode(), key, address)
            assert [found.key.stat().st_mode & 0o777, found.key.parent.stat().st_mode & 0o777] == [0o600, 0o700]
            assert found.key.read_text().splitlines()[1] not in "".join(map(host.log, ("host", "morph-node")))
        finally:
            door.close()
    told = [stamped.item for _ in range(len(inbox)) if (stamped := inbox.get(0.0)) is not None]
    assert Fact(name="node_enrolled", detail=f"vm-0 at {address}") in told


@pytest.mark.parametrize(
    "text", ["[Service]\n", "[Service]\nExecStart=sleep 1\n", "[Service]\nType=forking\nExecStart=/a\n"]
)
def test_a_unit_that_the_stand_in_does_not_understand_is_an_error(text: str) -> None:
    with pytest.raises(UnitError):
        read_unit(text)


def test_the_units_of_a_node_are_understood() -> None:
    text = cloud_init(START, "vm-0", "azure")
    files = json.loads(text.removeprefix("#cloud-config\n"))["write_files"]
    units = {entry["path"]: read_unit(entry["content"]) for entry in files if entry["path"].endswith(".service")}
    node = units["/etc/systemd/system/morph-node.service"]
    assert (node.always, node.limit_burst, node.limit_action) == (True, 20, "poweroff-force")
    assert node.environment["RAY_AUTH_MODE"] == "token"
    assert json.loads(
        next(filter(None, (re.sub("^--resources=", "", word) for word in node.command if "resources" in word)))
    )

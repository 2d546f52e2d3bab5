"""The virtual hosts themselves: a VM's processes and files stay inside it and end with it."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import platform
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from pydantic import SecretStr

from manager.controller.state.events import WorkerLost
from manager.engine.joining.certificates import Tls, load_authority, make_certificates
from manager.engine.joining.enrolment_desk import EnrolmentDesk
from manager.engine.joining.notice_server import NoticeServer
from manager.engine.loop.event_queue import EventQueue
from manager.enrolment.authority import check_certificate
from manager.enrolment.files import Certificates
from manager.journal.records import Fact
from manager.providers.boot.cloud_init import (
    CODE_DIRECTORY,
    SECRET_PATH,
    TLS_DIRECTORY,
    TOKEN_PATH,
    NodeStart,
    cloud_init,
)
from manager.providers.boot.own_wheel import make_wheel, requirements
from morph.contract.cluster import JOB_UID
from morph.link.authority import authority_of
from tests.cloud.hosts import Host, Hosts, not_permitted
from tests.cloud.image import bare_python
from tests.cloud.metadata import ADDRESS
from tests.cloud.units import read_unit
from tests.cloud.virtual_azure import VirtualAzure, in_namespace
from tests.waiting import poll_until

pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(not_permitted()), reason=not_permitted() or "-")]

COMPUTE = "providers/Microsoft.Compute/virtualMachines"
WHEEL, NODE_SECRET = make_wheel(), "n0de-secret-77aa"
START = NodeStart(
    ray_address="10.201.0.1:6379",
    manager_address="10.201.0.1:7070",
    ray_token=SecretStr("ray-t0ken-51c2"),
    node_secret=SecretStr(authority_of(NODE_SECRET).credential("node")),
    python=sys.executable,
    python_version=platform.python_version(),
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
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


def test_a_real_cloud_config_is_carried_out_inside_the_host(hosts: Hosts, tmp_path: Path) -> None:
    config = cloud_init(START, "vm-0", "azure")  # its files alone; no service is started
    look = [
        "sh",
        "-c",
        f"(stat -c %a {SECRET_PATH}; cat {SECRET_PATH}; echo; hostname; cat /proc/1/comm) > {tmp_path}/seen",
    ]
    document = json.loads(config.removeprefix("#cloud-config\n"))
    document["runcmd"] = [look]
    booted(hosts, "#cloud-config\n" + json.dumps(document))
    poll_until(lambda: (tmp_path / "seen").exists() and "python" in (tmp_path / "seen").read_text(), "the first boot")
    assert (tmp_path / "seen").read_text().split() == ["600", START.node_secret.get_secret_value(), "vm", "python"]
    assert not Path(SECRET_PATH).exists()


@contextmanager
def managed(hosts: Hosts, start: NodeStart, *, tls: Path | None = None) -> Iterator[tuple[NodeStart, EventQueue]]:
    """Start a manager's notice server on the hub; yield how a VM starts that finds it, and what the server hears."""
    event_queue = EventQueue()
    desk = EnrolmentDesk(event_queue, load_authority(tls)) if tls else None
    address = hosts.network.hub_address
    server = in_namespace(
        hosts.network.hub, lambda: NoticeServer(event_queue, NODE_SECRET, address, desk=desk, wheel=WHEEL)
    )
    try:
        yield start.model_copy(update={"manager_address": f"{address}:{server.port}"}), event_queue
    finally:
        server.close()


def agents_of(host: Host | None) -> list[psutil.Process]:
    found = []
    for process in host.processes() if host is not None else ():
        with suppress(psutil.NoSuchProcess):
            found += [process] if "manager.notices.agent" in process.cmdline() else []
    return found


def told_to(event_queue: EventQueue) -> list[object]:
    return [stamped.item for _ in range(len(event_queue)) if (stamped := event_queue.get(0.0)) is not None]


def machine_of(name: str) -> dict[str, Any]:
    machine: dict[str, Any] = {"id": f"/subscriptions/x/resourceGroups/train/{COMPUTE}/{name}", "name": name}
    properties = {"hardwareProfile": {"vmSize": "Standard_NC6"}, "provisioningState": "Succeeded"}
    tags = {"morph-run": "tiny", "morph-job": "tiny", "morph-request": "tiny-1"}
    return {
        **machine,
        "zones": ["1"],
        "tags": tags,
        "properties": properties | {"timeCreated": datetime.now(UTC).isoformat()},
    }


def test_a_vm_whose_first_boot_dies_is_ended_by_its_watchdog(tmp_path: Path) -> None:
    with VirtualAzure(tmp_path) as azure:
        start = START.model_copy(update={"python": sys.executable, "setup": ("kill -s KILL $PPID",), "lonely_s": 3.0})
        azure.region.put_by_hand(machine_of("tiny-1-0"), cloud_init(start, "tiny-1-0", "azure"))
        poll_until(lambda: "tiny-1-0" in azure.logs and azure.region.bill[0].until_s, "the VM to delete itself")
        assert set(azure.region.calls) == {"DELETE virtualMachines/tiny-1-0"}  # or by its watchdog, if that is late
        assert "Killed" in azure.logs["tiny-1-0"]


@pytest.mark.parametrize("booted", [True, False], ids=["after it booted", "before it has Morph"])
def test_a_lonely_vm_deletes_itself_by_its_identity(tmp_path: Path, booted: bool) -> None:
    python = bare_python(tmp_path / "image")
    with VirtualAzure(tmp_path) as azure, ExitStack() as manager:
        start = START.model_copy(update={"python": python, "lonely_s": 5.0})  # the watchdog comes five seconds later
        if booted:
            start, _ = manager.enter_context(managed(azure.hosts, start))
        config = cloud_init(start, "tiny-1-0", "azure").replace(" morph-node.service", "")  # there is no Ray
        azure.region.put_by_hand(machine_of("tiny-1-0"), config)
        if booted:
            poll_until(lambda: agents_of(azure.hosts.living.get("tiny-1-0")), "the agent")
            manager.close()
        poll_until(lambda: "tiny-1-0" in azure.logs and azure.region.bill[0].until_s, "the VM to delete itself")
        assert set(azure.region.calls) == {"DELETE virtualMachines/tiny-1-0"}  # or by its watchdog, if that is late
        assert azure.region.left()["VMs"] == []
        assert set(azure.region.tokens.values()) == {"node"}
        assert azure.region.troubles == []
        assert ("no wheel came from the manager" in azure.logs["tiny-1-0"]) is not booted


def test_a_vm_runs_the_managers_wheel_after_the_users_lines(hosts: Hosts, tmp_path: Path) -> None:
    bare_python(tmp_path / "image")
    setup, late = (f"ln -s {tmp_path}/image {tmp_path}/opt",), tmp_path / "opt/bin/python"  # it is not there before
    with managed(hosts, START.model_copy(update={"python": str(late), "setup": setup, "lonely_s": 60.0})) as found:
        start = found[0].model_copy(update={"requirements": requirements()})
        host = booted(
            hosts, cloud_init(start, "vm-0", "azure").replace("manager.engine.on_ray.node", "manager.first_look")
        )
        poll_until(lambda: "No module named manager.first_look" in host.log("morph-node"), "what stands for the node")
        assert [agent.environ()["PYTHONPATH"] for agent in agents_of(host)] == [CODE_DIRECTORY]
    code = host.directory / CODE_DIRECTORY.lstrip("/")
    with zipfile.ZipFile(io.BytesIO(WHEEL)) as archive:
        for name in archive.namelist():
            assert (code / name).read_bytes() == archive.read(name)


def test_a_vm_with_an_unfit_python_says_so_in_one_sentence(hosts: Hosts) -> None:
    with managed(hosts, START.model_copy(update={"python_version": "3.12.99", "lonely_s": 60.0})) as (
        start,
        event_queue,
    ):
        host = booted(hosts, cloud_init(start, "vm-0", "azure", 2))
        poll_until(lambda: len(event_queue) == 3, "the manager to hear of it")
        fact, *lost = told_to(event_queue)
        assert isinstance(fact, Fact)
        assert (fact.name, fact.worker) == ("vm_unfit", "vm-0")
        assert f"is Python {platform.python_version()}, and Ray needs the manager's 3.12.99" in fact.detail
        assert lost == [WorkerLost(worker=f"vm-0.d{device}", cause=fact.detail, unfit=True) for device in range(2)]
        assert host.log("morph-agent") == host.log("morph-node") == ""


def test_a_vm_gets_its_certificate_before_its_node_starts(hosts: Hosts, tmp_path: Path) -> None:
    made = make_certificates(tmp_path, Tls(enrols=True))
    pem = made.authority.read_text()
    with managed(hosts, START.model_copy(update={"authority": pem, "lonely_s": 60.0}), tls=tmp_path) as (
        start,
        event_queue,
    ):
        host = booted(hosts, cloud_init(start, "vm-0", "azure").replace("manager.engine.on_ray.node", "json.tool"))
        found = Certificates.below(host.directory / TLS_DIRECTORY.lstrip("/"))
        poll_until(lambda: "json.tool: error" in host.log("morph-node"), "what stands for the node")
    key = load_pem_private_key(found.key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    address = hosts.network.address(0)
    check_certificate(found.certificate.read_text(), pem.encode(), key, address)
    assert [found.key.stat().st_mode & 0o777, found.key.parent.stat().st_mode & 0o777] == [0o600, 0o700]
    assert found.key.read_text().splitlines()[1] not in "".join(map(host.log, ("host", "morph-node")))
    assert Fact(name="node_enrolled", detail=f"vm-0 at {address}") in told_to(event_queue)


PROBE = f"""
import os, socket, time
def tried(call):
    try:
        call()
    except OSError as error:
        return type(error).__name__
    return "yes"
print({{
    "uid": os.getuid(), "groups": os.getgroups(), "home": os.path.expanduser("~"),
    "token": tried(lambda: open({TOKEN_PATH!r}).read()), "secret": tried(lambda: open({SECRET_PATH!r}).read()),
    "code": tried(lambda: open("{CODE_DIRECTORY}/other.py", "w")),
    "metadata": tried(lambda: socket.create_connection(({ADDRESS!r}, 80), 5)),
    "root": tried(lambda: os.setuid(0)),
}}, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def azure_and_image(tmp_path: Path) -> Iterator[tuple[VirtualAzure, str]]:
    """Use an interpreter that any user may run, and a program in place of Ray's node."""
    tmp_path.chmod(0o755)
    (tmp_path / "probe.py").write_text(PROBE)
    python = bare_python(tmp_path / "image")
    with VirtualAzure(tmp_path) as azure:
        yield azure, python


def boot_as_user(azure: VirtualAzure, start: NodeStart, folder: Path) -> Host:
    config = cloud_init(start, "tiny-1-0", "azure").replace("-m manager.engine.on_ray.node", str(folder / "probe.py"))
    azure.region.put_by_hand(machine_of("tiny-1-0"), config)
    host = poll_until(lambda: azure.hosts.living.get("tiny-1-0"), "the VM")
    assert isinstance(host, Host)
    return host


@pytest.mark.parametrize("metadata", [False, True], ids=["metadata closed", "metadata open"])
def test_the_job_has_neither_root_nor_secret_nor_the_vms_identity(
    azure_and_image: tuple[VirtualAzure, str], tmp_path: Path, metadata: bool
) -> None:
    azure, python = azure_and_image
    asked = START.model_copy(update={"python": python, "lonely_s": 60.0, "uid": JOB_UID, "metadata": metadata})
    with managed(azure.hosts, asked) as (start, event_queue):
        host = boot_as_user(azure, start, tmp_path)
        poll_until(lambda: host.log("morph-node").endswith("}\n"), "what stands for the node")
        assert ast.literal_eval(host.log("morph-node")) == {
            **{"uid": JOB_UID, "groups": [JOB_UID], "home": "/home/morph", "root": "PermissionError"},
            **{"token": "yes", "secret": "PermissionError", "code": "PermissionError"},
            "metadata": "yes" if metadata else "PermissionError",
        }
        poll_until(lambda: azure.services["tiny-1-0"].num_asked, "the agent, which is root, to ask it")
        assert told_to(event_queue) == []


def test_a_vm_whose_metadata_service_stays_open_to_the_job_is_unfit(
    azure_and_image: tuple[VirtualAzure, str], tmp_path: Path
) -> None:
    azure, python = azure_and_image
    first = ("ip rule add priority 1 lookup local",)  # so that the rule that forbids the access comes too late
    asked = {"python": python, "lonely_s": 60.0, "uid": JOB_UID, "metadata": False, "setup": first}
    with managed(azure.hosts, START.model_copy(update=asked)) as (start, event_queue):
        host = boot_as_user(azure, start, tmp_path)
        poll_until(lambda: len(event_queue), "the manager to hear of it")
        fact = told_to(event_queue)[0]
        assert isinstance(fact, Fact)
        assert (fact.name, fact.worker) == ("vm_unfit", "tiny-1-0")
        assert "cannot be closed to the job's code (vms.metadata: true leaves it open): it still answers" in fact.detail
        assert host.log("morph-node") == ""


def test_the_units_of_a_node_are_understood() -> None:
    text = cloud_init(START, "vm-0", "azure")
    files = json.loads(text.removeprefix("#cloud-config\n"))["write_files"]
    units = {entry["path"]: read_unit(entry["content"]) for entry in files if entry["path"].endswith(".service")}
    node = units["/etc/systemd/system/morph-node.service"]
    assert (node.always, node.limit_interval_s, node.limit_action) == (True, 0.0, "none")  # the watchdog ends the VM
    assert node.environment["RAY_AUTH_MODE"] == "token"
    assert json.loads(
        next(filter(None, (re.sub("^--resources=", "", word) for word in node.command if "resources" in word)))
    )

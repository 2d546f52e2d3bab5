"""Builds a launcher with its VMs from the files of ``morph spot-run``.

A local VM is an agent in a thread, with a folder as its disk, which is removed with the VM.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from manager.engine.loop.event_queue import EventQueue
from manager.engine.vms.budget import Spending
from manager.host.environment import variables
from manager.host.ports import Ports
from manager.providers.boot.cloud_init import node_start, wanted_on
from manager.providers.boot.own_wheel import Lock, make_wheel
from manager.providers.factory import ending_command
from manager.providers.interface.provider import name_of
from manager.providers.local import LocalProvider
from manager.run.markets import Cloud
from manager.spot.agent import END_TIMEOUT_S, TIMEOUT_S, VmAgent
from manager.spot.launcher import Launcher, VmSource, log
from manager.spot.script_server import ScriptServer
from manager.spot.spec import SpotJob
from morph.contract.errors import ConfigError
from morph.contract.files import code_files, packed
from morph.contract.lives import Lives
from morph.contract.trace import UNKNOWN
from morph.jobs.snapshot import MAX_BYTES
from morph.link.authority import authority_of
from morph.link.proof import new_secret


def open_local(job: SpotJob, command: Sequence[str], root: Path, code: Path | None, lives: Lives | None) -> Launcher:
    """Return the launcher of a job on local VMs, or on this machine itself (without ``code``)."""
    events, secret = EventQueue(), new_secret()
    machines = ScriptServer(events, secret)
    num_vms = job.num_vms if code is not None else 1
    fleet = LocalVms(machines, secret, root, code)
    provider = LocalProvider(fleet, max_vms=2 * num_vms if code is not None else 1)
    return Launcher(job, command, VmSource(provider, num_vms), machines, lives, events)


def open_provided(
    job: SpotJob, command: Sequence[str], cloud: Cloud, root: Path, code: Path, lives: Lives | None
) -> Launcher:
    """Return the launcher of a job on VMs that a provider brings.

    ClusterError: Morph is not installed here in a form that VMs can get. ConfigError: the code is too large, listening
    on the address failed, or a variable to be passed on is not set.
    """
    vms, name, wheel = cloud.vms, name_of(root, job.name), make_wheel()
    providing, secret = cloud.providing(name, root), new_secret()
    port = vms.notice_port or Ports(vms.first_port or 0).notices
    archive, events = packed_code(code), EventQueue()
    try:
        lock = Lock(providing.lock_path, wanted_on(vms), log.warning)
        handed_on = variables(vms.pass_variables)
        machines = ScriptServer(
            events, secret, vms.address, port, wheel=wheel, lock=lock, code=archive, handed_on=handed_on
        )
    except OSError as error:
        raise ConfigError(
            f"cannot be listened on: {error.strerror}", source=str(cloud.path), field="vms.address", value=vms.address
        ) from error
    start = node_start(vms, machines.port, secret, wheel, providing.management_url)
    log.info("if this command is killed, and VMs are left: %s", ending_command(cloud.path, name))
    named = job.model_copy(update={"name": name.requests})
    least_vms = -(-vms.keep // cloud.most_devices)
    source = VmSource(providing.make_provider(start), vms.keep, least_vms, Spending(vms.limits))
    return Launcher(named, command, source, machines, lives, events)


def packed_code(folder: Path) -> bytes:
    """Pack the script's folder, without hidden and compiled files and links; ConfigError if it is too large."""
    files = dict(code_files(folder))
    if sum(path.stat().st_size for path in files.values()) > MAX_BYTES:
        raise ConfigError("is too large", field="code", value=str(folder), allowed=f"{MAX_BYTES} bytes at most")
    return packed({inside: path.read_bytes() for inside, path in files.items()})


class LocalVms:
    """Boots and ends local VMs: a ``Fleet`` of ``manager.providers.local``. ``secret``: the one of ``machines``.

    ``root``: the folder for the VMs' disks. ``code``: the folder that each VM gets a copy of; None: scripts run in the
    launcher's working directory.
    """

    def __init__(self, machines: ScriptServer, secret: str, root: Path, code: Path | None) -> None:
        self._manager, self._credential = (machines.host, machines.port), authority_of(secret).credential("node")
        self._root, self._code = root, code
        self._agents: dict[str, tuple[VmAgent, threading.Thread]] = {}

    def request(self, node: str, *, answers: str | None = None, instance_type: str = UNKNOWN) -> str:
        """Boot a VM, whatever its request and type."""
        del answers, instance_type
        disk = self._root / node
        disk.mkdir(parents=True)
        where = None if self._code is None else shutil.copytree(self._code, disk / "code", symlinks=True)
        agent = VmAgent(self._manager, node, self._credential, disk, where=where)
        thread = threading.Thread(target=agent.run, name=f"morph-{node}", daemon=True)
        self._agents[node] = agent, thread
        thread.start()
        return node

    def release(self, *nodes: str) -> None:
        """End VMs and their disks at once, as a provider does; VMs that are gone are skipped."""
        for node in nodes:
            if node in self._agents:
                agent, thread = self._agents.pop(node)
                agent.close()
                thread.join(TIMEOUT_S + END_TIMEOUT_S)
            shutil.rmtree(self._root / node, ignore_errors=True)

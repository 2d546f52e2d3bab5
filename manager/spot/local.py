"""Local VMs for scripts: each is an agent in a thread, with a folder as its disk, which is removed with the VM."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from manager.spot.agent import END_TIMEOUT_S, TIMEOUT_S, VmAgent
from manager.spot.script_server import ScriptServer
from morph.contract.trace import UNKNOWN
from morph.link.authority import authority_of


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

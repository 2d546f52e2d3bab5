"""Local VMs for scripts: each is a process group, with a folder as its disk, which is removed with the VM."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from manager.spot.script_process import ScriptProcess, variables
from morph.contract.trace import UNKNOWN

SCRIPT = "spot"


class LocalMachines:
    """Boots and ends local VMs: a ``Fleet`` of ``manager.providers.local``, and the launcher's ``Machines``.

    ``root``: the folder for the VMs' disks. ``code``: the folder that each VM gets a copy of; None: scripts run in the
    launcher's working directory.
    """

    def __init__(self, root: Path, code: Path | None) -> None:
        self._root, self._code = root, code
        self._scripts: dict[str, ScriptProcess] = {}
        self._offsets: dict[str, int] = {}

    def request(self, node: str, *, answers: str | None = None, instance_type: str = UNKNOWN) -> str:
        """Boot a VM, whatever its request and type."""
        del answers, instance_type
        (self._root / node / SCRIPT).mkdir(parents=True)
        if self._code is not None:
            shutil.copytree(self._code, self._root / node / "code", symlinks=True)
        return node

    def release(self, *nodes: str) -> None:
        """End VMs and their disks at once, as a provider does; VMs that are gone are skipped."""
        for node in nodes:
            if (script := self._scripts.pop(node, None)) is not None:
                script.end()
            shutil.rmtree(self._root / node, ignore_errors=True)

    def start(self, vms: Sequence[str], command: Sequence[str], storage: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        for rank, vm in enumerate(vms):
            where = None if self._code is None else self._root / vm / "code"
            own = variables(rank, len(vms), "127.0.0.1", port)
            self._scripts[vm] = ScriptProcess(self._root / vm / SCRIPT, command, storage, where, own)
            self._offsets[vm] = 0

    def save(self, vm: str, number: int) -> None:
        self._scripts[vm].save(number)

    def said(self, vm: str) -> bytes:
        data = self._scripts[vm].said(self._offsets[vm])
        self._offsets[vm] += len(data)
        return data

    def ended(self, vm: str) -> int | None:
        return self._scripts[vm].code()

    def is_lost(self, vm: str) -> bool:
        """Do nothing: the provider ends the scripts."""
        del vm
        return False

    def end(self, vms: Sequence[str]) -> None:
        """Do nothing: the provider ends them at once."""

    def close(self) -> None:
        """Do nothing: the provider has ended them."""

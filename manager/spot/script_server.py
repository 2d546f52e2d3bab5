"""Runs scripts on VMs: the launcher's end. ``manager.spot.agent`` runs on the VMs.

The agent calls as described in ``manager.notices.call``, under the name NODE/script::

    VM        {"kind": "script", "life": L, "said": [FROM, BYTES], "output": [FROM, BYTES], "code": CODE or null}
    launcher  {"heard": true, "kept": [SAID, OUTPUT], "save": NUMBER, "start": START or null}

The answer states the desired state, not an action, so a lost answer does no harm. ``kept``: the bytes from which the VM
continues. START is null until the script should run, and again once it should end. L changes whenever the VM's agent is
restarted, because a new agent does not know the script.
"""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manager.engine.joining.notice_server import NoticeServer
from manager.engine.loop.event_queue import EventQueue
from manager.engine.loop.silence import Signs, Silence
from manager.spot.agent import SUFFIX

SILENT_S = 60.0
"""Seconds. A VM that has called before and is silent for this time is lost."""
BOOT_S = 1800.0
"""Seconds. A VM that has not called after this time is lost."""
PORT = 29400
"""The port of the first VM of a group, where all of them meet; local VMs take a free one."""


@dataclass
class _Vm:
    """One VM. ``signs``: ready once it has called."""

    since_s: float = field(default_factory=time.monotonic)
    signs: Signs = field(default_factory=Signs)
    address: str = ""
    life: str = ""
    kept: list[int] = field(default_factory=lambda: [0, 0])
    said: bytes = b""
    code: int | None = None
    save: int = 0
    start: dict[str, Any] | None = None


class ScriptServer(NoticeServer):
    """Runs scripts on VMs, by their names. All methods but ``start`` and ``close`` need a ``start`` before.

    Booting VMs fetch ``code``, a zip file of the script's folder; without it, VMs are local, and have the code.
    ``handed_on``: variables of the script. Other arguments: see ``NoticeServer``.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        secret: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        wheel: bytes = b"",
        lock: Callable[[], bytes] = lambda: b"",
        code: bytes = b"",
        handed_on: Mapping[str, str] | None = None,
    ) -> None:
        self._vms: dict[str, _Vm] = {}
        self._silence = Silence(SILENT_S)
        self._digest, self._handed_on = hashlib.sha256(code).hexdigest() if code else "", dict(handed_on or {})
        super().__init__(event_queue, secret, host, port, None, wheel, lock)
        self._files["code"] = code

    def start(self, vms: Sequence[str], command: Sequence[str], storage: str) -> None:
        """Start the script on each VM of a group, once the VM has booted and the first one of the group is known."""
        port = PORT if self._digest else _free_port()
        with self._lock:
            for rank, vm in enumerate(vms):
                group = {"first": vms[0], "rank": rank, "size": len(vms), "port": port}
                known = self._vms.setdefault(vm, _Vm())
                known.start = {"command": list(command), "storage": storage, "code": self._digest, **group}
                known.since_s, known.save = time.monotonic(), 0

    def save(self, vm: str, number: int) -> None:
        """Order the script to save."""
        with self._lock:
            self._vms[vm].save = number

    def said(self, vm: str) -> bytes:
        """Return the script's messages since the last call."""
        with self._lock:
            data, self._vms[vm].said = self._vms[vm].said, b""
            return data

    def ended(self, vm: str) -> int | None:
        """Return the script's exit code; None: it runs, or some of its messages have not come yet."""
        with self._lock:
            return self._vms[vm].code

    def are_silent(self, vms: Sequence[str]) -> bool:
        """Return whether one of these VMs is silent for too long; call it often: a pause of this process counts not."""
        with self._lock:
            known = {vm: self._vms[vm] for vm in vms}
            overdue = self._silence.overdue({vm: script.signs for vm, script in known.items()})
            now_s = time.monotonic()
            return bool(overdue) or any(
                not script.signs.ready and now_s - script.since_s > BOOT_S for script in known.values()
            )

    def end(self, vms: Sequence[str]) -> None:
        """Ask VMs that the provider is about to end to end the script; does not wait."""
        with self._lock:
            for vm in vms:
                self._vms[vm].start = None

    def _take(self, node: str, num_devices: int, address: str, message: dict[str, Any]) -> dict[str, Any]:
        if not node.endswith(SUFFIX):
            return super()._take(node, num_devices, address, message)
        with self._lock:
            return self._of_script(self._vms.setdefault(node.removesuffix(SUFFIX), _Vm()), address, message)

    def _of_script(self, vm: _Vm, address: str, line: dict[str, Any]) -> dict[str, Any]:
        vm.signs.ready, vm.signs.beat_sent_s, vm.address = True, time.monotonic(), address
        if line["life"] != vm.life:
            vm.life, vm.kept = str(line["life"]), [0, 0]
        for place, name in enumerate(("said", "output")):
            begin, text = line[name]
            data = base64.b64decode(text)[vm.kept[place] - begin :] if begin <= vm.kept[place] else b""
            vm.kept[place] += len(data)
            if name == "said":
                vm.said += data
            elif data:
                sys.stdout.buffer.write(_harmless(data) if sys.stdout.isatty() else data)
                sys.stdout.flush()
        vm.code = line["code"]
        return {"kept": vm.kept, "save": vm.save, "start": self._ordered(vm.start)}

    def _ordered(self, start: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return what a VM is to start now."""
        first = None if start is None else self._vms[start["first"]]
        if start is None or first is None or not first.signs.ready:
            return None
        own = self._handed_on | variables(start["rank"], start["size"], first.address, start["port"])
        return {name: start[name] for name in ("command", "storage", "code")} | {"environment": own}


def variables(rank: int, size: int, host: str, port: int) -> dict[str, str]:
    """Return variables in which torch.distributed, accelerate and Lightning find a group of VMs; none for one VM."""
    if size == 1:
        return {}
    where = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return where | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(rank), "GROUP_RANK": str(rank)}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _harmless(data: bytes) -> bytes:
    """Return a script's output in a form that is safe for a terminal: an attacker may control a VM."""
    return re.sub(rb"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f]", lambda match: b"\\x%02x" % match[0][0], data)

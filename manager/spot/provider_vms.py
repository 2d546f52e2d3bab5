"""A provider's VMs for scripts: the launcher's end. ``manager.spot.agent`` runs on the VMs.

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
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manager.notices.server import CallingNode, VmServer
from manager.notices.watch import Given
from manager.providers.interface.provider import Misconfigured
from manager.spot.script_process import variables
from morph.contract.errors import printable

log = logging.getLogger("morph.spot")

SUFFIX = "/script"
SILENT_S = 60.0
"""Seconds. A VM that has called before and is silent for this time is lost."""
BOOT_S = 1800.0
"""Seconds. A VM that has not called after this time is lost."""


@dataclass
class _Vm:
    """One VM. ``heard_s``: when it last called; None: never."""

    since_s: float = field(default_factory=time.monotonic)
    heard_s: float | None = None
    address: str = ""
    life: str = ""
    kept: list[int] = field(default_factory=lambda: [0, 0])
    said: bytes = b""
    code: int | None = None
    save: int = 0
    start: dict[str, Any] | None = None


def _harmless(data: bytes) -> bytes:
    """Return a script's output in a form that is safe for a terminal: an attacker may control a VM."""
    return re.sub(rb"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f]", lambda found: b"\\x%02x" % found[0][0], data)


class ProvidedMachines(VmServer):
    """``Machines`` of the launcher; VMs share ``secret``.

    Booting VMs fetch ``files``, and ``code``: a zip file of the script's folder. ``handed_on``: variables of the
    script.
    """

    def __init__(
        self,
        secret: str,
        host: str,
        port: int,
        files: Mapping[str, bytes | Callable[[], bytes]],
        code: bytes,
        handed_on: Mapping[str, str],
    ) -> None:
        self._vms: dict[str, _Vm] = {}
        self._digest, self._handed_on = hashlib.sha256(code).hexdigest(), dict(handed_on)
        self._unfit: str | None = None
        self.noticed: Callable[[str, float], object] = lambda _vm, _lead_s: None
        super().__init__(secret, host, port, {**files, "code": code})

    def start(self, vms: Sequence[str], command: Sequence[str], storage: str) -> None:
        """See ``Machines``: each VM begins once it has booted and the first one of the group is known."""
        with self._lock:
            first = self._vms.setdefault(vms[0], _Vm())
            for rank, vm in enumerate(vms):
                start = {"command": list(command), "storage": storage, "code": self._digest, "first": vms[0]}
                known = self._vms.setdefault(vm, _Vm())
                known.start = {**start, "rank": rank, "size": len(vms)}
                known.since_s = time.monotonic()
            first.save = 0

    def save(self, vm: str, number: int) -> None:
        with self._lock:
            self._vms[vm].save = number

    def said(self, vm: str) -> bytes:
        with self._lock:
            if self._unfit is not None:
                raise Misconfigured(self._unfit)
            known = self._vms[vm]
            data, known.said = known.said, b""
            return data

    def ended(self, vm: str) -> int | None:
        with self._lock:
            return self._vms[vm].code

    def is_lost(self, vm: str) -> bool:
        with self._lock:
            known, now_s = self._vms[vm], time.monotonic()
            return now_s - known.since_s > BOOT_S if known.heard_s is None else now_s - known.heard_s > SILENT_S

    def end(self, vms: Sequence[str]) -> None:
        with self._lock:
            for vm in vms:
                self._vms[vm].start = None

    def _take(self, caller: CallingNode, message: dict[str, Any]) -> dict[str, Any]:
        node, _, is_script = caller.node.partition(SUFFIX[0])
        if is_script:
            with self._lock:
                return self._of_script(self._vms.setdefault(node, _Vm()), caller.address, message)
        match message.pop("kind"):
            case "given":
                given = Given.model_validate(message)
                if given.certain:
                    self.noticed(node, given.lead_s or 0.0)
            case "unfit":
                self._unfit = printable(f"{node} cannot be used: {message['why']}")
            case "trouble":
                log.info("%s: %s", node, printable(str(message.get("sentence") or "notices are told again")))
        return {}

    def _of_script(self, vm: _Vm, address: str, line: dict[str, Any]) -> dict[str, Any]:
        vm.heard_s, vm.address = time.monotonic(), address
        if line["life"] != vm.life:
            vm.life, vm.kept = str(line["life"]), [0, 0]
        for place, name in enumerate(("said", "output")):
            begin, text = line[name]
            data = base64.b64decode(text)[vm.kept[place] - begin :] if begin <= vm.kept[place] else b""
            vm.kept[place] += len(data)
            if name == "said":
                vm.said += data
            else:
                sys.stdout.buffer.write(_harmless(data) if sys.stdout.isatty() else data)
                sys.stdout.flush()
        vm.code = line["code"]
        start = vm.start
        if start is not None:
            first = self._vms.get(start["first"])
            if first is None or first.heard_s is None:
                start = None
            else:
                own = self._handed_on | variables(start["rank"], start["size"], first.address)
                start = {name: start[name] for name in ("command", "storage", "code")} | {"environment": own}
        return {"kept": vm.kept, "save": vm.save, "start": start}

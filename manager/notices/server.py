"""The server that nodes call: the manager's end of ``manager.notices.call``, and the files for booting VMs."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from manager.notices.call import AGENT, ROLES
from morph.contract.vm_names import MAX_DEVICES, is_name
from morph.link.authority import credential_of
from morph.link.listener import HELLO_TIMEOUT_S, Caller, Listener
from morph.link.session import Session
from morph.link.wire import Wire

SILENT_S = 30.0
SEND_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CallingNode:
    """The caller, as it names itself, with the nodes' credential; ``address``: the address from which it calls."""

    node: str
    num_devices: int
    address: str


class VmServer(ABC):
    """Listens for nodes, which show a certificate. Subclasses handle their messages.

    The nodes' credential is derived from ``secret``; callers without it are refused. ``port``: 0: any free one.
    ``files``: the files that nodes may request, by name; a function that makes one is called in the node's thread.
    """

    def __init__(self, secret: str, host: str, port: int, files: Mapping[str, bytes | Callable[[], bytes]]) -> None:
        self._credential, self._files = credential_of(secret), files
        self._agents: dict[str, Session] = {}
        self._lock = threading.Lock()
        self._listener = Listener.at(host, port, self._serve, "morph-notices")
        self.host, self.port = self._listener.address

    def close(self) -> None:
        """Stop listening, and disconnect all nodes."""
        self._listener.close()

    @abstractmethod
    def _take(self, caller: CallingNode, message: dict[str, Any]) -> dict[str, Any]:
        """Handle one message; return the answer's content besides ``heard``. A ValueError ends the session."""

    def _serve(self, caller: Caller) -> None:
        """Serve one node, until it is gone or silent; an agent connects again if it can."""
        session = Session(caller.connection, Wire(self._credential, listens=True))
        name, num_devices, role = session.welcome(3, HELLO_TIMEOUT_S)
        if not is_name(name.partition("/")[0]):  # the name is journalled, and shown to a user
            raise ConnectionError("no node has such a name")
        if role not in ROLES or not 1 <= int(num_devices) <= MAX_DEVICES:
            raise ConnectionError("the caller breaks the protocol")
        node = CallingNode(name, int(num_devices), caller.source)
        caller.known()
        session.let_in()
        if role == AGENT:
            with self._lock:
                before, self._agents[name] = self._agents.get(name), session
            if before is not None:
                before.close()
        try:
            while True:
                message = session.hear(SILENT_S)
                answer = self._files.get(str(message.get("kind")))
                if callable(answer):
                    answer = answer()
                if answer is None:
                    answer = json.dumps({"heard": True, **self._take(node, message)}).encode()
                session.send(answer, SEND_TIMEOUT_S)
        finally:
            with self._lock:
                if self._agents.get(name) is session:
                    del self._agents[name]

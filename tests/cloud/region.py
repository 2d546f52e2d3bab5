"""The fake resource manager over time: VMs boot, are billed, get notices and are taken, with all their resources.

One thread lets time pass: it ends operations, starts and kills the hosts, and removes evicted VMs.
"""

from __future__ import annotations

import base64
import gzip
import math
import secrets
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal, Protocol

from tests.providers.fake_arm import Answer, FakeArm, error
from tests.waiting import BOUND_S

EVERY_S = 0.05
NEVER = 10**9
Role = Literal["manager", "node"]


class Machines(Protocol):
    """Plays the VMs; called from one thread."""

    def boot(self, name: str, resource_id: str, cloud_config: str) -> None:
        """Start a VM."""

    def kill(self, name: str) -> None:
        """End a VM at once."""


@dataclass
class Life:
    """One VM's interval on the bill, in seconds since 1970, as in a journal."""

    name: str
    size: str
    zone: str
    since_s: float
    until_s: float | None = None
    end: str = ""

    def lived_s(self, now_s: float) -> float:
        return (now_s if self.until_s is None else self.until_s) - self.since_s


@dataclass
class Eviction:
    """A Preempt event; after a ``false_alarm`` the VM is not taken."""

    event: str
    name: str
    due_s: float
    not_before: str
    started: bool = False
    false_alarm: bool = False


@dataclass(eq=False)
class Region(FakeArm):
    """The region; see the module.

    ``make_s`` and ``delete_s``: how long Azure takes. ``usd_per_h``: by size. ``interfaces`` and ``disks``: the VM with
    which each is deleted, "" for none.
    """

    address: tuple[str, int]
    usd_per_h: dict[str, float]
    play: Machines | None = None
    url_of_clients: str = ""
    make_s: float = 0.5
    delete_s: float = 0.3
    notice_s: float = 30.0
    tokens: dict[str, Role] = field(default_factory=dict)
    bill: list[Life] = field(default_factory=list)
    interfaces: dict[str, str] = field(default_factory=dict)
    disks: dict[str, str] = field(default_factory=dict)
    evictions: list[Eviction] = field(default_factory=list)
    num_approved: int = 0
    incarnation: int = 1

    def __post_init__(self) -> None:
        super().__init__(self.address)
        self.url = self.url_of_clients or self.url
        self.num_polls = NEVER  # operations end as time passes, not when somebody asks
        self._cloud_configs: dict[str, str] = {}
        self._running: dict[str, object] = {}
        self._lives: dict[str, Life] = {}
        self._due_s: dict[str, float] = {}
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.troubles: list[str] = []

    def open(self, context: ssl.SSLContext | None = None) -> None:
        """Start to serve, and let time pass."""
        if context is not None:
            self.http.socket = context.wrap_socket(self.http.socket, server_side=True, do_handshake_on_connect=False)
        serve = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._threads = [serve, threading.Thread(target=self._pass_time, name="region", daemon=True)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over.set()
        self.http.shutdown()
        for thread in self._threads:
            thread.join(BOUND_S)
        self.http.server_close()

    def new_token(self, role: Role) -> str:
        """Return a token like those of the metadata service."""
        token = secrets.token_urlsafe(24)
        self.tokens[token] = role
        return token

    def dollars(self) -> float:
        with self.lock:
            return sum(self.usd_per_h[life.size] * life.lived_s(time.time()) for life in self.bill) / 3600

    def node_seconds(self) -> float:
        with self.lock:
            return sum(life.lived_s(time.time()) for life in self.bill)

    def left(self) -> dict[str, list[str]]:
        with self.lock:
            kinds = {"VMs": self.machines, "scale sets": self.sets, "NICs": self.interfaces, "disks": self.disks}
            return {kind: sorted(store) for kind, store in kinds.items()}

    def living(self) -> list[str]:
        """Return allocated VMs without a pending eviction, the oldest first."""
        with self.lock:
            warned = {eviction.name for eviction in self.evictions}
            return [name for name in self._running if name not in warned]

    def take(self, name: str, notice_s: float | None, *, false_alarm: bool = False) -> bool:
        """Evict a VM, at once or after a notice, withdrawn if a ``false_alarm``; return whether the VM exists."""
        with self.lock:
            if name not in self._running:
                return False
            if notice_s is None:
                self._remove(name, "evicted")
                return True
            # a date has whole seconds, and the VM must not be taken earlier than it says
            at_s = math.ceil(time.time() + notice_s)
            due_s = time.monotonic() + at_s - time.time()
            event = secrets.token_hex(8).upper()
            date = formatdate(at_s, usegmt=True)
            self.evictions.append(Eviction(event, name, due_s, date, false_alarm=false_alarm))
            self.incarnation += 1
            return True

    def events(self) -> dict[str, Any]:
        """Return the Scheduled Events, as every VM of the scale set sees them."""
        with self.lock:
            told = [
                {
                    "EventId": eviction.event,
                    "EventType": "Preempt",
                    "ResourceType": "VirtualMachine",
                    "Resources": [eviction.name],
                    "EventStatus": "Started" if eviction.started else "Scheduled",
                    "NotBefore": "" if eviction.started else eviction.not_before,
                    "Description": "",
                    "EventSource": "Platform",
                    "DurationInSeconds": -1,
                }
                for eviction in self.evictions
            ]
            return {"DocumentIncarnation": self.incarnation, "Events": told}

    def start(self, event: str) -> bool:
        """Carry out StartRequests: the VM may be taken before its time."""
        with self.lock:
            for eviction in self.evictions:
                if eviction.event == event:
                    if not eviction.started:
                        eviction.started, eviction.due_s = True, time.monotonic()
                        self.num_approved += 1
                        self.incarnation += 1
                    return True
        return False

    def answer(self, handler: BaseHTTPRequestHandler, text: bytes) -> Answer:
        role = self.tokens.get(handler.headers.get("Authorization", "").removeprefix("Bearer "))
        if role is None:
            return error(401, "InvalidAuthenticationToken", "no such token")
        if role == "node" and (handler.command != "DELETE" or "/virtualMachines/" not in handler.path):
            return error(403, "AuthorizationFailed", "the nodes' identity may delete VMs")
        return super().answer(handler, text)

    def put_machine(self, path: str, name: str, body: dict[str, Any]) -> Answer:
        answer = super().put_machine(path, name, body)
        if answer[0] == 201:
            properties = body["properties"]
            self._cloud_configs[name] = gzip.decompress(
                base64.b64decode(properties["osProfile"]["customData"])
            ).decode()
            (interface,) = properties["networkProfile"]["networkInterfaceConfigurations"]
            disk = properties["storageProfile"]["osDisk"]
            self.interfaces[interface["name"]] = name if interface["properties"]["deleteOption"] == "Delete" else ""
            self.disks[f"{name}-disk"] = name if disk["deleteOption"] == "Delete" else ""
        return answer

    def put_by_hand(self, machine: dict[str, Any], cloud_config: str) -> None:
        with self.lock:
            self._cloud_configs[machine["name"]] = cloud_config
            self.machines[machine["name"]] = machine

    def evict(self, name: str) -> Answer:
        """Carry out ``simulateEviction``: a notice, followed by the eviction."""
        if name not in self.machines:
            return error(404, "ResourceNotFound", f"{name} is not there")
        self.take(name, self.notice_s)
        return 204, None, {}

    def begin(
        self, finish: Callable[[], dict[str, str] | None], stuck: Callable[[], bool] = lambda: False
    ) -> dict[str, str]:
        headers = {**super().begin(finish, stuck), "Retry-After": "1"}
        number = f"op{len(self.operations)}"
        deletes = getattr(finish, "__qualname__", "").startswith("FakeArm.delete")
        self._due_s[number] = time.monotonic() + (self.delete_s if deletes else self.make_s)
        return headers

    def poll(self, number: str) -> Answer:
        status, body, headers = super().poll(number)
        return status, body, {**headers, "Retry-After": "1"}

    def _remove(self, name: str, how: str) -> None:
        self.machines.pop(name, None)
        if name in self._lives and not self._lives[name].end:
            self._lives[name].end = how

    def _pass_time(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self._tick()
            except Exception as trouble:  # a failing fake must report its error instead of blocking the test
                self.troubles.append(f"{type(trouble).__name__}: {trouble}")
        for name in list(self._running):
            with self.lock:
                self._settle_bill(name)
            self._kill(name)

    def _tick(self) -> None:
        now_s = time.monotonic()
        with self.lock:
            for number, operation in self.operations.items():
                if not operation.done and now_s >= self._due_s[number]:
                    operation.polls_left = 0
                    self.settle(operation)
            for eviction in [eviction for eviction in self.evictions if now_s >= eviction.due_s]:
                self.evictions.remove(eviction)
                self.incarnation += 1
                if not eviction.false_alarm:
                    self._remove(eviction.name, "evicted" + (", acknowledged" if eviction.started else ""))
            # resources that are deleted with their VM go too, even if it failed
            for store in (self.interfaces, self.disks):
                for part in [part for part, owner in store.items() if owner and owner not in self.machines]:
                    del store[part]
            there = {
                name: machine
                for name, machine in self.machines.items()
                if machine["properties"]["provisioningState"] in ("Succeeded", "Deleting")
            }
            gone = [name for name, machine in self._running.items() if there.get(name) is not machine]
            new = [name for name in there if name not in self._running]
            for name in gone:  # the bill begins and ends when Azure says so
                self._settle_bill(name)
            for name in new:
                self._open_bill(name, there[name])
        for name in gone:
            self._kill(name)
        for name in new:
            self._boot(name, there[name])

    def _open_bill(self, name: str, machine: dict[str, Any]) -> None:
        size, zone = machine["properties"]["hardwareProfile"]["vmSize"], machine.get("zones", ["-"])[0]
        self._running[name] = machine
        created = datetime.fromisoformat(machine["properties"]["timeCreated"])
        self._lives[name] = Life(name, size, zone, created.timestamp())  # from its creation on, once it is allocated
        self.bill.append(self._lives[name])

    def _settle_bill(self, name: str) -> None:
        self._running.pop(name, None)
        life = self._lives.pop(name)
        life.until_s, life.end = time.time(), life.end or "deleted"
        self.evictions = [eviction for eviction in self.evictions if eviction.name != name]

    def _boot(self, name: str, machine: dict[str, Any]) -> None:
        if self.play is not None:
            self.play.boot(name, machine["id"], self._cloud_configs[name])

    def _kill(self, name: str) -> None:
        if self.play is not None:
            self.play.kill(name)

"""Azure's resource manager on loopback, as far as VMs in a flexible scale set need it: real HTTP, checked requests.

Answers have the documented shapes: long-running operations by Azure-AsyncOperation, pages with absolute links, error
bodies with code and message. A request without a field that Azure requires is answered with 400 and kept in ``wrong``.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.http_service import Server, answer, body_of, serving

PAGE = 2
ROOT = re.compile(
    r"^/subscriptions/(?P<sub>[^/]+)/resourceGroups/(?P<group>[^/]+)/providers/Microsoft\.Compute/"
    r"(?P<kind>virtualMachines|virtualMachineScaleSets)(/(?P<name>[^/]+)(/(?P<verb>\w+))?)?$"
)
PARTS = re.compile(
    r"^/subscriptions/[^/]+/resourceGroups/(?P<group>[^/]+)/providers/"
    r"(?P<kind>Microsoft\.Network/networkInterfaces|Microsoft\.Compute/disks)(/(?P<name>[^/]+))?$"
)
INTERFACES, DISKS = "Microsoft.Network/networkInterfaces", "Microsoft.Compute/disks"
Answer = tuple[int, Any, dict[str, str]]


@dataclass
class Fault:
    """A fault of the next matching requests.

    ``carried_out``: the request is carried out, but its answer is lost. ``text``: the whole body of the answer.
    ``times``: the number of requests.
    """

    method: str
    kind: str
    status: int = 0
    code: str = "InternalServerError"
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    carried_out: bool = False
    slow_s: float = 0.0
    text: str | None = None
    times: int = 1
    message: str = "injected"


@dataclass
class Operation:
    polls_left: int
    finish: Callable[[], dict[str, str] | None]
    error: dict[str, str] | None = None
    done: bool = False
    stuck: Callable[[], bool] = lambda: False


class FakeArm:
    """State of one resource group.

    ``group``: its name; "" accepts any. ``shortages``: error codes by (size, zone), reported when the operation ends.
    ``locked``: names of locked resources. ``stuck``: VMs whose creation never ends. ``made_as``: states of new VMs.
    ``evicted``: VMs that are taken as soon as they are made. ``parts``: interfaces and disks by kind and name, each
    with the VM that it belongs to. ``staying``: names of parts that stay when their VM goes. ``expired``: tokens that
    are refused. ``throttled``: whether the call with a number is throttled. ``told``: further resources, by the ends of
    their paths.
    """

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.machines: dict[str, dict[str, Any]] = {}
        self.sets: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, Operation] = {}
        self.shortages: dict[tuple[str, str | None], str] = {}
        self.at_once: dict[str, tuple[int, str, str]] = {}  # by size: refused before an operation begins
        self.group = ""
        self.locked: set[str] = set()
        self.stuck: set[str] = set()
        self.evicted: set[str] = set()
        self.parts: dict[tuple[str, str], dict[str, Any]] = {}
        self.staying: set[str] = set()
        self.boot_logs: dict[str, str] = {}
        self.throttled: Callable[[int], bool] = lambda _number: False
        self.expired: set[str] = set()
        self.made_as: dict[str, str] = {}
        self.told: dict[str, Any] = {}
        self.faults: list[Fault] = []
        self.calls: list[str] = []
        self.urls: list[str] = []
        self.wrong: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.num_polls = 1
        self.ahead_s = 0.0  # by this machine's clock
        self.lock = threading.RLock()
        self.http = Server(self.serve, address, lambda: formatdate(time.time() + self.ahead_s, usegmt=True))
        self.url = f"http://{address[0]}:{self.http.server_port}"

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        text = body_of(handler)
        path = urlsplit(handler.path).path
        with self.lock:
            self.urls.append(handler.path)
            self.calls.append(f"{handler.command} {path.rsplit('Microsoft.Compute/', 1)[-1]}")
            fault = self._fault(handler.command, path)
            if self.throttled(len(self.calls)):
                status, body, headers = error(429, "TooManyRequests", "slowly")
            elif fault is None or fault.carried_out:
                status, body, headers = self.answer(handler, text)
            if fault is not None and fault.status:
                status, body, headers = *error(fault.status, fault.code, fault.message)[:2], fault.headers
        if fault is not None and fault.slow_s:
            time.sleep(fault.slow_s)
        if fault is not None and fault.drop:
            handler.close_connection = True
            return
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        if fault is not None and fault.text is not None:
            data = fault.text.encode()
        answer(handler, status, data, {"Content-Type": "application/json", **headers})

    def _fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.method == method and fault.kind in path:
                fault.times -= 1
                if not fault.times:
                    self.faults.remove(fault)
                return fault
        return None

    def answer(self, handler: BaseHTTPRequestHandler, text: bytes) -> Answer:
        path, query = urlsplit(handler.path).path, parse_qs(urlsplit(handler.path).query)
        if path.startswith("/logs/"):
            return 200, self.boot_logs[path[6:]].encode(), {}
        if not handler.headers.get("Authorization", "").startswith("Bearer "):
            return error(401, "AuthenticationFailed", "no token")
        if handler.headers["Authorization"].removeprefix("Bearer ") in self.expired:
            return error(401, "ExpiredAuthenticationToken", "The access token has expired.")
        if path.startswith("/operations/"):
            return self.poll(path.rsplit("/", 1)[1])
        if part := PARTS.match(path):
            return self.part(path, part["kind"], part["name"], handler.command, text, bool(query.get("api-version")))
        if (told := next((self.told[end] for end in self.told if path.endswith(end)), None)) is not None:
            return (200, told, {}) if query.get("api-version") else self.refuse(f"no api-version: {path}")
        found = ROOT.match(path)
        if found is None:
            return self.refuse(f"no such path: {path}", 404, "InvalidResourceType")
        if not query.get("api-version"):
            return self.refuse("no api-version", 400, "MissingApiVersionParameter")
        if self.group and found["group"] != self.group:
            return error(404, "ResourceGroupNotFound", f"Resource group '{found['group']}' could not be found.")
        store = self.machines if found["kind"] == "virtualMachines" else self.sets
        name, verb, method = found["name"], found["verb"], handler.command
        if name is None:
            return self.page(path, query)
        if verb == "retrieveBootDiagnosticsData" and method == "POST":
            if name not in self.machines or name not in self.boot_logs:
                return error(404, "ResourceNotFound", f"{name} is not there, or said nothing")
            where = f"{self.url}/logs/{name}?sig=s3cret" if self.boot_logs[name] else None
            return 200, {"serialConsoleLogBlobUri": where}, {}
        if verb == "simulateEviction" and method == "POST":
            return self.evict(name)
        if method == "GET":
            known = store.get(name)
            return (200, known, {}) if known else error(404, "ResourceNotFound", f"{name} is not there")
        if method == "DELETE":
            return self.delete(store, name)
        if method == "PUT":
            body = json.loads(text)
            self.bodies.append(body)
            put = self.put_machine if store is self.machines else self.put_set
            return put(path, name, body)
        return self.refuse(f"{method} {path}", 405, "MethodNotAllowed")

    def refuse(self, why: str, status: int = 400, code: str = "InvalidParameter") -> Answer:
        self.wrong.append(why)
        return error(status, code, why)

    def part(self, path: str, kind: str, name: str | None, method: str, text: bytes, versioned: bool) -> Answer:
        for key, body in list(self.parts.items()):
            if body["vm"] and body["vm"] not in self.machines:
                body["vm"] = ""
                if key[1] not in self.staying:
                    del self.parts[key]
        if not versioned:
            return self.refuse("no api-version", 400, "MissingApiVersionParameter")
        if name is None and method == "GET":
            return 200, {"value": [self._part(path, *key) for key in self.parts if key[0] == kind]}, {}
        if (kind, str(name)) not in self.parts:
            return error(404, "ResourceNotFound", f"{name} is not there")
        if method == "PATCH":
            self.parts[kind, str(name)]["tags"] = json.loads(text)["tags"]
            return 200, None, {}
        if method == "DELETE":
            if self.parts[kind, str(name)]["vm"]:
                return error(409, "OperationNotAllowed", f"{name} is attached")
            del self.parts[kind, str(name)]
            return 202, None, {}
        return self.refuse(f"{method} {path}", 405, "MethodNotAllowed")

    def _part(self, path: str, kind: str, name: str) -> dict[str, Any]:
        body = self.parts[kind, name]
        vm = path.partition("/providers/")[0] + f"/providers/Microsoft.Compute/virtualMachines/{body['vm']}"
        told: dict[str, Any] = {"id": f"{path}/{name}", "name": name, "tags": body["tags"], "properties": {}}
        if kind == DISKS:
            of_system = {"osType": "Linux"} if "_OsDisk_" in name else {}
            told |= {"sku": {"name": "Premium_LRS"}, "properties": {"diskSizeGB": 128, **of_system}}
            return told | ({"managedBy": vm} if body["vm"] else {})
        return told | ({"properties": {"virtualMachine": {"id": vm}}} if body["vm"] else {})

    def page(self, path: str, query: dict[str, list[str]]) -> Answer:
        for operation in list(self.operations.values()):  # time passes with every request
            operation.polls_left -= 1
            if operation.polls_left < 0 and not operation.stuck():
                self.settle(operation)
        begin = int(query.get("$skiptoken", ["0"])[0])
        names = sorted(self.machines)
        answer: dict[str, Any] = {"value": [self.machines[name] for name in names[begin : begin + PAGE]]}
        if begin + PAGE < len(names):
            answer["nextLink"] = f"{self.url}{path}?api-version={query['api-version'][0]}&$skiptoken={begin + PAGE}"
        return 200, answer, {}

    def put_set(self, path: str, name: str, body: dict[str, Any]) -> Answer:
        wanted = {"orchestrationMode": "Flexible", "platformFaultDomainCount": 1}
        properties = body.get("properties", {})
        if not body.get("location") or any(properties.get(key) != value for key, value in wanted.items()):
            return self.refuse(f"scale set: {body}")
        new = name not in self.sets
        self.sets[name] = {**body, "id": path, "name": name}
        self.sets[name]["properties"] = {**properties, "provisioningState": "Succeeded"}
        return (201 if new else 200), self.sets[name], self.begin(lambda: None) if new else {}

    def put_machine(self, path: str, name: str, body: dict[str, Any]) -> Answer:
        missing = lacking(body, self.sets)
        if missing:
            return self.refuse(f"VM {name}: {missing}")
        size, zone = body["properties"]["hardwareProfile"]["vmSize"], body.get("zones", [None])[0]
        known = self.machines.get(name)
        if known is not None:
            if known["properties"]["provisioningState"] in ("Creating", "Deleting"):
                return error(409, "Conflict", "another operation is under way")
            if known["properties"]["hardwareProfile"]["vmSize"] != size or known.get("zones", [None])[0] != zone:
                return error(409, "PropertyChangeNotAllowed", "zones and sizes do not change")
        if size in self.at_once:
            return error(*self.at_once[size])
        machine = {**body, "id": path, "name": name, "type": "Microsoft.Compute/virtualMachines"}
        created = datetime.fromtimestamp(time.time() + self.ahead_s, UTC).strftime(
            "%Y-%m-%dT%H:%M:%S.%f0+00:00"
        )  # Azure sends seven decimals
        machine["properties"] = {**body["properties"], "provisioningState": "Creating", "timeCreated": created}
        machine["properties"]["osProfile"] = {**body["properties"]["osProfile"]}
        machine["properties"]["osProfile"].pop("customData")  # never reported again
        (interface,) = body["properties"]["networkProfile"]["networkInterfaceConfigurations"]
        self.parts[INTERFACES, interface["name"]] = {"vm": name, "tags": interface.get("tags", {})}
        self.parts[DISKS, f"{name}_OsDisk_1_5f2c"] = {"vm": name, "tags": {}}  # its VM may or may not exist
        self.machines[name] = machine

        def finish() -> dict[str, str] | None:
            code = self.shortages.get((size, zone))
            machine["properties"]["provisioningState"] = "Failed" if code else self.made_as.get(name, "Succeeded")
            if name in self.evicted:
                self.machines.pop(name, None)
            return {"code": code, "message": f"no {size} in {zone}"} if code else None

        return 201, machine, self.begin(finish, lambda: name in self.stuck and self.machines.get(name) is machine)

    def delete(self, store: dict[str, Any], name: str) -> Answer:
        if name not in store:
            return 204, None, {}
        if name in self.locked:
            why = f"The scope '{name}' cannot perform delete operation because following scope(s) are locked: '{name}'."
            return error(409, "ScopeLocked", why)
        store[name]["properties"]["provisioningState"] = "Deleting"
        if store is self.sets:
            inside = [
                vm
                for vm, body in self.machines.items()
                if name == body["properties"].get("virtualMachineScaleSet", {}).get("id", "").rsplit("/", 1)[-1]
            ]
        else:
            inside = []

        def finish() -> None:
            for vm in inside:
                self.machines.pop(vm, None)
            store.pop(name, None)

        return 202, None, self.begin(finish)

    def evict(self, name: str) -> Answer:
        machine = self.machines.get(name)
        if machine is None:
            return error(404, "ResourceNotFound", f"{name} is not there")
        if machine["properties"].get("priority") != "Spot":
            return self.refuse(f"{name} is no spot VM", 409, "OperationNotAllowed")
        del self.machines[name]
        return 204, None, {}

    def begin(
        self, finish: Callable[[], dict[str, str] | None], stuck: Callable[[], bool] = lambda: False
    ) -> dict[str, str]:
        number = f"op{len(self.operations) + 1}"
        self.operations[number] = Operation(self.num_polls, finish, stuck=stuck)
        url = f"{self.url}/operations/{number}?api-version=2024-01-01"
        return {"Azure-AsyncOperation": url, "Retry-After": "0"}

    def poll(self, number: str) -> Answer:
        operation = self.operations[number]
        if operation.polls_left > 0 or operation.stuck():
            operation.polls_left -= 1
            return 200, {"status": "InProgress"}, {"Retry-After": "0"}
        self.settle(operation)
        if operation.error is not None:
            return 200, {"status": "Failed", "error": operation.error}, {}
        return 200, {"status": "Succeeded"}, {}

    def settle(self, operation: Operation) -> None:
        if not operation.done:
            operation.done = True
            operation.error = operation.finish()

    def settle_all(self) -> None:
        """Let time pass without requests until all operations under way have ended."""
        with self.lock:
            for operation in list(self.operations.values()):
                self.settle(operation)

    def put_by_others(self, name: str, run: str = "", scale_set: str = "", **properties: Any) -> None:
        """Add a VM that this run did not make; ``scale_set``: the set that contains it."""
        kinds = f"/subscriptions/x/resourceGroups/{self.group or 'train'}/providers/Microsoft.Compute"
        tags = {"morph-run": run, "morph-job": "tiny"} if run else {"owner": "somebody"}
        inside = {"virtualMachineScaleSet": {"id": f"{kinds}/virtualMachineScaleSets/{scale_set}"}} if scale_set else {}
        made = {"provisioningState": "Succeeded", "hardwareProfile": {"vmSize": "Standard_D4s_v5"}}
        vm = {"id": f"{kinds}/virtualMachines/{name}", "name": name, "location": "westus2", "tags": tags}
        with self.lock:
            self.machines[name] = {**vm, "properties": {**made, **inside, **properties}}
            if scale_set and scale_set not in self.sets:
                self.sets[scale_set] = {
                    "id": f"{kinds}/virtualMachineScaleSets/{scale_set}",
                    "name": scale_set,
                    "location": "westus2",
                    "tags": {"owner": "somebody"},
                    "properties": {"orchestrationMode": "Flexible", "provisioningState": "Succeeded"},
                }


def error(status: int, code: str, message: str) -> Answer:
    return status, {"error": {"code": code, "message": message}}, {}


def lacking(body: dict[str, Any], sets: dict[str, Any]) -> str:
    """Return the required field of a spot VM that is missing or wrong, or ""."""
    properties = body.get("properties", {})

    def at(*keys: Any) -> Any:
        value: Any = properties
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    interface = ("networkProfile", "networkInterfaceConfigurations", 0)
    scale_set = sets.get(str(at("virtualMachineScaleSet", "id")).rsplit("/", 1)[-1])
    checks = {
        "location": bool(body.get("location")),
        "vmSize": bool(at("hardwareProfile", "vmSize")),
        "priority": at("priority") == "Spot",
        "evictionPolicy": at("evictionPolicy") == "Delete",
        "maxPrice": isinstance(at("billingProfile", "maxPrice"), int | float),
        "virtualMachineScaleSet": scale_set is not None,
        "zones": scale_set is not None and set(body.get("zones", [])) <= set(scale_set.get("zones", [])),
        "imageReference": bool(at("storageProfile", "imageReference")),
        "osDisk": at("storageProfile", "osDisk", "createOption") == "FromImage",
        "osDisk.deleteOption": at("storageProfile", "osDisk", "deleteOption") == "Delete",
        "networkApiVersion": bool(at("networkProfile", "networkApiVersion")),
        "nic.name": bool(at(*interface, "name")),
        "nic.deleteOption": at(*interface, "properties", "deleteOption") == "Delete",
        "subnet": bool(at(*interface, "properties", "ipConfigurations", 0, "properties", "subnet", "id")),
        "computerName": bool(at("osProfile", "computerName")),
        "adminUsername": bool(at("osProfile", "adminUsername")),
        "bootDiagnostics": at("diagnosticsProfile", "bootDiagnostics", "enabled") is True,
        "ssh": bool(at("osProfile", "linuxConfiguration", "ssh", "publicKeys", 0, "keyData")),
        "customData": gzip.decompress(base64.b64decode(at("osProfile", "customData"))).startswith(b"#cloud-config\n"),
        "tags": {"morph-run", "morph-job", "morph-request"} <= set(body.get("tags", {})),
    }
    return ", ".join(name for name, holds in checks.items() if not holds)


@contextmanager
def served() -> Iterator[FakeArm]:
    arm = FakeArm()
    with serving(arm.http):
        yield arm

"""What a run on the virtual Azure exposes: its sockets, and every place in which a secret can be found."""

from __future__ import annotations

import base64
import gzip
import json
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from manager.host.ports import Ports
from tests.cloud.hosts import Host
from tests.cloud.life import Life
from tests.cloud.virtual_azure import VirtualAzure
from tests.system.exposure import Listening, Shown, files_below, files_with, holds, recorded, shown_by, with_secrets

Socket = tuple[str, str, str]
FROM_VERSION = 3
LOGIN = "AZURE_CLIENT_SECRET"
"""Not sufficient for a login, so that the SDK tries the managed identity next."""
SEARCHED = ("etc/morph", "run", "tmp", "log")
NODE_FILES = {"etc/morph/ray-token", "run/morph/node-secret"}
RUN_FILES = {"attach.json", "page.json"}
OF_MANAGER: set[Socket] = {
    ("gcs_server", "all", "head"),
    ("raylet", "all", "node_manager_port"),
    ("raylet", "all", "object_manager_port"),
    ("ray::RuntimeEnvAgent", "own", "runtime_env_agent_port"),
    ("python", "own", "store"),
    ("python", "all", "workers"),
    ("python", "own", "notices"),
    ("python", "own", "orders"),
    ("python", "loopback", "any"),
}
"""Listeners on the manager's VM, with addresses and ports as in docs/guides/azure.md. The last one is the page."""
OF_VM: set[Socket] = {
    ("raylet", "all", "node_manager_port"),
    ("raylet", "all", "object_manager_port"),
    ("ray::RuntimeEnvAgent", "own", "runtime_env_agent_port"),
    ("ray::WorkerActor", "all", "workers"),
    ("ray::WorkerActor", "own", "any"),
}
"""Listeners on a VM; the last one receives tensors."""
FORMED = re.compile(r"is formed at version \d+: \S+ on (\d+) of")
WAITING = ("ray::IDLE", "all", "workers")
"""An idle process of Ray, which may or may not exist."""


class Watch:
    """Inspects the run once all VMs train, and each VM before its end; call ``check`` when the run is over."""

    def __init__(self, azure: VirtualAzure, life: Life, first_port: int) -> None:
        self._azure, self._life, self._ports = azure, life, Ports(first_port)
        self.shown: dict[str, Shown] = {}
        self.modes: dict[str, int] = {}
        self.found: dict[str, set[str]] = {}
        self._credentials: set[str] = set()
        self._num_training = 0
        self._login = life.environment[LOGIN]
        life.on_line, azure.before_removal = self._on_line, self._before_removal

    @property
    def secrets(self) -> list[str]:
        """Return all secrets: the manager's own, those of nodes, the cloud's tokens, and the manager's login."""
        assert self._life.secrets_path is not None
        return [*recorded(self._life.secrets_path), *self._credentials, *self._azure.region.tokens, self._login]

    def check(self) -> None:
        """Check that sockets listen and secrets are kept only as safety.md and azure.md in docs say."""
        assert len(self.shown) == 1 + self._life.keep, "it was not looked in time"
        known = self.secrets
        for name, shown in self.shown.items():
            sockets = {self._kind(found) for found in shown.listening} - {WAITING}
            wrong = sockets ^ (OF_MANAGER if name == "manager" else OF_VM)
            assert not wrong, (name, wrong)
            held = with_secrets(shown, known)
            expected = [["python", LOGIN]] if name == "manager" else []
            assert [place.split()[1:] for place in held] == expected, (name, held)
        assert {stat.S_IMODE(mode) for mode in self.modes.values()} == {0o600}, self.modes
        assert {Path(name).name for name in self.found.pop("manager")} == {"token", "node-secret"}
        assert self.found.pop("the run") == RUN_FILES
        assert len(self.found) >= self._life.keep
        assert self.found == dict.fromkeys(self.found, NODE_FILES)
        assert files_with(self._files(self._life.run_dir, ("",)), known) == set()
        told = {"the run": "\n".join(self._life.output), **self._azure.logs}
        assert files_with({name: text.encode() for name, text in told.items()}, known) == set()
        self._check_requests(known)

    def _check_requests(self, known: Iterable[str]) -> None:
        """Check that, of all data sent to Azure, only custom data contains secrets: the two of a node."""
        urls, configs = "\n".join(self._azure.region.urls), []
        for body in self._azure.region.bodies:
            profile: dict[str, Any] = body["properties"].get("osProfile", {})
            shown = {**body, "properties": {**body["properties"], "osProfile": {**profile, "customData": ""}}}
            assert files_with({"body": json.dumps(shown).encode(), "url": urls.encode()}, known) == set()
            if profile:
                configs.append(gzip.decompress(base64.b64decode(profile["customData"])))
        assert len(configs) >= self._life.keep
        for config in configs:
            assert len({secret for secret in known if holds(config, secret)}) == len(NODE_FILES)

    def _on_line(self, line: dict[str, Any]) -> None:
        living = self._azure.region.living()
        self._num_training = int((FORMED.findall(line["sentence"]) or [self._num_training])[-1])
        if self.shown or line["phase"] != "training" or line["version"] < FROM_VERSION:
            return
        if not self._num_training == len(living) == self._life.keep:  # a worker that waits to join receives no tensors
            return
        for name, host in self._azure.hosts.living.items():
            self.shown[name] = shown_by(host.processes())
            self._search(name, host.directory, SEARCHED)
        self._search("the run", self._life.run_dir, ("",))

    def _before_removal(self, host: Host) -> None:
        self._search(f"{host.name} in the end", host.directory, SEARCHED)

    def _search(self, name: str, directory: Path, below: Iterable[str]) -> None:
        credential = directory / "run/morph/node-secret"
        if credential.is_file():
            self._credentials.add(credential.read_text(encoding="ascii").strip())
        self.found[name] = files_with(self._files(directory, below), self.secrets)
        self.modes |= {f"{name} {file}": (directory / file).stat().st_mode for file in self.found[name]}

    def _files(self, directory: Path, below: Iterable[str]) -> dict[str, bytes]:
        return {
            str(path.relative_to(directory)): data for part in below for path, data in files_below(directory / part)
        }

    def _kind(self, found: Listening) -> Socket:
        addresses = {"::": "all", "0.0.0.0": "all", "127.0.0.1": "loopback"}
        ports, node = self._ports, self._ports.of_node()
        names = {ports.head: "head", ports.notices: "notices", ports.store: "store", ports.workers: "orders"}
        names |= {port: name for name, port in node.items()}
        names |= dict.fromkeys(range(node["min_worker_port"], node["max_worker_port"] + 1), "workers")
        process = found.process.partition(".")[0]  # Ray's actors add their own
        return process, addresses.get(found.address, "own"), names.get(found.port, "any")

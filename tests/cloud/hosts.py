"""Virtual hosts on one network of this machine: a hub with the manager and the cloud, and VMs that come and go.

A VM has its own namespaces for network, processes, mounts and name; killing its process 1 ends everything in it at
once. All hosts end with the process that made them, even if it is killed: process 1 dies with its thread, and a
namespace whose owner has died is removed when the next one is made.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from manager.engine.local_vms.namespaces import HostNetwork, check_permitted
from morph.contract.errors import ConfigError
from tests.cloud.guest import GuestSpec
from tests.cloud.metadata import ADDRESS
from tests.waiting import BOUND_S

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "morph-hosts-"
CODE = {"PYTHONPATH": str(ROOT)}
"""The address of the fake cloud and of the manager, from which VMs get Morph."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MPLBACKEND": "Agg",
    "LANG": "C.UTF-8",
    "MORPH_DATA_DIR": "/tmp/morph-data",
}
"""Contents of an image besides the interpreter. Each host has its own /tmp, so no real history records its VMs."""
CACHE = "MORPH_CACHE_DIR"
"""The cache of these tests, and root's on every host, so that the same job is cut only once."""


@functools.cache
def not_permitted() -> str:
    """Return why virtual hosts are impossible here; "" if they are possible."""
    try:
        check_permitted()
    except ConfigError as error:
        return str(error)
    missing = [tool for tool in ("unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} (package util-linux) is not installed"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--uts", "--ipc", "--net", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    return f"namespaces are not permitted: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One living virtual host; ``start`` it from a thread that lives as long as the host must."""

    def __init__(self, spec: GuestSpec) -> None:
        self.name, self.namespace, self.directory = spec.name, spec.namespace, Path(spec.directory)
        self.environment = {**spec.environment, "PATH": os.environ["PATH"], "HOME": "/root"}
        self._outer = subprocess.Popen(
            [sys.executable, "-m", "tests.cloud.guest", str(spec.write()), str(os.getpid())],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **CODE},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._outer.stdout is not None
        self.pid = int(self._outer.stdout.readline() or 0)
        if not self.pid:
            self.kill()
            raise RuntimeError(f"{spec.name} does not come up: {self.log('host')}")

    @property
    def is_on(self) -> bool:
        return self._outer.poll() is None

    def log(self, name: str) -> str:
        """Return the output of a service of the host; that of ``host`` is from process 1 and the first boot."""
        path = self.directory / "log" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """Return the processes on the host's network, without those (``nsenter``) that are of this machine."""
        network, own = _namespace_of(self.pid, "net"), _namespace_of(os.getpid(), "pid")
        found = [process for process in psutil.process_iter() if _namespace_of(process.pid, "net") == network]
        return [process for process in found if _namespace_of(process.pid, "pid") != own]

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` on this host, with the caller's environment."""
        where = ["--mount", "--net", "--pid", "--uts", "--ipc"]
        return ["nsenter", f"--target={self.pid}", *where, f"--wd={ROOT}", "--", *command]

    def kill(self) -> None:
        """End the host and everything that runs in it, at once."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)
        else:
            self._outer.kill()
        self._outer.wait(BOUND_S)
        if self._outer.stdout is not None:
            self._outer.stdout.close()


class Hosts:
    """The network and the hosts on it; use it as a context manager, from one thread at a time.

    Args:
        shared: Folders that every host sees under the same path: storage, and the contents of an image.
        names: Addresses of further names, for every host's ``/etc/hosts``.
        bytes_per_s: Bandwidth of each host's link.
    """

    def __init__(
        self,
        shared: Sequence[Path],
        names: Mapping[str, str],
        bytes_per_s: float = 125_000_000.0,
    ) -> None:
        self.network = HostNetwork(0, bytes_per_s)
        self._caches = {CACHE: os.environ[CACHE]} if CACHE in os.environ else {}
        seen = (ROOT, Path(sys.prefix), Path(sys.base_prefix), *map(Path, self._caches.values()), *shared)
        self._shared = tuple(str(path.resolve()) for path in seen)
        self._names = dict(names)
        self._trusted: Path | None = None
        self.directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._numbers: dict[str, int] = {}
        self._next = 0
        self.living: dict[str, Host] = {}

    def __enter__(self) -> Hosts:
        _remove_stale()
        self.network.open()
        for address in (ADDRESS, *self._names.values()):
            _ip(self.network.hub, "addr", "add", f"{address}/32", "dev", "lo")
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.living):
            self.remove(name)
        self.network.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def trust(self, authority: Path) -> None:
        """Make all later hosts trust a certificate authority."""
        self._trusted = authority

    def on_hub(self, name: str, environment: Mapping[str, str]) -> Host:
        """Return a host in the hub's network, in which commands are run from outside."""
        spec = self._spec(name, self.network.hub, self.network.hub_address, {**CODE, **environment}, "")
        self.living[name] = Host(spec)
        return self.living[name]

    def furnish(self, name: str) -> str:
        """Make the network of a new VM, and return its namespace."""
        number, self._next = self._next, self._next + 1
        self.network.add(number)
        self._numbers[name] = number
        namespace = self.network.namespace(number)
        _ip(namespace, "addr", "add", f"{ADDRESS}/32", "dev", "lo")
        _ip(namespace, "rule", "add", "priority", "10", "lookup", "local")  # a lower priority for the local table,
        _ip(namespace, "rule", "del", "priority", "0")  # so that other rules can precede it
        _ip(namespace, "route", "add", "default", "via", self.network.hub_address)
        return namespace

    def boot(self, name: str, cloud_config: str) -> Host:
        """Start a VM whose network exists."""
        number = self._numbers[name]
        namespace, address = self.network.namespace(number), self.network.address(number)
        self.living[name] = Host(self._spec(name, namespace, address, {}, cloud_config))
        return self.living[name]

    def remove(self, name: str) -> None:
        """Remove a host with its network and files; a second call does nothing."""
        host = self.living.pop(name, None)
        if host is not None:
            host.kill()
            shutil.rmtree(host.directory, ignore_errors=True)
        number = self._numbers.pop(name, None)
        if number is not None:
            self.network.remove(number)

    def cut(self, name: str) -> None:
        """Take a VM's link down: the VM lives, but cannot be reached."""
        self.network.cut(self._numbers[name])

    def _spec(
        self, name: str, namespace: str, address: str, environment: Mapping[str, str], cloud_config: str
    ) -> GuestSpec:
        directory = self.directory / f"{name}-{self._next}"
        for part in ("etc", "run", "tmp", "log"):
            (directory / part).mkdir(parents=True)
        (directory / "tmp").chmod(0o1777)
        shutil.copytree("/etc", directory / "etc", symlinks=True, dirs_exist_ok=True)
        lines = ["127.0.0.1 localhost", f"{address} {name}", *(f"{where} {who}" for who, where in self._names.items())]
        written = {"hosts": lines, "nsswitch.conf": ["passwd: files", "group: files", "hosts: files"]}
        for file, content in written.items():  # there is no name server: queries would wait for 10 s
            place = directory / "etc" / file
            place.unlink(missing_ok=True)
            place.write_text("\n".join(content) + "\n")
        trust: dict[str, str] = {}
        if self._trusted is not None:
            shutil.copy(self._trusted, directory / "etc" / "virtual-azure.pem")
            trust = dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), "/etc/virtual-azure.pem")
        return GuestSpec(
            name=name,
            namespace=namespace,
            directory=str(directory),
            shared=self._shared,
            environment={**ENVIRONMENT, **self._caches, **trust, **environment},
            cloud_config=cloud_config,
        )


def _namespace_of(pid: int, kind: str) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except OSError:  # the process has ended
        return ""


def _remove_stale() -> None:
    """Remove files of hosts whose process was killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        found = re.match(rf"{PREFIX}(\d+)-", directory.name)
        if found and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(directory, ignore_errors=True)


def _ip(namespace: str, *arguments: str) -> None:
    done = subprocess.run(
        ["ip", "-n", namespace, *arguments], capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

"""Hosts as network namespaces of this machine, joined by veth pairs to one bridge, each with limited bandwidth.

The bridge has its own namespace, so that this machine's network stays untouched. Namespaces are named after the process
that made them: the next process removes those that a killed process left. Needs Linux, root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from morph.contract.errors import ClusterError, ConfigError

DIRECTORY = Path("/run/netns")
COMMAND_TIMEOUT_S = 60.0
BURST_BYTES = 64 * 1024
QUEUE_MS = 400
MAX_HOSTS = 1000
_CLONE_NEWNET = 0x40000000
_NAME = re.compile(r"morph-(\d+)-(?:hub|\d+)")


def check_permitted() -> None:
    """Raise a ConfigError that says what is missing if namespaces cannot be made."""
    reason = None
    if not sys.platform.startswith("linux"):
        reason = f"they need Linux, and this is {sys.platform}"
    elif os.geteuid() != 0:
        reason = "making them needs root"
    else:
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            reason = f"{' and '.join(missing)} (package iproute2) is not installed"
    if reason is not None:
        raise ConfigError(
            f"network namespaces cannot be used here: {reason}",
            field="--set network",
            value="namespaces",
            allowed="loopback; the workers then emulate the links",
        )


def enter(namespace: str | None) -> None:
    """Move this thread to a network namespace (None: stay); OSError if that is not permitted."""
    if namespace is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with (DIRECTORY / namespace).open() as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter namespace {namespace}: {os.strerror(number)}")


def remove_all(owner: int) -> None:
    """Remove every namespace that a process made, with its links."""
    _remove([name for name in _present() if _owner(name) == owner])


def remove_stale() -> None:
    """Remove the namespaces of processes that are gone."""
    _remove([name for name in _present() if (owner := _owner(name)) is not None and not psutil.pid_exists(owner)])


def opened_in(namespace: str, open_socket: Callable[[], socket.socket]) -> socket.socket:
    """Open a socket in a namespace, which only a helper thread enters; ClusterError if that cannot be done."""

    def inside() -> socket.socket:
        enter(namespace)
        return open_socket()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="morph-netns") as pool:
        try:
            return pool.submit(inside).result()
        except OSError as error:
            raise ClusterError(f"no socket can be opened in {namespace}: {error}") from error


class HostNetwork:
    """The namespaces of up to ``MAX_HOSTS`` hosts, whose links carry ``bytes_per_s`` in each direction."""

    def __init__(self, num_hosts: int, bytes_per_s: float) -> None:
        assert num_hosts <= MAX_HOSTS
        self._num_hosts = num_hosts
        self._bits_per_s = max(8, round(8 * bytes_per_s))

    @property
    def hub(self) -> str:
        """The namespace with the bridge."""
        return f"morph-{os.getpid()}-hub"

    @property
    def hub_address(self) -> str:
        """The hub's address, which every host can reach."""
        return "10.201.0.1"

    def namespace(self, host: int) -> str:
        """Return the namespace of a host."""
        return f"morph-{os.getpid()}-{host}"

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.201.{1 + host // 250}.{1 + host % 250}"

    def open(self) -> None:
        """Make all namespaces and links (tens in tenths of a second), or none: ClusterError if a command fails."""
        remove_stale()
        hosts = range(self._num_hosts)
        try:
            _batch([f"netns add {name}" for name in (self.hub, *map(self.namespace, hosts))])
            inside = ["link set lo up", "link add br0 type bridge", f"addr add {self.hub_address}/16 dev br0"]
            _batch(
                [*inside, "link set br0 up", *(line for host in hosts for line in self._link(host))], namespace=self.hub
            )
            _batch([self._limit_of(host) for host in hosts], "tc", self.hub)
            for host in hosts:
                self._furnish(host)
        except ClusterError:
            self.close()
            raise

    def add(self, host: int) -> None:
        """Make one more host, with a number that is not in use; ClusterError, and nothing made, on failure."""
        assert host < MAX_HOSTS
        try:
            _batch([f"netns add {self.namespace(host)}"])
            _batch(self._link(host), namespace=self.hub)
            _batch([self._limit_of(host)], "tc", self.hub)
            self._furnish(host)
        except ClusterError:
            self.remove(host)
            raise

    def remove(self, host: int) -> None:
        """Remove a host whose processes are gone. Safe to call twice."""
        _remove([self.namespace(host)])
        with contextlib.suppress(ClusterError):  # the kernel removes the link itself, a moment later
            _batch([f"link del h{host}"], namespace=self.hub)

    def _link(self, host: int) -> list[str]:
        peer = f"link add h{host} type veth peer name eth0 netns {self.namespace(host)}"
        return [peer, f"link set h{host} master br0 up"]

    def _limit_of(self, host: int) -> str:
        return f"qdisc add dev h{host} root {self._limit}"

    def _furnish(self, host: int) -> None:
        name, address = self.namespace(host), f"addr add {self.address(host)}/16 dev eth0"
        _batch(["link set lo up", address, "link set eth0 up"], namespace=name)
        _batch([f"qdisc add dev eth0 root {self._limit}"], "tc", name)

    def cut(self, host: int) -> None:
        """Take a host's link down: what it sends is lost, and no process is notified; ClusterError if that fails."""
        _batch([f"link set h{host} down"], namespace=self.hub)

    def close(self) -> None:
        """Remove everything. Safe to call twice."""
        remove_all(os.getpid())

    @property
    def _limit(self) -> str:
        burst = max(BURST_BYTES, self._bits_per_s // 8 // 250)  # the kernel fills the bucket at most 250 times a second
        return f"tbf rate {self._bits_per_s}bit burst {burst} latency {QUEUE_MS}ms"


def _present() -> list[str]:
    return sorted(entry.name for entry in DIRECTORY.iterdir()) if DIRECTORY.is_dir() else []


def _owner(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)


def _batch(lines: Sequence[str], tool: str = "ip", namespace: str | None = None) -> None:
    where = [] if namespace is None else ["-n", namespace]
    done = subprocess.run(
        [tool, *where, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"network namespaces cannot be made: {tool}: {' '.join(done.stderr.split())[:300]}")

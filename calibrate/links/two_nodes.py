"""Measures the links between this node and another one, which runs ``morph calibrate-peer`` (``peer_node``).

The processes with even ranks run here, those with odd ranks there. A ring of D of them crosses from node to node once
and back once, so each direction of the link carries what one member of D nodes would send.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from calibrate.helpers.crew import Crew
from calibrate.helpers.proven_connection import call
from calibrate.links.network import (
    PURPOSE,
    MeetingPoint,
    NetworkMeasurement,
    NetworkSpec,
    measurement,
    num_peers,
    peer_message,
)
from calibrate.links.two_clocks import on_one_clock
from morph import __version__
from morph.contract.base import Value
from morph.contract.errors import ClusterError, ConfigError, WaitTimeout
from morph.runtime.groups.store import StoreHost

WAIT_S = 900.0
_LAST_WORDS_S = 5.0


@dataclass(frozen=True)
class PeerAddress:
    """The address at which another node listens, and the secret that it shares."""

    host: str
    port: int
    token: str


class Hello(Value):
    """The description of itself that each node sends first."""

    name: str
    morph: str
    torch: str
    python: str


def own_hello() -> Hello:
    """Return this node's description."""
    return Hello(
        name=socket.gethostname(), morph=__version__, torch=torch.__version__, python=platform.python_version()
    )


def parse_address(text: str, field: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``; an IPv6 address is in brackets; ConfigError: it has another form."""
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError("is not an address", field=field, value=text, allowed="HOST:PORT, as 10.0.0.2:7420")
    return host, int(port)


class OtherNode:
    """The connection to the other node; a context manager."""

    def __init__(self, address: PeerAddress) -> None:
        """Connect, and refuse a node that runs another version: ClusterError. Other errors are those of ``call``."""
        self._what = f"the peer at {address.host}:{address.port}"
        self._connection = call(address.host, address.port, address.token)
        try:
            mine = own_hello()
            self._connection.send({"hello": mine.model_dump()})
            said = self._connection.receive(f"{self._what} to say what it runs", _LAST_WORDS_S)
            theirs = Hello.model_validate(said.get("hello"))
            for software in ("morph", "torch"):
                here, there = getattr(mine, software), getattr(theirs, software)
                if here != there:
                    raise ClusterError(
                        f"{self._what} is of another version: {software} {there} there, {here} here; "
                        "both nodes need the same"
                    )
        except ValueError as error:
            self._connection.close()
            raise ClusterError(f"{self._what} said something else than what it runs") from error
        except BaseException:
            self._connection.close()
            raise
        own, other = self._connection.own_address, self._connection.other_address
        self.between = f"{mine.name} ({own}) and {theirs.name} ({other})"

    def __enter__(self) -> OtherNode:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def measure(self, spec: NetworkSpec) -> NetworkMeasurement:
        """Measure the links between the two nodes, with errors as of ``measure_network``; blocks at most ``WAIT_S``."""
        proven = self._connection
        here = proven.own_address
        store = StoreHost(here)
        place = MeetingPoint(store_host=here, store_port=store.port(), listen=here, two_nodes=True)
        ranks = range(num_peers(spec))
        own, others = ranks[::2], ranks[1::2]
        with Crew("calibrate.links.peer", len(own), PURPOSE) as crew:
            order = asdict(replace(spec, devices=(spec.devices[0].partition(":")[0],)))
            proven.send({"measure": order, "store_port": store.port()})
            for number, rank in enumerate(own):
                crew.send(number, {**peer_message(spec, place, rank), "device": _device(spec.devices, number)})
            try:
                found = crew.gather(range(len(own)), "the processes that measure the link to the other node", WAIT_S)
            except (ClusterError, WaitTimeout) as error:
                raise self._both_sides(error) from error
        answer = proven.receive(f"{self._what} to send what it measured", _LAST_WORDS_S * 6)
        if "failed" in answer:
            raise ClusterError(f"{self._what}: {answer['failed']}")
        results = {rank: found[number] for number, rank in enumerate(own)}
        results |= {rank: answer["results"][str(rank)] for rank in others}
        return measurement(spec, on_one_clock([results[rank] for rank in ranks]))

    def _both_sides(self, error: Exception) -> Exception:
        """Return the other node's error if it has one, because processes here then fail only as its consequence."""
        try:
            answer = self._connection.receive("last words", _LAST_WORDS_S)
        except (ClusterError, WaitTimeout):
            return error
        return ClusterError(f"{self._what}: {answer['failed']}") if "failed" in answer else error


def _device(devices: Sequence[str], number: int) -> str:
    return devices[number % len(devices)]

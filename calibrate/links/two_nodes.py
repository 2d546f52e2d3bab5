"""Measures the links between this node and another one, which runs ``morph calibrate-peer`` (``peer_node``).

The processes with even ranks run here, those with odd ranks there, so each direction of the link carries what one
member of D nodes would send. Clocks are compared by short messages back and forth: the quickest took ``d + offset`` and
``d - offset``, so half of their difference is the offset, with an error of at most half of the difference between the
directions. Between two comparisons, clocks are assumed to drift evenly.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
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
from morph import __version__
from morph.contract.base import Value
from morph.contract.errors import ClusterError, ConfigError, WaitTimeout
from morph.runtime.groups.store import StoreHost

WAIT_S = 900.0
_LAST_WORDS_S = 5.0
Stamps = Sequence[int]
Exchange = tuple[Stamps, Stamps]
"""Stamps of a message there and of one back: on the first process sent and received, on the second received and sent.
"""


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
            self._connection.send_message({"hello": mine.model_dump()})
            said = self._connection.receive_message(f"{self._what} to say what it runs", _LAST_WORDS_S)
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
        own, remote = self._connection.own_address, self._connection.other_address
        self.between = f"{mine.name} ({own}) and {theirs.name} ({remote})"

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
            proven.send_message({"measure": order, "store_port": store.port()})
            for number, rank in enumerate(own):
                crew.send(number, {**peer_message(spec, place, rank), "device": _device(spec.devices, number)})
            try:
                answers = crew.gather(range(len(own)), "the processes that measure the link to the other node", WAIT_S)
            except (ClusterError, WaitTimeout) as error:
                raise self._both_sides(error) from error
        answer = proven.receive_message(f"{self._what} to send what it measured", _LAST_WORDS_S * 6)
        if "failed" in answer:
            raise ClusterError(f"{self._what}: {answer['failed']}")
        results = {rank: answers[number] for number, rank in enumerate(own)}
        results |= {rank: answer["results"][str(rank)] for rank in others}
        return measurement(spec, on_one_clock([results[rank] for rank in ranks]))

    def _both_sides(self, error: Exception) -> Exception:
        """Return the other node's error if it has one, because processes here then fail only as its consequence."""
        try:
            answer = self._connection.receive_message("last words", _LAST_WORDS_S)
        except (ClusterError, WaitTimeout):
            return error
        return ClusterError(f"{self._what}: {answer['failed']}") if "failed" in answer else error


def _device(devices: Sequence[str], number: int) -> str:
    return devices[number % len(devices)]


@dataclass(frozen=True)
class TwoClocks:
    """Offsets of the second clock from the first, in ns, by the second clock's time in ns since ``base_ns``."""

    base_ns: int
    times_ns: tuple[float, ...]
    offsets_ns: tuple[float, ...]

    def on_first(self, stamp_ns: int) -> int:
        """Return a stamp of the second clock as the first would have shown it."""
        first_ns = self.offsets_ns[0]
        away_ns = [offset - first_ns for offset in self.offsets_ns]  # small numbers, so that a float is precise enough
        drift_ns = float(np.interp(stamp_ns - self.base_ns, self.times_ns, away_ns))
        return stamp_ns - int(first_ns) - round(drift_ns)


def compare(first: Sequence[Exchange], second: Sequence[Exchange]) -> TwoClocks:
    """Compute the offsets from the stamps of the two processes, for at least one exchange."""
    base_ns = second[0][0][0]
    times_ns, offsets_ns = [], []
    for (sent, got_back), (received, sent_back) in zip(first, second, strict=True):
        down_ns = min(end - start for start, end in zip(sent, received, strict=True))
        up_ns = min(end - start for start, end in zip(sent_back, got_back, strict=True))
        times_ns.append((received[0] + sent_back[-1]) / 2 - base_ns)
        offsets_ns.append((down_ns - up_ns) // 2)
    return TwoClocks(base_ns, tuple(times_ns), tuple(offsets_ns))


def on_one_clock(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of the peers by rank, those of odd ranks with stamps as of the first rank's clock."""
    clocks = compare(results[0]["clock"], results[1]["clock"])
    return [_shifted(result, clocks) if rank % 2 else dict(result) for rank, result in enumerate(results)]


def _shifted(result: Mapping[str, Any], clocks: TwoClocks) -> dict[str, Any]:
    moved: dict[str, Any] = {**result, "all_reduce": {}}
    for direction in ("activation", "gradient"):
        moved[direction] = {size: list(map(clocks.on_first, stamps)) for size, stamps in result[direction].items()}
    for name, spans in result["all_reduce"].items():
        moved["all_reduce"][name] = _shifted_spans(spans, clocks)
    if "barrier" in result:
        moved["barrier"] = _shifted_spans(result["barrier"], clocks)
    return moved


def _shifted_spans(spans: Sequence[tuple[int, int]], clocks: TwoClocks) -> list[tuple[int, int]]:
    return [(clocks.on_first(start), clocks.on_first(end)) for start, end in spans]

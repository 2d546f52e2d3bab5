"""``morph calibrate-peer``: lends this node to a calibration by a caller that knows the secret, for nothing else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from calibrate.helpers.crew import Crew
from calibrate.helpers.proven_connection import ProvenConnection, answer
from calibrate.links.network import PURPOSE, MeetingPoint, NetworkSpec, num_peers, peer_message
from calibrate.links.two_nodes import WAIT_S, Hello, own_hello
from calibrate.timing.clocks import devices_of
from morph.contract.base import Value, first_problem
from morph.contract.cluster import LinkSetting, RingSetting
from morph.contract.errors import ClusterError, ConfigError, MorphError, WaitTimeout
from morph.link.listener import BACKLOG, Caller, Listener

Say = Callable[[str], None]

MAX_MESSAGE_BYTES = 1 << 30
_Size = Annotated[int, Field(ge=1, le=MAX_MESSAGE_BYTES)]
_FEW = Field(max_length=32)


class Order(Value):
    """The measurements that another node may request (``calibrate.links.network.NetworkSpec``, with bounds)."""

    message_sizes: Annotated[tuple[_Size, ...], _FEW]
    reduced_sizes: Annotated[tuple[_Size, ...], _FEW]
    ring_sizes: Annotated[tuple[Annotated[int, Field(ge=2, le=8)], ...], _FEW]
    in_flight: Annotated[tuple[Annotated[int, Field(ge=1, le=8)], ...], _FEW]
    element: Literal["int64", "float32"]
    devices: Annotated[tuple[Literal["cpu", "cuda"], ...], Field(min_length=1, max_length=1)]
    links: LinkSetting
    rings: RingSetting
    most: Annotated[int, Field(ge=1, le=10_000)]
    budget_s: Annotated[float, Field(ge=0, le=60)]

    def spec(self) -> NetworkSpec:
        """Return the specification for this node's devices."""
        devices = tuple(str(device) for device in devices_of(self.devices[0]))
        return NetworkSpec(**{**self.model_dump(), "devices": devices})


class PeerNode:
    """Listens on an address (port 0: any free one; ConfigError: impossible); ``say`` gets a line for each event."""

    def __init__(self, host: str, port: int, token: str, say: Say) -> None:
        self._token, self._say = token, say
        self._proven: SimpleQueue[tuple[ProvenConnection, str, threading.Event]] = SimpleQueue()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = Listener(
                socket.create_server((host, port), family=family, backlog=BACKLOG), self._admit, "morph-peer"
            )
        except OSError as error:
            raise ConfigError(
                f"cannot be listened on: {error.strerror or error}", field="--listen", value=f"{host}:{port}"
            ) from error
        self.host, self.port = host, self._listener.address[1]

    def __enter__(self) -> PeerNode:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.stop()
        with suppress(Empty):
            while True:  # callers that came too late
                self._proven.get_nowait()[2].set()
        self._listener.close()

    def serve(self, wait_s: float) -> None:
        """Serve one node at a time, until a link was measured. Raises WaitTimeout if none finished in ``wait_s``."""
        end_s = time.monotonic() + wait_s
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                proven, address, done = self._proven.get(timeout=left_s)
            except Empty:
                break
            try:
                with proven:
                    self._say(f"{address} is here")
                    _lend(proven, wait_s)
                self._say(f"measured with {address}")
                return
            except (MorphError, OSError) as error:
                self._say(f"{address}: {error}")
            finally:
                done.set()
        raise WaitTimeout(f"waited {wait_s:g} s for another node to measure with")

    def _admit(self, caller: Caller) -> None:
        try:
            proven = answer(caller.connection, self._token)
            caller.known()
        except (MorphError, OSError) as error:
            self._say(f"{caller.source}: {error}")
            return
        done = threading.Event()
        self._proven.put((proven, caller.source, done))
        done.wait()


def _lend(proven: ProvenConnection, wait_s: float) -> None:
    """Serve one calibration: hello, the order, the measurement, its results."""
    try:
        Hello.model_validate(proven.receive_message("the other node to say what it runs", WAIT_S).get("hello"))
    except ValidationError as error:
        raise ClusterError("the other node does not say what it runs") from error
    proven.send_message({"hello": own_hello().model_dump()})
    message = proven.receive_message("the other node to say what to measure", wait_s)
    try:
        results = _measure(proven, message)
    except (ClusterError, ConfigError, WaitTimeout) as error:
        proven.send_message({"failed": str(error)})
        raise
    proven.send_message({"results": results}, WAIT_S)


def _measure(proven: ProvenConnection, message: dict[str, Any]) -> dict[str, Any]:
    try:
        spec = Order.model_validate(message.get("measure")).spec()
    except ValidationError as error:
        field, problem, value = first_problem(error)
        raise ClusterError(f"was asked to measure what it cannot: {field}: {problem} (got {value!r:.100})") from error
    port = message.get("store_port")
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ClusterError(f"asked to meet at port {port!r:.100}")
    own = range(num_peers(spec))[1::2]
    place = MeetingPoint(store_host=proven.other_address, store_port=port, listen=proven.own_address, two_nodes=True)
    with Crew("calibrate.links.peer", len(own), PURPOSE) as crew:
        for number, rank in enumerate(own):
            device = spec.devices[number % len(spec.devices)]
            crew.send(number, {**peer_message(spec, place, rank), "device": device})
        answers = crew.gather(range(len(own)), "the processes that measure the link to the other node", WAIT_S)
    return {str(rank): answers[number] for number, rank in enumerate(own)}

"""Messages between the manager and the process that is Ray's driver: lines of JSON, checked by both sides."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr, TypeAdapter, ValidationError, field_serializer

from morph.contract.base import Value

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_WORKERS = 100_000
Name = Annotated[str, Field(max_length=200)]


class Start(Value):
    """Start a worker, and give it its ``home``, with which it calls the manager. ``exists``: it was started before."""

    kind: Literal["start"] = "start"
    worker: Name
    vm: Name
    home: SecretStr
    num_gpus: int = Field(default=0, ge=0, le=1)
    exists: bool = False

    @field_serializer("home")
    def _plain(self, home: SecretStr) -> str:
        return home.get_secret_value()


class Kill(Value):
    """End a worker's process."""

    kind: Literal["kill"] = "kill"
    worker: Name


class Told(Value):
    """A report on a worker: it will be placed once there is room, has ended, or must be ordered again."""

    kind: Literal["started", "ended", "unreachable"]
    worker: Name
    cause: str = Field(default="", max_length=1000)


class Hello(Value):
    """The first line of a driver. ``lacks``: the parts of confinement that this machine lacks, in a user's words."""

    kind: Literal["hello"] = "hello"
    lacks: str = Field(default="", max_length=1000)


class Nodes(Value):
    """The workers that have nodes in the cluster now, and their addresses."""

    kind: Literal["nodes"] = "nodes"
    workers: dict[Name, Name] = Field(max_length=MAX_WORKERS)


_ORDER: TypeAdapter[Start | Kill] = TypeAdapter(Annotated[Start | Kill, Field(discriminator="kind")])
_TOLD: TypeAdapter[Hello | Told | Nodes] = TypeAdapter(Annotated[Hello | Told | Nodes, Field(discriminator="kind")])


def write(value: Start | Kill | Hello | Told | Nodes) -> bytes:
    """Write one line."""
    return value.model_dump_json().encode() + b"\n"


def read_order(line: bytes) -> Start | Kill:
    """Read an order from the manager; ValueError if the line is not an order."""
    return _ORDER.validate_json(line)


def read_told(line: bytes) -> Hello | Told | Nodes:
    """Read a message from the driver; ValueError, which does not repeat the line, if it is not such a message."""
    try:
        return _TOLD.validate_json(line)
    except ValidationError as error:
        raise ValueError(f"{error.error_count()} errors in {len(line)} bytes") from None

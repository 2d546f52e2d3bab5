"""Reads systemd unit files, as far as Morph's own units need it; unknown keys are errors."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

IGNORED = {"Wants", "After", "DefaultDependencies", "WantedBy"}


class UnitError(Exception):
    """A unit file that this stand-in does not understand."""


@dataclass(frozen=True)
class Unit:
    """One service; after ``limit_burst`` starts within ``limit_interval_s``, ``limit_action`` is taken."""

    command: tuple[str, ...]
    environment: dict[str, str]
    always: bool = False
    restart_s: float = 0.1
    limit_interval_s: float = 10.0
    limit_burst: int = 5
    limit_action: str = "none"
    umask: int = 0o022
    before: tuple[str, ...] = ()


def read_unit(text: str) -> Unit:
    """Read a unit file; raises UnitError."""
    command: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    found: dict[str, str] = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line.startswith("["):
            if line not in ("[Unit]", "[Service]", "[Install]"):
                raise UnitError(f"section {line}")
            continue
        key, equals, value = line.partition("=")
        if not equals:
            raise UnitError(f"no setting: {line}")
        if key == "Environment":
            for entry in shlex.split(_plain(value)):
                name, _, setting = entry.partition("=")
                environment[name] = setting
        elif key == "ExecStart":
            command = tuple(_plain(word) for word in shlex.split(value))
        elif key == "ExecStartPre":
            before = tuple(_plain(word) for word in shlex.split(value))
        elif key not in IGNORED:
            found[key] = value
    known = {
        "always": found.pop("Restart", "no") == "always",
        "restart_s": float(found.pop("RestartSec", 0.1)),
        "limit_interval_s": float(found.pop("StartLimitIntervalSec", 10.0)),
        "limit_burst": int(found.pop("StartLimitBurst", 5)),
        "limit_action": found.pop("StartLimitAction", "none"),
        "umask": int(found.pop("UMask", "0022"), 8),
    }
    if found or not command or not command[0].startswith("/"):
        raise UnitError(f"not understood: {found or command}")
    return Unit(command=command, environment=environment, before=before, **known)  # type: ignore[arg-type]


def _plain(text: str) -> str:
    """Undo the doubling of characters that systemd would expand."""
    return text.replace("%%", "%").replace("$$", "$")

"""What processes expose: listening sockets, and secrets in their environment, command lines and files."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

FEWEST_SIGNS = 16
RECORDED = """
import secrets, sys
from pathlib import Path

known = Path(sys.argv[1])

def recorded(make):
    def made(*arguments):
        value = make(*arguments)
        with known.open("a", encoding="ascii") as file:
            file.write(value + "\\n")
        return value
    return made

secrets.token_hex, secrets.token_urlsafe = recorded(secrets.token_hex), recorded(secrets.token_urlsafe)
sys.argv = ["morph", *sys.argv[2:]]
from morph.cli.main import main
main()
"""
"""Runs a command of Morph whose own process records every secret that it makes: ``python -c`` this, FILE, ..."""
LISTENS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""Files below /proc/PID/net, and the state of a listening socket in them."""


@dataclass(frozen=True)
class Listening:
    address: str
    port: int
    process: str


@dataclass(frozen=True)
class Shown:
    """What some processes show; ``environments`` and ``command_lines`` are by process id and name."""

    environments: dict[str, dict[str, str]]
    command_lines: dict[str, str]
    listening: frozenset[Listening]


def shown_by(processes: Iterable[psutil.Process]) -> Shown:
    """Examine processes, which may be in network namespaces of their own; leave out those that end meanwhile."""
    environments, command_lines, listening = {}, {}, set[Listening]()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            name = f"{process.pid} {process.name()}"
            environments[name], command_lines[name] = process.environ(), "\0".join(process.cmdline())
            listening.update(_listening(process))
    return Shown(environments, command_lines, frozenset(listening))


def recorded(path: Path) -> list[str]:
    """Return every secret in such a file; a few random characters in names do not count."""
    return [value for value in path.read_text(encoding="ascii").split() if len(value) >= FEWEST_SIGNS]


def with_secrets(shown: Shown, secrets: Iterable[str]) -> list[str]:
    """Return processes with a secret in their command line or environment, with the name of the variable."""
    known = tuple(secrets)
    return [
        *(name for name, line in shown.command_lines.items() if any(holds(line.encode(), one) for one in known)),
        *(
            f"{name} {key}"
            for name, environment in shown.environments.items()
            for key, value in environment.items()
            if any(holds(value.encode(), one) for one in known)
        ),
    ]


def files_with(files: Mapping[str, bytes], secrets: Iterable[str]) -> set[str]:
    known = tuple(secrets)
    return {name for name, data in files.items() if any(holds(data, one) for one in known)}


def files_below(directory: Path) -> Iterator[tuple[Path, bytes]]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # the file has just been removed
                yield path, path.read_bytes()


def holds(data: bytes, secret: str) -> bool:
    """Return whether data contains a secret, as it is or in base64 at any offset."""
    return any(form in data for form in _forms(secret))


def _forms(secret: str) -> Iterator[bytes]:
    yield secret.encode()
    for shift in range(3):
        yield base64.b64encode(b"\0" * shift + secret.encode())[4:-4]


def _listening(process: psutil.Process) -> Iterator[Listening]:
    """Return listening sockets in the process's own network namespace; psutil would read that of this process."""
    mine = set()
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(str(descriptor.readlink()))
    for kind, state in LISTENS.items():
        table = Path(f"/proc/{process.pid}/net/{kind}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, its_state, *rest = line.split()
            if its_state == state and f"socket:[{rest[5]}]" in mine:
                address, _, port = local.partition(":")
                yield Listening(_address(address), int(port, 16), process.name())


def _address(text: str) -> str:
    """Parse an address in the kernel's form: words of four bytes, each in the machine's order."""
    data = bytes.fromhex(text)
    swapped = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
    found = ipaddress.ip_address(swapped)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)

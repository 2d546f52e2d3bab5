"""The environment variables with which ``morph elastic`` invites a process. Loads no torch."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from morph.contract.errors import InputError

LISTEN, LISTEN_FD, JOIN, FOUNDERS, SECRET, SILENCE = NAMES = (
    "MORPH_ELASTIC_LISTEN",
    "MORPH_ELASTIC_LISTEN_FD",
    "MORPH_ELASTIC_JOIN",
    "MORPH_ELASTIC_FOUNDERS",
    "MORPH_ELASTIC_SECRET",
    "MORPH_ELASTIC_SILENCE_S",
)
"""Variables that ``morph elastic`` sets for the processes that it starts."""
SILENCE_S = 5.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Invitation:
    """The part that this process takes.

    ``join``: addresses of workers, any of which lets it in. Without them it founds a ring of ``num_founders``, alone if
    that is 1.
    """

    listen_host: str = LOOPBACK
    listen_fd: int | None = None
    join: tuple[tuple[str, int], ...] = ()
    num_founders: int = 1
    secret: str = ""
    silence_s: float = SILENCE_S

    @property
    def is_shared(self) -> bool:
        """Whether ``morph elastic`` started this process, so that there are, or may be, other workers."""
        return bool(self.join) or self.listen_fd is not None

    @property
    def credential(self) -> str:
        """The credential that this process shows to the job's other processes, and demands from them."""
        from morph.link.authority import credential_of

        return credential_of(self.secret)

    @classmethod
    def of_environment(cls) -> Invitation:
        """Return the invitation that ``morph elastic`` set; without one, a ring of this process alone."""
        given = {name: os.environ.get(name) for name in NAMES}
        fd, join = given[LISTEN_FD], given[JOIN]
        try:
            return cls(
                listen_host=given[LISTEN] or LOOPBACK,
                listen_fd=int(fd) if fd else None,
                join=parse_addresses(join, JOIN) if join else (),
                num_founders=int(given[FOUNDERS] or 1),
                secret=given[SECRET] or secrets.token_hex(32),
                silence_s=float(given[SILENCE] or SILENCE_S),
            )
        except ValueError as error:
            raise InputError(f"a variable of morph elastic is not a number: {error}", source="environment") from error


def parse_addresses(text: str, field: str) -> tuple[tuple[str, int], ...]:
    """Return the hosts and ports of ``HOST:PORT,HOST:PORT...``."""
    return tuple(parse_address(one.strip(), field) for one in text.split(","))


def parse_address(text: str, field: str) -> tuple[str, int]:
    """Return the host and the port of ``HOST:PORT``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError("is not an address", field=field, value=text, allowed="HOST:PORT")
    return host, int(port)

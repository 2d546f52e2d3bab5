"""The secret that two nodes share while they measure the link between them."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from morph.contract.errors import ConfigError

TOKEN_VARIABLE = "MORPH_PEER_TOKEN"
_MIN_LENGTH = 16
_MAX_BYTES = 4096


def find_token(path: Path | None, from_environment: str | None, *, make: bool = False) -> str:
    """Return the secret from a file that only this user can read, or else from the environment variable.

    ``make``: a missing file is written, with a new secret. Raises ConfigError if there is no secret, if others can read
    it, or if it is too short.
    """
    if path is None:
        if not from_environment:
            raise ConfigError(
                "the two nodes need a shared secret to recognise each other",
                field="--token-file",
                allowed=f"a file with a secret, the same on both nodes, or {TOKEN_VARIABLE} in the environment",
            )
        return _checked(from_environment, TOKEN_VARIABLE)
    if make and not path.exists():
        _write_new(path)
    return _checked(_read(path), str(path))


def _write_new(path: Path) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", source=str(path), field="--token-file") from error


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigError(
                    "others can read the secret",
                    source=str(path),
                    field="--token-file",
                    value=f"{mode:04o}",
                    allowed="mode 0600",
                )
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path), field="--token-file") from error


def _checked(text: str, source: str) -> str:
    token = text.strip()
    if len(token) < _MIN_LENGTH:
        raise ConfigError(
            f"the secret has only {len(token)} characters", source=source, allowed=f"at least {_MIN_LENGTH} characters"
        )
    return token

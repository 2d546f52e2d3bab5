"""Keeps operations under way and answered requests for the next manager, in a file that only the user can read."""

from __future__ import annotations

import threading
from pathlib import Path

from pydantic import Field, ValidationError

from manager.providers.interface.provider import Misconfigured
from morph.contract.base import Value
from morph.contract.files import PRIVATE, write_whole


class _Kept(Value):
    tokens: dict[str, str] = Field(default_factory=dict)
    answers: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class Operations:
    """Tokens by VM name, and the VMs that each request got; thread-safe, and on disk before a call returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._kept = _Kept.model_validate_json(path.read_bytes()) if path.exists() else _Kept()
        except ValidationError as error:
            raise Misconfigured(f"{path} is damaged; remove it, then reconcile") from error

    def token(self, vm: str) -> str | None:
        """Return the token of the operation that makes a VM; None if there is none."""
        return self._kept.tokens.get(vm)

    def tokens(self) -> tuple[str, ...]:
        """Return all tokens."""
        return tuple(self._kept.tokens.values())

    def begun(self, vm: str, token: str) -> None:
        """Store the token of an operation that was begun."""
        with self._lock:
            self._keep(tokens={**self._kept.tokens, vm: token})

    def ended(self, vm: str) -> None:
        """Remove the token of an operation that ended."""
        with self._lock:
            if vm in self._kept.tokens:
                self._keep(tokens={name: token for name, token in self._kept.tokens.items() if name != vm})

    def answer(self, request: str) -> tuple[str, ...] | None:
        """Return the VMs that a request got; None while it has no answer."""
        return self._kept.answers.get(request)

    def answered(self, request: str, vms: tuple[str, ...]) -> None:
        """Store the answer to a request."""
        with self._lock:
            self._keep(answers={**self._kept.answers, request: vms})

    def _keep(self, **changes: object) -> None:
        self._kept = self._kept.model_copy(update=changes)
        write_whole(self._path, self._kept.model_dump_json(), PRIVATE)

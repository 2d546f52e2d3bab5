"""How a caller and a listener prove to one another that they have a secret, for this connection alone.

The listener sends a nonce. The caller answers with its own, who it is, and its proof; the listener with its proof.
Each proof covers both nonces and all that the caller said; so does the key of the seals.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from morph.link.proof import is_proven, new_secret, proof


@dataclass(frozen=True)
class Greeting:
    """Of one connection. ``facts``: what the caller says of itself, such as its name."""

    purpose: str
    nonce: str
    fresh: str
    facts: tuple[str, ...]

    @classmethod
    def to(cls, nonce: bytes, purpose: str, *facts: str) -> Greeting:
        """The caller's, once the listener's nonce has come."""
        return cls(purpose, nonce.decode("ascii", errors="replace"), new_secret(), facts)

    def hello(self, secret: str) -> bytes:
        """What the caller sends."""
        return json.dumps([self.fresh, self._proof(secret, "caller"), *self.facts]).encode()

    @classmethod
    def heard(cls, message: bytes, nonce: str, purpose: str, num_facts: int) -> tuple[Greeting, str]:
        """What a caller sent, and its proof, which ``is_of_caller`` judges.

        Raises:
            ValueError: it is no hello.
        """
        try:
            said = json.loads(message)
        except RecursionError as error:
            raise ValueError("it does not say hello") from error
        if not (isinstance(said, list) and len(said) == 2 + num_facts and all(isinstance(part, str) for part in said)):
            raise ValueError("it does not say hello")
        return cls(purpose, nonce, said[0], tuple(said[2:])), said[1]

    def is_of_caller(self, given: str, secret: str) -> bool:
        """Whether the caller has the secret."""
        return is_proven(given, secret, *self._parts("caller"))

    def welcome(self, secret: str) -> bytes:
        """What the listener answers."""
        return self._proof(secret, "listener").encode()

    def is_of_listener(self, given: bytes, secret: str) -> bool:
        """Whether the listener has the secret."""
        return is_proven(given.decode("ascii", errors="replace"), secret, *self._parts("listener"))

    def key(self, secret: str) -> str:
        """What seals the messages."""
        return self._proof(secret, "messages")

    def _proof(self, secret: str, of: str) -> str:
        return proof(secret, *self._parts(of))

    def _parts(self, of: str) -> tuple[str, ...]:
        return (self.purpose, of, self.nonce, self.fresh, *self.facts)

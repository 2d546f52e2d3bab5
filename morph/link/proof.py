"""Proves knowledge of a secret without sending it, with HMAC-SHA256 over the text to be proven."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets


def new_secret() -> str:
    """Return 256 random bits as text: a secret, or a nonce that has not been used in a proof before."""
    return secrets.token_hex(32)


def proof(secret: str, *parts: str) -> str:
    """Return the proof for these parts, which only a holder of the secret can compute."""
    return hmac.new(secret.encode(), json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def is_proven(given: str, secret: str, *parts: str) -> bool:
    """Whether ``given`` is the proof for these parts; the comparison takes the same time for every wrong one."""
    return hmac.compare_digest(proof(secret, *parts).encode(), given.encode("utf-8", errors="replace"))

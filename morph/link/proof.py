"""Proving knowledge of a secret without sending it: HMAC-SHA256 over what is to be proven."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets


def new_secret() -> str:
    """Return 256 random bits as text: a secret, or a nonce that no proof was made for before."""
    return secrets.token_hex(32)


def proof(secret: str, *parts: str) -> str:
    """Return what only a holder of the secret can compute for these parts."""
    return hmac.new(secret.encode(), json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def is_proven(given: str, secret: str, *parts: str) -> bool:
    """Whether ``given`` is the proof for these parts; takes the same time for every wrong one."""
    return hmac.compare_digest(proof(secret, *parts).encode(), given.encode("utf-8", errors="replace"))

from __future__ import annotations

import pytest

from morph.contract.proof import is_proven, new_secret, proof


def test_a_proof_holds_for_its_parts_and_its_secret_alone() -> None:
    secret = new_secret()
    given = proof(secret, "lifeline", "nonce", "vm0")
    assert is_proven(given, secret, "lifeline", "nonce", "vm0")
    assert not is_proven(given, new_secret(), "lifeline", "nonce", "vm0")
    assert not is_proven(given, secret, "lifeline", "nonce", "vm1")
    assert not is_proven(given, secret, "lifeline", "noncevm0")
    assert not is_proven(given, secret, "lifeline", "nonc", "evm0")  # where one part ends is part of it


@pytest.mark.parametrize("given", ["", "é", "\ud800", "x" * 10_000])
def test_anything_else_is_no_proof_and_no_error(given: str) -> None:
    assert not is_proven(given, "secret", "part")

from __future__ import annotations

import json

import pytest

from morph.link.greeting import Greeting
from morph.link.proof import new_secret

SECRET = new_secret()


def meet(caller_secret: str, listener_secret: str, *, who: str = "vm0", as_who: str = "vm0") -> tuple[bool, bool, bool]:
    """Whether each believes the other, and both have one key."""
    nonce = new_secret()
    called = Greeting.to(nonce.encode(), "talk", who)
    message = called.hello(caller_secret).replace(b'"' + who.encode() + b'"', b'"' + as_who.encode() + b'"')
    heard, given = Greeting.heard(message, nonce, "talk", 1)
    believes = heard.is_of_caller(given, listener_secret)
    believed = called.is_of_listener(heard.welcome(listener_secret), caller_secret)
    return believes, believed, called.key(caller_secret) == heard.key(listener_secret)


def test_two_who_have_the_secret_believe_one_another_and_have_a_key_that_is_of_this_connection() -> None:
    assert meet(SECRET, SECRET) == (True, True, True)
    one, two = (Greeting.to(b"n", "talk", "vm0").key(SECRET) for _ in range(2))
    assert one != two


def test_without_the_secret_neither_is_believed() -> None:
    assert meet("wrong", SECRET) == (False, False, False)
    assert meet(SECRET, "wrong") == (False, False, False)


def test_a_proof_is_of_its_name_its_purpose_its_nonce_and_its_side() -> None:
    assert meet(SECRET, SECRET, who="vm0", as_who="vm1") == (False, False, False)
    called = Greeting.to(b"nonce", "talk", "vm0")
    message = called.hello(SECRET)
    for nonce, purpose in (("other", "talk"), ("nonce", "life")):
        heard, given = Greeting.heard(message, nonce, purpose, 1)
        assert not heard.is_of_caller(given, SECRET)
    _, given = Greeting.heard(message, "nonce", "talk", 1)
    assert not called.is_of_listener(given.encode(), SECRET)  # its own proof, sent back


@pytest.mark.parametrize(
    "message", [b"\xff", b"[]", b"{}", json.dumps(["a", "b", 1]).encode(), json.dumps(["a", "b", "c", "d"]).encode()]
)
def test_anything_else_is_no_hello(message: bytes) -> None:
    with pytest.raises(ValueError):
        Greeting.heard(message, "nonce", "talk", 1)

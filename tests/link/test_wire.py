from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from morph.link import wire as wire_module
from morph.link.wire import SIZE, STRANGERS_BYTES, Wire
from tests.link.pair import KEY, Pair, certificates, listening, show


@pytest.fixture(params=["sealed", "encrypted"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    if request.param == "sealed":
        return Pair()
    files = certificates(tmp_path / "run")
    show(files, monkeypatch)
    return Pair(listening(files))


def test_messages_of_any_size_come_as_they_were_sent_and_one_at_a_time(pair: Pair) -> None:
    pair.know()
    bodies = [b"", b"\n", b"x" * 100_000, bytes(range(256)) * 4000]
    data = b"".join(pair.listener.put(body) for body in bodies)
    for first in range(0, len(data), 7777):
        pair.caller.take(data[first : first + 7777])
    assert [pair.caller.next() for _ in bodies] == bodies
    assert pair.caller.next() is None
    pair.listener.take(pair.caller.put(b"back"))
    assert pair.listener.next() == b"back"


def test_what_comes_in_one_packet_with_the_proof_is_read_with_the_key_that_follows_from_it(pair: Pair) -> None:
    proof = pair.listener.put(b"proof")
    pair.listener.seal(KEY)
    pair.caller.take(proof + pair.listener.put(b"setup" * 10_000))
    assert pair.caller.next() == b"proof"
    pair.caller.seal(KEY)
    assert pair.caller.next() == b"setup" * 10_000


def swapped(one: bytes, two: bytes) -> bytes:
    return two + one


def changed(one: bytes, two: bytes) -> bytes:
    return one[:-1] + bytes([one[-1] ^ 1]) + two


@pytest.mark.parametrize(
    "tamper",
    [swapped, changed, lambda one, _: one + one, lambda _, two: two],
    ids=["out of order", "changed", "repeated", "one is left out"],
)
def test_a_message_that_is_not_the_next_one_as_it_was_sent_ends_the_connection(
    pair: Pair, tamper: Callable[[bytes, bytes], bytes]
) -> None:
    pair.know()
    data = tamper(pair.caller.put(b"one"), pair.caller.put(b"two"))

    def read() -> None:
        pair.listener.take(data)
        for said in (b"one", b"two"):
            assert pair.listener.next() == said

    with pytest.raises(OSError):
        read()


def test_neither_end_takes_its_own_messages_for_those_of_the_other() -> None:
    pair = Pair()
    pair.know()
    pair.caller.take(pair.caller.put(b"said to the listener"))
    with pytest.raises(ConnectionError, match="not what the other end sent"):
        pair.caller.next()


def test_who_is_not_known_yet_is_not_listened_to_for_long(pair: Pair) -> None:
    pair.listener.take(pair.caller.put(b"x" * STRANGERS_BYTES))
    assert pair.listener.next() is not None
    with pytest.raises(ConnectionError, match="more than"):
        pair.caller.put(b"x" * (STRANGERS_BYTES + 1))
    pair.caller.seal("")  # it does not keep to that
    pair.listener.take(pair.caller.put(b"x" * (STRANGERS_BYTES + 1)))
    with pytest.raises(ConnectionError, match="claims"):
        pair.listener.next()


def test_a_message_may_be_long_but_not_endless(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "MOST_BYTES", 100_000)
    pair.know()
    with pytest.raises(ConnectionError, match="more than"):
        pair.caller.put(b"x" * 100_001)
    bare = Wire(None)
    bare.seal(KEY)
    for size in (100_033, 31):
        bare.take(SIZE.pack(size))
        with pytest.raises(ConnectionError, match="claims"):
            bare.next()


def test_with_another_key_nothing_is_read() -> None:
    pair = Pair()
    pair.listener.seal(KEY)
    pair.caller.seal("other")
    pair.listener.take(pair.caller.put(b"one"))
    with pytest.raises(ConnectionError):
        pair.listener.next()


def test_a_caller_without_a_certificate_of_the_run_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, foreign = certificates(tmp_path / "ours"), certificates(tmp_path / "foreign")
    show(foreign, monkeypatch)
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(ours.authority))
    with pytest.raises(ssl.SSLError):
        Pair(listening(ours))
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(ours.authority)
    without, listener = Wire(bare, "127.0.0.1"), Wire(listening(ours))
    with pytest.raises(ssl.SSLError, match="certificate"):
        listener.take(without.take(listener.take(without.shake())))
    listener = Wire(listening(ours))
    with pytest.raises(ssl.SSLError):
        listener.take(Wire(None, "127.0.0.1").put(b"in the clear"))


@pytest.mark.parametrize("wrong", ["authority", "address"])
def test_a_listener_that_is_not_who_was_called_hears_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    ours, foreign = certificates(tmp_path / "ours"), certificates(tmp_path / "foreign")
    show(ours, monkeypatch)
    shown, called = (foreign, "127.0.0.1") if wrong == "authority" else (ours, "10.9.8.7")
    with pytest.raises(ssl.SSLCertVerificationError):
        Pair(listening(shown), name=called)

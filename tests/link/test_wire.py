from __future__ import annotations

import base64
import ssl
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from morph.link import wire as wire_module
from morph.link.authority import Authority
from morph.link.wire import PART_BYTES, SIZE, Wire, context
from tests.link.pair import Pair, of_caller, own


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_messages_of_any_size_arrive_unchanged_and_one_at_a_time(pair: Pair) -> None:
    bodies = [b"", b"\n", b"x" * 100_000, bytes(range(256)) * 4000]
    data = b"".join(pair.listener.put(body) for body in bodies)
    for first in range(0, len(data), 7777):
        pair.caller.take(data[first : first + 7777])
    assert [pair.caller.next() for _ in bodies] == bodies
    assert pair.caller.next() is None
    pair.listener.take(pair.caller.put(b"back"))
    assert pair.listener.next() == b"back"


def test_a_long_message_is_never_in_memory_twice(pair: Pair) -> None:
    body = bytes(range(256)) * 10_000
    tracemalloc.start()
    try:
        for part in pair.listener.parts(body):
            assert len(part) < 2 * PART_BYTES
        assert tracemalloc.get_traced_memory()[1] < 8 * PART_BYTES
    finally:
        tracemalloc.stop()
    for part in pair.caller.parts(body):
        pair.listener.take(part)
    assert pair.listener.next() == body


def test_messages_put_before_the_handshake_ends_are_sent_after_it() -> None:
    caller, listener = Wire(of_caller(), listens=False), Wire(own(), listens=True)
    assert caller.put(b"hello") + caller.put(b"again") == b""
    listener.take(caller.take(listener.take(caller.shake())))
    assert [listener.next() for _ in range(3)] == [b"hello", b"again", None]


@pytest.mark.parametrize("piece", [1, 5000, 10**6])
def test_bytes_between_messages_come_as_they_are_wherever_the_records_end(pair: Pair, piece: int) -> None:
    body, data = bytearray(100_000), memoryview(bytes(range(250)) * 400)
    sent = pair.listener.put(b"now") + pair.listener.encrypt(data) + pair.listener.put(b"next")
    pair.caller.take(sent)
    assert pair.caller.next() == b"now"
    first = 0
    while first < len(body):
        first += pair.caller.fill(memoryview(body)[first : first + piece])
    assert body == data
    assert pair.caller.next() == b"next"


def swapped(one: bytes, two: bytes) -> bytes:
    return two + one


def changed(one: bytes, two: bytes) -> bytes:
    return one[:-1] + bytes([one[-1] ^ 1]) + two


@pytest.mark.parametrize(
    "tamper",
    [swapped, changed, lambda one, _: one + one, lambda _, two: two],
    ids=["out of order", "changed", "repeated", "one is left out"],
)
def test_a_changed_or_misplaced_message_ends_the_connection(
    pair: Pair, tamper: Callable[[bytes, bytes], bytes]
) -> None:
    data = tamper(pair.caller.put(b"one"), pair.caller.put(b"two"))

    def read() -> None:
        pair.listener.take(data)
        for said in (b"one", b"two"):
            assert pair.listener.next() == said

    with pytest.raises(OSError):
        read()


def test_neither_end_takes_its_own_messages_for_those_of_the_other(pair: Pair) -> None:
    pair.caller.take(pair.caller.put(b"said to the listener"))
    with pytest.raises(ssl.SSLError):
        pair.caller.next()


def test_a_message_may_be_long_but_not_endless(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "MOST_BYTES", 100_000)
    with pytest.raises(ConnectionError, match="more than"):
        pair.caller.put(b"x" * 100_001)
    pair.listener.take(pair.caller.encrypt(SIZE.pack(100_001)))
    with pytest.raises(ConnectionError, match="claims"):
        pair.listener.next()


def test_the_listener_knows_under_which_name_its_caller_may_call(pair: Pair) -> None:
    assert (pair.listener.other_name, pair.caller.other_name) == ("vm0", "listener")
    assert Wire(own(), listens=True).other_name == ""
    long = "a-VM_of.a-trace" * 20
    assert Pair(caller=of_caller(long)).listener.other_name == long


def bare(listens: bool) -> ssl.SSLContext:
    """Return the TLS context of a stranger that accepts every certificate."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


def shake(caller: ssl.SSLContext, listener: ssl.SSLContext) -> None:
    """Shake hands, and let the caller send one message; raise the error of either end."""
    one, two = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [caller.wrap_bio(one, two, False, "listener"), listener.wrap_bio(two, one, True)]
    for _ in range(3):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()


STRANGERS = {
    "another run's certificate": lambda: context(of_caller(secret="another"), listens=False),
    "no certificate": lambda: bare(listens=False),
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_a_caller_without_a_certificate_of_the_run_gets_nothing(stranger: Callable[[], ssl.SSLContext]) -> None:
    caller = stranger()
    caller.check_hostname, caller.verify_mode = False, ssl.CERT_NONE  # the caller accepts any peer
    with pytest.raises(ssl.SSLError, match="certificate"):
        shake(caller, context(own(), listens=True))


def test_a_caller_in_the_clear_gets_nothing() -> None:
    for said in (SIZE.pack(5) + b"hello", b"GET / HTTP/1.1\r\n\r\n"):
        with pytest.raises(ssl.SSLError):
            Wire(own(), listens=True).take(said)


def test_overheard_bytes_are_useless_on_another_connection() -> None:
    caller, listener = Wire(of_caller(), listens=False), Wire(own(), listens=True)
    hello = caller.shake()
    rest = caller.take(listener.take(hello)) + caller.put(b"start")
    listener.take(rest)
    assert listener.next() == b"start"
    again = Wire(own(), listens=True)
    again.take(hello)
    with pytest.raises(ssl.SSLError):
        again.take(rest)


def downgraded(made: ssl.SSLContext) -> ssl.SSLContext:
    made.maximum_version = ssl.TLSVersion.TLSv1_2
    return made


def with_certificate(listens: bool) -> ssl.SSLContext:
    """Return a context with one of the run's own certificates, which accepts any TLS version."""
    made = context.__wrapped__(own(), listens=listens)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    return downgraded(made)


def test_no_end_goes_down_to_an_older_version_of_tls() -> None:
    with pytest.raises(ssl.SSLError, match="protocol"):
        shake(with_certificate(False), context(own(), listens=True))
    with pytest.raises(ssl.SSLError, match="protocol"):
        shake(context(of_caller(), listens=False), with_certificate(True))


def test_a_man_in_the_middle_without_the_runs_certificate_reads_nothing() -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        Pair(own("another"), of_caller())


def test_a_worker_cannot_stand_in_for_the_manager() -> None:
    for name in ("vm1", "listener"):
        with pytest.raises(ssl.SSLError):
            shake(context(of_caller("vm0"), listens=False), context(of_caller(name), listens=True))


def test_clocks_that_differ_between_machines_decide_nothing() -> None:
    for der in map(base64.b64decode, of_caller().split(".")[1:]):
        found = x509.load_der_x509_certificate(der)
        assert (found.not_valid_before_utc.year, found.not_valid_after_utc.year) == (2000, 9999)


def test_a_holder_of_a_credential_cannot_sign_another() -> None:
    key, _, authority = of_caller().split(".")
    signed_by = x509.load_der_x509_certificate(base64.b64decode(authority)).public_key()
    theirs = serialization.load_der_private_key(base64.b64decode(key), None)
    assert theirs.public_key() != signed_by
    forged = Authority(theirs).credential().split(".")  # type: ignore[arg-type]
    with pytest.raises(ssl.SSLCertVerificationError):
        Pair(".".join([*forged[:2], authority]), of_caller("vm1"))


@pytest.mark.parametrize("text", ["", "a.b.c", "s3cret", "....", f"{own()}."])
def test_anything_else_is_not_a_credential_and_is_not_shown(text: str) -> None:
    with pytest.raises(ValueError, match=r"^this is not a credential$"):
        Wire(text, listens=False)

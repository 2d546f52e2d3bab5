"""Signed certificates, as OpenSSL reads them, and requests that are refused before signing."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from manager.enrolment.authority import (
    RequestRefused,
    WrongCertificate,
    check_certificate,
    now,
    requested_key,
    signing_request,
)
from morph.link.authority import Authority, authority_of, key_pem, new_key
from tests.waiting import BOUND_S

NODE, ADDRESS, LIFE = "tiny-1-0", "127.0.0.2", datetime.timedelta(days=30)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority(new_key())


def names_of(address: str = ADDRESS) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])


def request_with(
    *extensions: x509.ExtensionType, node: str = NODE, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None
) -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key or new_key(), hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def with_another_key(pem: str) -> str:
    kind, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    request = x509.load_pem_x509_csr(pem.encode())
    theirs, ours = (key.public_bytes(kind, form) for key in (request.public_key(), new_key().public_key()))
    changed = request.public_bytes(kind).replace(theirs, ours)
    return x509.load_der_x509_csr(changed).public_bytes(serialization.Encoding.PEM).decode()


def test_a_request_for_the_senders_own_name_and_address_is_signed() -> None:
    key = new_key()
    assert requested_key(signing_request(key, NODE, ADDRESS), NODE, ADDRESS) == key.public_key()


CA = x509.BasicConstraints(ca=True, path_length=None)
REFUSED = {
    "another address": (signing_request(new_key(), NODE, "127.0.0.3"), "something other than"),
    "a further address": (
        request_with(x509.SubjectAlternativeName([*names_of(), *names_of("127.0.0.3")])),
        "something other than",
    ),
    "no address": (request_with(), "something other than"),
    "an authority": (request_with(names_of(), CA), "something other than"),
    "an authority without an address": (request_with(CA), "something other than"),
    "another node's name": (signing_request(new_key(), "tiny-1-1", ADDRESS), "a name other than tiny-1-0"),
    "an RSA key": (request_with(names_of(), key=rsa.generate_private_key(65537, 2048)), "curve P-256"),
    "another curve": (request_with(names_of(), key=ec.generate_private_key(ec.SECP384R1())), "curve P-256"),
    "somebody else's key": (with_another_key(signing_request(new_key(), NODE, ADDRESS)), "not signed with its own"),
    "no request": ("-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n", "cannot be read"),
    "words": ("please \N{LATIN SMALL LETTER E WITH ACUTE}", "cannot be read"),
}


@pytest.mark.parametrize(("request_", "told"), REFUSED.values(), ids=REFUSED)
def test_a_request_for_anything_else_is_refused(request_: str, told: str) -> None:
    with pytest.raises(RequestRefused, match=told):
        requested_key(request_, NODE, ADDRESS)


def certificate_of(authority: Authority, key: ec.EllipticCurvePrivateKey, address: str = ADDRESS) -> str:
    return authority.certify(key.public_key(), NODE, address, LIFE, now()).decode()


def test_a_certificate_is_for_one_address_and_no_authority(authority: Authority) -> None:
    key = new_key()
    found = x509.load_pem_x509_certificate(certificate_of(authority, key).encode())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == [ADDRESS, "127.0.0.1"]
    assert found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert found.not_valid_after_utc - now() <= LIFE
    assert [part.value for part in found.subject] == [NODE]


def test_an_authority_that_is_read_back_signs_as_before(authority: Authority) -> None:
    key = new_key()
    check_certificate(certificate_of(Authority.load(authority.key_pem), key), authority.pem, key, ADDRESS)


def test_one_secret_makes_one_authority_and_another_one_another() -> None:
    ours, again, other = (authority_of.__wrapped__(secret) for secret in ("secret", "secret", "secrets"))
    assert ours.key_pem == again.key_pem != other.key_pem
    check_certificate(certificate_of(again, key := new_key()), ours.pem, key, ADDRESS)


def test_a_wrong_certificate_is_distinguished_from_the_right_one(authority: Authority) -> None:
    key, other, trusted = new_key(), Authority(new_key()), authority.pem
    check_certificate(certificate_of(authority, key), trusted, key, ADDRESS)
    early, late = now() - 2 * LIFE, now() + LIFE
    wrong: Sequence[tuple[str, str]] = [
        (certificate_of(other, key), "not from this run's authority"),
        ("words", "not from this run's authority"),
        (trusted.decode(), "not from this run's authority"),
        (certificate_of(authority, new_key()), "for another key"),
        (certificate_of(authority, key, "127.0.0.3"), "not for 127.0.0.2"),
        (authority.certify(key.public_key(), NODE, ADDRESS, LIFE, early).decode(), "clocks is wrong"),
        (authority.certify(key.public_key(), NODE, ADDRESS, LIFE, late).decode(), "clocks is wrong"),
    ]
    for pem, told in wrong:
        with pytest.raises(WrongCertificate, match=told):
            check_certificate(pem, trusted, key, ADDRESS)


def context(server: bool, authority: Authority, chain: Path, trusted: Path) -> ssl.SSLContext:
    trusted.write_bytes(authority.pem)
    kind = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
    made = ssl.create_default_context(kind, cafile=str(trusted))
    made.verify_mode, made.verify_flags = ssl.CERT_REQUIRED, made.verify_flags | ssl.VERIFY_X509_STRICT
    made.load_cert_chain(chain)
    return made


def meet(authority: Authority, folder: Path, asked: str) -> str:
    """Let two processes of the run connect, one expecting an address; return what they exchange, or the error."""
    chain, trusted, key = folder / "chain.pem", folder / "authority.pem", new_key()
    chain.write_bytes(certificate_of(authority, key).encode() + key_pem(key))
    ours, theirs = socket.socketpair()
    serving = context(True, authority, chain, trusted)

    def serve() -> None:
        with contextlib.suppress(OSError), serving.wrap_socket(theirs, server_side=True) as connection:
            connection.sendall(b"welcome")

    for end in (ours, theirs):
        end.settimeout(BOUND_S)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with context(False, authority, chain, trusted).wrap_socket(ours, server_hostname=asked) as connection:
            return connection.recv(7).decode()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    finally:
        ours.close()
        thread.join(BOUND_S)
        theirs.close()


@pytest.mark.parametrize("asked", [ADDRESS, "127.0.0.1"])
def test_openssl_takes_it_as_server_and_client_under_its_own_address(
    authority: Authority, tmp_path: Path, asked: str
) -> None:
    assert meet(authority, tmp_path, asked) == "welcome"


def test_openssl_does_not_take_it_under_another_address(authority: Authority, tmp_path: Path) -> None:
    assert "mismatch" in meet(authority, tmp_path, "127.0.0.3")

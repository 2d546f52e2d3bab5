"""Certificate authorities, made with ``cryptography``: derived from a secret, so that TLS proves who knows it.

Everyone who knows a secret derives the same authority from it, so nothing has to be exchanged beforehand: each end
shows a certificate of that authority and demands one. A process that gets a *credential* instead of the secret may call
only under the name in the credential's certificate, and cannot make another certificate.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from morph.link.wire import LISTENER

AUTHORITY_NAME = "Authority of one Morph run"
CURVE = ec.SECP256R1
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The order of that curve's group: a private key is smaller."""
LOOPBACK = "127.0.0.1"
CLOCK_SLACK = datetime.timedelta(hours=1)
ALWAYS = tuple(datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2000, 9999))
"""Certificates derived from a secret are worth as much as the secret, so their validity ignores VMs' clocks."""
CALLS, LISTENS = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
Life = tuple[datetime.datetime, ...]


@lru_cache(maxsize=8)
def authority_of(secret: str) -> Authority:
    """Return the authority that follows from a secret; if the secret is easily guessed, so is the authority."""
    found = HKDF(hashes.SHA512(), 64, salt=None, info=b"morph: certificate authority").derive(secret.encode())
    return Authority(ec.derive_private_key(int.from_bytes(found, "big") % (ORDER - 1) + 1, CURVE()))


@lru_cache(maxsize=8)
def credential_of(secret: str) -> str:
    """Return the credential of a holder of the secret, for calling and listening; the same in all of this process."""
    return authority_of(secret).credential()


class Authority:
    """Signs certificates, none of which can sign another."""

    def __init__(self, key: PrivateKey) -> None:
        self._key, name = key, name_of(AUTHORITY_NAME)
        self._certificate = (
            _builder(name, name, key.public_key(), ALWAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )

    @classmethod
    def load(cls, pem: bytes) -> Authority:
        """Return the authority with the given ``key_pem``.

        Raises ValueError if ``pem`` is not the key of an authority.
        """
        key = serialization.load_pem_private_key(pem, None)
        if not isinstance(key, PrivateKey):
            raise ValueError("the authority's key is of another kind")
        return cls(key)

    @property
    def key_pem(self) -> bytes:
        """The private key with which it signs, as PEM."""
        return key_pem(self._key)

    @property
    def pem(self) -> bytes:
        """The certificate as PEM, with which anyone can verify this authority's signatures. It is not secret."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def credential(self, caller: str = "") -> str:
        """Return the credential of one end (``morph.link.wire``), with a new key, as one line of text.

        ``caller``: the only name under which the credential may be used, and then only to call; empty: for an end that
        knows the secret.
        """
        key = new_key()
        usages = (CALLS,) if caller else (CALLS, LISTENS)
        certificate = self._certify(key.public_key(), "end", ALWAYS, usages, [x509.DNSName(caller or LISTENER)])
        parts = (_written(key, serialization.Encoding.DER), *map(_der, (certificate, self._certificate)))
        return ".".join(base64.b64encode(part).decode() for part in parts)

    def certify(
        self, key: PublicKey, node: str, address: str, life: datetime.timedelta, begin: datetime.datetime
    ) -> bytes:
        """Return a PEM certificate for one address and the key holder's own loopback; its holder may call and listen.

        ``node``: the name of the node, at most 64 characters. ``begin``: the time from which it is valid;
        ``CLOCK_SLACK`` is subtracted for clocks that differ.
        """
        addresses = dict.fromkeys(map(ipaddress.ip_address, (address, LOOPBACK)))
        names = [*map(x509.IPAddress, addresses), x509.DNSName("localhost")]
        certificate = self._certify(key, node, (begin - CLOCK_SLACK, begin + life), (LISTENS, CALLS), names)
        return certificate.public_bytes(serialization.Encoding.PEM)

    def _certify(
        self,
        key: PublicKey,
        subject: str,
        life: Life,
        usages: tuple[x509.ObjectIdentifier, ...],
        names: list[x509.GeneralName],
    ) -> x509.Certificate:
        return (
            _builder(name_of(subject), self._certificate.subject, key, life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def new_key() -> PrivateKey:
    """Return a new key for one end, or for a node."""
    return ec.generate_private_key(CURVE())


def key_pem(key: PrivateKey) -> bytes:
    """Return a key as unencrypted PEM: anyone who can read it can use it."""
    return _written(key, serialization.Encoding.PEM)


def _written(key: PrivateKey, encoding: serialization.Encoding) -> bytes:
    return key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def name_of(name: str) -> x509.Name:
    """Return a name as the subject of a certificate."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def _builder(subject: x509.Name, issuer: x509.Name, key: PublicKey, life: Life) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(life[0])
        .not_valid_after(life[1])
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )

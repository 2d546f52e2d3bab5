"""Certificates of a run, made with ``cryptography``: what signs them, what a node asks for, and what is checked."""

from __future__ import annotations

import datetime
import ipaddress

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from manager.host.ports import LOOPBACK
from morph.contract.errors import MorphError

AUTHORITY_LIFE = datetime.timedelta(days=3650)
"""Its key is gone when its run is."""
CLOCK_SLACK = datetime.timedelta(hours=1)
AUTHORITY_NAME = "Authority of one Morph run"
CURVE = ec.SECP256R1
UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What ``cryptography`` raises for bytes that are no request, or a strange one."""

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


class RequestRefused(MorphError):
    """A signing request asks for what its sender may not have."""


class WrongCertificate(MorphError):
    """A certificate is not what was asked for, or not valid now."""


def now() -> datetime.datetime:
    """Return the moment, as certificates count it."""
    return datetime.datetime.now(datetime.UTC)


def new_key() -> PrivateKey:
    """Make the key of an authority or a node."""
    return ec.generate_private_key(CURVE())


def key_pem(key: PrivateKey) -> bytes:
    """Write a key: who reads it is whom it belongs to."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class Authority:
    """Signs the certificates of one run, each for one address of one node, that may be server and client."""

    def __init__(self, certificate: x509.Certificate, key: PrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def make(cls) -> Authority:
        """Make a new one, which signs no other authority."""
        key, name, begin = new_key(), _name(AUTHORITY_NAME), now()
        certificate = (
            _builder(name, name, key.public_key(), begin, AUTHORITY_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, certificate: bytes, key: bytes) -> Authority:
        """Read one back; raises ValueError when that is not what is there."""
        found = serialization.load_pem_private_key(key, None)
        if not isinstance(found, PrivateKey):
            raise ValueError("the authority's key is of another kind")
        return cls(x509.load_pem_x509_certificate(certificate), found)

    @property
    def pem(self) -> bytes:
        """The certificate, by which everybody knows what this authority signed. No secret."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """What it signs with."""
        return key_pem(self._key)

    def certify(
        self, key: PublicKey, node: str, address: str, life: datetime.timedelta, begin: datetime.datetime
    ) -> bytes:
        """Return a certificate for one address, and for the loopback of whoever has the key.

        Args:
            key: Of the node.
            node: Its name, at most 64 characters.
            address: At which others reach it.
            life: How long it is valid.
            begin: From when on, less what clocks may differ.
        """
        addresses = dict.fromkeys((ipaddress.ip_address(address), ipaddress.ip_address(LOOPBACK)))
        names = [*map(x509.IPAddress, addresses), x509.DNSName("localhost")]
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        return (
            _builder(_name(node), self._certificate.subject, key, begin, life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
        )


def signing_request(key: PrivateKey, node: str, address: str) -> str:
    """Write what a node asks for, in PEM: a certificate for its key, its name and this address."""
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(node)).add_extension(names, critical=False)
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def requested_key(pem: str, node: str, address: str) -> PublicKey:
    """Return the key of a signing request by this node from this address, for these and nothing else.

    Raises:
        RequestRefused: it asks for something else, is damaged, or its sender does not have the key.
    """
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        key, signed = request.public_key(), request.is_signature_valid
        extensions = [extension.value for extension in request.extensions]
    except UNREADABLE:
        raise RequestRefused("the signing request cannot be read") from None
    if not isinstance(key, PublicKey) or not isinstance(key.curve, CURVE):
        raise RequestRefused("the signing request's key is not one of the curve P-256")
    if not signed:
        raise RequestRefused("the signing request is not signed with its own key")
    if request.subject != _name(node):
        raise RequestRefused(f"the signing request is for another name than {node}")
    wanted = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    if extensions != [wanted]:
        raise RequestRefused(f"the signing request is for something else than the address {address} it comes from")
    return key


def check_certificate(pem: str, authority: bytes, key: PrivateKey, address: str) -> None:
    """See that a certificate is of this authority, for this key and address, and valid now.

    Raises:
        WrongCertificate: it is not.
    """
    try:
        found, signer = x509.load_pem_x509_certificate(pem.encode()), x509.load_pem_x509_certificate(authority)
        found.verify_directly_issued_by(signer)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
        raise WrongCertificate("the certificate is none of this run's authority") from error
    if found.public_key() != key.public_key():
        raise WrongCertificate("the certificate is for another key")
    if ipaddress.ip_address(address) not in names.get_values_for_type(x509.IPAddress):
        raise WrongCertificate(f"the certificate is not for {address}")
    if not found.not_valid_before_utc <= now() <= found.not_valid_after_utc:
        raise WrongCertificate(
            f"the certificate is valid from {found.not_valid_before_utc} to {found.not_valid_after_utc}, "
            f"and here it is {now()}: one of the two clocks is wrong"
        )


def _builder(
    name: x509.Name, issuer: x509.Name, key: PublicKey, begin: datetime.datetime, life: datetime.timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - CLOCK_SLACK)
        .not_valid_after(begin + life)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


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

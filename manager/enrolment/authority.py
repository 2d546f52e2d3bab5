"""Signing requests of nodes for Ray's TLS, and the checks of requests and certificates."""

from __future__ import annotations

import datetime
import ipaddress

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization

from morph.contract.errors import MorphError
from morph.link.authority import CURVE, PrivateKey, PublicKey, name_of

UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""The errors that ``cryptography`` raises for bytes that are not a request, or not an ordinary one."""


class RequestRefused(MorphError):
    """A signing request asks for something that its sender may not have."""


class WrongCertificate(MorphError):
    """A certificate differs from the request, or is not valid now."""


def now() -> datetime.datetime:
    """Return the present moment, in the form that certificates use."""
    return datetime.datetime.now(datetime.UTC)


def signing_request(key: PrivateKey, node: str, address: str) -> str:
    """Write a node's signing request in PEM, for its key, its name and this address."""
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    request = x509.CertificateSigningRequestBuilder().subject_name(name_of(node)).add_extension(names, critical=False)
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def requested_key(pem: str, node: str, address: str) -> PublicKey:
    """Return the key of a signing request for this node and this address only.

    RequestRefused: the request is for something else, is damaged, or its sender does not have the key.
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
    if request.subject != name_of(node):
        raise RequestRefused(f"the signing request is for a name other than {node}")
    wanted = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    if extensions != [wanted]:
        raise RequestRefused(f"the signing request is for something other than {address}, from which it comes")
    return key


def check_certificate(pem: str, authority: bytes, key: PrivateKey, address: str) -> None:
    """Raise WrongCertificate unless it is from this authority, for this key and address, and valid now."""
    try:
        certificate, signer = x509.load_pem_x509_certificate(pem.encode()), x509.load_pem_x509_certificate(authority)
        certificate.verify_directly_issued_by(signer)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
        raise WrongCertificate("the certificate is not from this run's authority") from error
    if certificate.public_key() != key.public_key():
        raise WrongCertificate("the certificate is for another key")
    if ipaddress.ip_address(address) not in names.get_values_for_type(x509.IPAddress):
        raise WrongCertificate(f"the certificate is not for {address}")
    if not certificate.not_valid_before_utc <= now() <= certificate.not_valid_after_utc:
        raise WrongCertificate(
            f"the certificate is valid from {certificate.not_valid_before_utc} to {certificate.not_valid_after_utc}, "
            f"and here it is {now()}: one of the two clocks is wrong"
        )

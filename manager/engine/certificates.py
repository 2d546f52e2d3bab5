"""Certificates of one run, for Ray's TLS: an authority, whose key is thrown away, and one pair that it signed.

Every process of the run shows the pair, as server and as client, and takes nobody without one of this authority.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from morph.contract.errors import ConfigError

LIFE = datetime.timedelta(days=365)
CLOCK_SLACK = datetime.timedelta(hours=1)
FILES = ("authority.pem", "certificate.pem", "key.pem")


@dataclass(frozen=True)
class Certificates:
    """Paths of a run's files, readable by the user alone."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def below(cls, directory: Path) -> Certificates:
        """Where they are, or are to be."""
        return cls(*(directory / name for name in FILES))

    @property
    def ray_environment(self) -> dict[str, str]:
        """What Ray reads once, when it is imported."""
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(self.certificate),
            "RAY_TLS_SERVER_KEY": str(self.key),
            "RAY_TLS_CA_CERT": str(self.authority),
        }


def make_certificates(directory: Path, address: str) -> Certificates:
    """Make and write them. The authority's key exists in this call alone, so that nothing else is ever signed by it.

    Args:
        directory: Made with mode 0700; must not be there.
        address: At which Ray's processes reach each other.

    Raises:
        ConfigError: the library that makes certificates is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError as error:
        raise ConfigError(
            "certificates need a library that is not installed",
            field="vms.tls",
            value=True,
            allowed="pip install 'morph-train[tls]'",
        ) from error

    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(authority_name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SLACK)
            .not_valid_after(now + LIFE)
        )

    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Authority of one Morph run")])
    node_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Node of one Morph run")])
    authority_key, node_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    names = [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("localhost")]
    authority = (
        certificate(authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    node = (
        certificate(node_name, node_key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    private = node_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    directory.mkdir(mode=0o700)
    found = Certificates.below(directory)
    _write_private(found.authority, authority.public_bytes(serialization.Encoding.PEM))
    _write_private(found.certificate, node.public_bytes(serialization.Encoding.PEM))
    _write_private(found.key, private)
    return found


def _write_private(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)

"""Files of certificates, which only their owner can read, and Ray's settings for them. Needs no ``cryptography``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FILES = ("authority.pem", "certificate.pem", "key.pem", "authority-key.pem")


@dataclass(frozen=True)
class Certificates:
    """A machine's certificate, key and trusted authority, whose key (``authority_key``) only a manager has."""

    authority: Path
    certificate: Path
    key: Path
    authority_key: Path

    @classmethod
    def below(cls, directory: Path) -> Certificates:
        """Return the paths at which the files are, or will be."""
        return cls(*(directory / name for name in FILES))

    @property
    def ray_environment(self) -> dict[str, str]:
        """The environment variables that Ray reads once, when it is imported."""
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(self.certificate),
            "RAY_TLS_SERVER_KEY": str(self.key),
            "RAY_TLS_CA_CERT": str(self.authority),
        }

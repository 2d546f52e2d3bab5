"""Certificates of one run, for Ray's TLS: an authority, and a pair that it signed for the manager's machine.

Each process of the run on that machine shows the pair, as server and as client, and accepts only peers with a
certificate from this authority. If all VMs are on that machine, they show the same pair, and the authority's key is
discarded. If a provider brings the VMs, the key is kept as long as the run lives, and each VM gets its own pair
(``manager.enrolment``).
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manager.enrolment.files import Certificates
from manager.host.ports import LOOPBACK
from morph.contract.errors import ClusterError
from morph.contract.files import PRIVATE, write_whole

if TYPE_CHECKING:
    from morph.link.authority import Authority

LIFE = datetime.timedelta(days=365)
NAME = "Manager of one Morph run"


@dataclass(frozen=True)
class Tls:
    """The settings for encrypting the traffic of a run's Ray processes.

    ``address``: where these are reached on the manager's machine. ``enrols``: whether VMs elsewhere get certificates
    too.
    """

    address: str = LOOPBACK
    enrols: bool = False


def certificates_of(directory: Path) -> Certificates:
    """Return where the certificates of a run are; ``directory``: the directory with Ray's token."""
    return Certificates.below(directory / "tls")


def make_certificates(directory: Path, tls: Tls) -> Certificates:
    """Make the certificates below a run's directory. Without ``tls.enrols`` the authority's key is not kept."""
    from manager.enrolment.authority import now
    from morph.link.authority import Authority, key_pem, new_key

    authority, key = Authority(new_key()), new_key()
    files = certificates_of(directory)
    files.key.parent.mkdir(mode=0o700)
    write_whole(files.authority, authority.pem, PRIVATE)
    write_whole(files.certificate, authority.certify(key.public_key(), NAME, tls.address, LIFE, now()), PRIVATE)
    write_whole(files.key, key_pem(key), PRIVATE)
    if tls.enrols:
        write_whole(files.authority_key, authority.key_pem, PRIVATE)
    return files


def load_authority(directory: Path) -> Authority:
    """Return the authority that signs for a run's VMs, from any manager; ClusterError if it is missing or damaged."""
    from morph.link.authority import Authority

    try:
        return Authority.load(certificates_of(directory).authority_key.read_bytes())
    except (OSError, ValueError) as error:
        raise ClusterError("the authority that signs the VMs' certificates is gone") from error

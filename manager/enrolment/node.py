"""Runs on a VM before its Ray node: gets a certificate from the manager, then becomes the node, which uses the
certificate.

``python -m manager.enrolment.node --manager HOST:PORT --node NAME --secret-file PATH --authority PATH --directory PATH
--patience-s S [--address IP] -- COMMAND...``

The key is made here, a new one for each start, and never leaves the VM. COMMAND gets ``--node-ip-address`` with the
address in the certificate.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from manager.enrolment.authority import WrongCertificate, check_certificate, signing_request
from manager.enrolment.files import Certificates
from manager.notices.call import ERRAND, arguments_of_node, called, secret_in
from morph.contract.errors import MorphError
from morph.contract.files import PRIVATE, write_whole
from morph.link.authority import key_pem, new_key

ANSWER_TIMEOUT_S = 10.0
RETRY_S = 2.0
MakeRequest = Callable[[str], str]
"""Writes a signing request for an address."""


class NotEnrolled(MorphError):
    """There is no certificate, and repeating the request does not help."""


@dataclass(frozen=True)
class ManagerContact:
    """A node's manager, and the node's name. ``source``: the address to call from; empty: the kernel's choice."""

    manager: tuple[str, int]
    node: str
    secret: str
    source: str = ""


@dataclass(frozen=True)
class Granted:
    """A certificate in PEM, and its address."""

    certificate: str
    address: str


def ask(place: ManagerContact, make_request: MakeRequest) -> Granted:
    """Request a certificate once; NotEnrolled if the manager refuses.

    OSError: the manager cannot be reached or is slow, or the answering process cannot prove that it is the manager.
    """
    with called(place.manager, place.secret, place.node, ERRAND, source=place.source) as session:
        address = session.own_address
        session.tell({"kind": "certificate", "request": make_request(address)})
        answer = session.hear(ANSWER_TIMEOUT_S)
    if "refused" in answer:
        raise NotEnrolled(str(answer["refused"]))
    return Granted(str(answer.get("certificate")), address)


def ask_for_long(
    place: ManagerContact, make_request: MakeRequest, patience_s: float, retry_s: float = RETRY_S
) -> Granted:
    """Repeat the request for this number of seconds and one more attempt; NotEnrolled: no answer, or a refusal."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return ask(place, make_request)
        except OSError as error:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                host, port = place.manager
                raise NotEnrolled(f"no certificate came from {host}:{port} within {patience_s:g} s: {error}") from error
            time.sleep(min(retry_s, left_s))


def enrol(place: ManagerContact, authority: Path, directory: Path, patience_s: float) -> tuple[Certificates, str]:
    """Get a certificate for a new key; return both paths and the certificate's address. NotEnrolled: there is none."""
    key, trusted = new_key(), authority.read_bytes()
    granted = ask_for_long(place, lambda address: signing_request(key, place.node, address), patience_s)
    try:
        check_certificate(granted.certificate, trusted, key, granted.address)
    except WrongCertificate as error:
        raise NotEnrolled(str(error)) from error
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    files = Certificates.below(directory)
    write_whole(files.authority, trusted, PRIVATE)
    write_whole(files.key, key_pem(key), PRIVATE)
    write_whole(files.certificate, granted.certificate.encode(), PRIVATE)
    return files, granted.address


def main(arguments: Sequence[str] | None = None) -> None:
    """Enrol, then become the command."""
    parser = arguments_of_node("manager.enrolment.node")
    parser.add_argument("--authority", required=True, type=Path)
    parser.add_argument("--directory", required=True, type=Path)
    parser.add_argument("--patience-s", required=True, type=float)
    parser.add_argument("--address", default="")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    place = ManagerContact(given.manager, given.node, secret_in(given), given.address)
    try:
        files, address = enrol(place, given.authority, given.directory, given.patience_s)
    except NotEnrolled as error:
        sys.exit(f"error: no TLS: {error}")
    command = [*given.command, f"--node-ip-address={address}"]
    os.execve(command[0], command, {**os.environ, **files.ray_environment})


if __name__ == "__main__":
    main()

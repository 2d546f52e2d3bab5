"""A node, its manager's notice server, and a man in the middle, over real connections."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from manager.engine.joining import notice_server
from manager.engine.joining.certificates import Tls, certificates_of, load_authority, make_certificates
from manager.engine.joining.enrolment_desk import LIFE, EnrolmentDesk
from manager.engine.joining.notice_server import NoticeServer
from manager.engine.loop.event_queue import EventQueue
from manager.enrolment.authority import check_certificate, now, signing_request
from manager.enrolment.node import ManagerContact, NotEnrolled, ask, enrol
from manager.journal.records import Fact
from manager.notices.call import ERRAND, called
from morph.contract.errors import ClusterError
from morph.link.authority import Authority, authority_of, new_key
from tests.link.pair import Tamper, man_in_the_middle
from tests.waiting import BOUND_S

SECRET, NODE, ADDRESS = "s3cret-of-this-run", "tiny-1-0", "127.0.0.2"
MAX_REQUEST_CHARACTERS = 4096


class World:
    """A manager's notice server, with its signing keys in files, as in a run."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.event_queue = directory, EventQueue()
        self.run = directory / "run"
        self.run.mkdir()
        made = make_certificates(self.run, Tls(enrols=True))
        self.authority = made.authority
        self.server = self.open()

    def open(self) -> NoticeServer:
        desk = EnrolmentDesk(self.event_queue, load_authority(self.run))
        return NoticeServer(self.event_queue, SECRET, desk=desk)

    def place(self, port: int = 0, secret: str = SECRET) -> ManagerContact:
        return ManagerContact(("127.0.0.1", port or self.server.port), NODE, credential(secret), ADDRESS)

    def enrol(self, port: int = 0, secret: str = SECRET, patience_s: float = 0.0) -> str:
        _, address = enrol(self.place(port, secret), self.authority, self.directory / "node" / "tls", patience_s)
        return address

    def facts(self) -> list[Fact]:
        found = [self.event_queue.get(0.0) for _ in range(len(self.event_queue))]
        return [stamped.item for stamped in found if stamped is not None and isinstance(stamped.item, Fact)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.server.close()


def credential(secret: str = SECRET) -> str:
    return authority_of(secret).credential("node")


def test_a_node_gets_a_certificate_for_its_own_key_and_address(world: World) -> None:
    assert world.enrol() == ADDRESS
    folder = world.directory / "node" / "tls"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == dict.fromkeys(("authority.pem", "certificate.pem", "key.pem"), 0o600)
    key = load_pem_private_key((folder / "key.pem").read_bytes(), None)
    found = x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes())
    assert found.public_key() == key.public_key()
    assert found.not_valid_after_utc - now() <= LIFE
    assert world.facts() == [Fact(name="node_enrolled", detail=f"{NODE} at {ADDRESS}")]


def test_a_node_that_starts_again_makes_another_key(world: World) -> None:
    key = world.directory / "node" / "tls" / "key.pem"
    world.enrol()
    before = key.read_bytes()
    world.enrol()
    assert key.read_bytes() != before


def test_a_manager_that_takes_over_signs_as_the_killed_one_did(world: World) -> None:
    world.server.close()
    world.server = world.open()
    assert world.enrol() == ADDRESS
    certificates_of(world.run).authority_key.unlink()
    with pytest.raises(ClusterError, match="the authority that signs the VMs' certificates is gone"):
        load_authority(world.run)


def test_without_the_secret_no_certificate_is_signed(world: World) -> None:
    with pytest.raises(NotEnrolled, match="no certificate came"):
        world.enrol(secret="wrong")
    assert world.facts() == []


def test_a_manager_without_the_secret_is_not_believed(world: World, tmp_path: Path) -> None:
    other = NoticeServer(EventQueue(), "wrong", desk=EnrolmentDesk(EventQueue(), Authority(new_key())))
    try:
        with pytest.raises(NotEnrolled, match="no certificate came"):
            world.enrol(port=other.port)
    finally:
        other.close()
    assert not (tmp_path / "node").exists()


def test_an_eavesdropper_changes_and_reads_nothing(world: World) -> None:
    of_caller, of_listener = Tamper(), Tamper()
    with man_in_the_middle(world.server.port, ADDRESS, of_caller, of_listener) as port:
        assert world.enrol(port) == ADDRESS
    overheard = b"".join(of_caller.records + of_listener.records)
    for told in (SECRET, NODE, "certificate", "BEGIN"):
        assert told.encode() not in overheard


@pytest.mark.parametrize("end", ["of_caller", "of_listener"])
def test_whatever_is_changed_on_the_way_nothing_is_signed_or_believed(world: World, end: str) -> None:
    counted = Tamper()
    with man_in_the_middle(world.server.port, ADDRESS, **{end: counted}) as port:
        assert world.enrol(port) == ADDRESS
    world.facts()
    shutil.rmtree(world.directory / "node")
    for place in range(len(counted.records)):
        with (
            man_in_the_middle(world.server.port, ADDRESS, **{end: Tamper(place)}) as port,
            pytest.raises(NotEnrolled, match="no certificate came"),
        ):
            world.enrol(port)
        assert end == "of_listener" or world.facts() == []
        assert not (world.directory / "node").exists()


def test_a_request_from_another_address_is_refused_and_reported(world: World) -> None:
    with (
        man_in_the_middle(world.server.port, "127.0.0.3") as port,
        pytest.raises(NotEnrolled, match=r"something other than 127\.0\.0\.3, from which it comes"),
    ):
        world.enrol(port, patience_s=BOUND_S)
    (fact,) = world.facts()
    assert (fact.name, fact.detail[: len(NODE)]) == ("enrolment_refused", NODE)


def test_overheard_bytes_are_useless_on_another_connection(world: World) -> None:
    overheard = Tamper()
    with man_in_the_middle(world.server.port, ADDRESS, of_caller=overheard) as port:
        world.enrol(port)
    world.facts()
    with socket.create_connection(("127.0.0.1", world.server.port), BOUND_S, (ADDRESS, 0)) as connection:
        connection.settimeout(BOUND_S)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"".join(overheard.records))
            while connection.recv(1 << 16):
                pass
    assert world.facts() == []


@pytest.mark.parametrize(
    ("node", "request_text"),
    [(NODE, "x" * (MAX_REQUEST_CHARACTERS + 1)), (NODE, None), ("n1.n2", "CSR"), ("n" * 65, "CSR"), ("N1\n", "CSR")],
)
def test_malformed_requests_are_rejected_even_with_the_secret(
    world: World, node: str, request_text: str | None
) -> None:
    def ask() -> None:
        with called(("127.0.0.1", world.server.port), credential(), node, ERRAND) as session:
            session.tell({"kind": "certificate", "request": request_text})
            session.receive(BOUND_S)

    with pytest.raises(ConnectionError):  # an invalid name already ends the handshake
        ask()
    assert world.facts() == []
    assert world.enrol() == ADDRESS


def test_a_slow_client_is_rejected_however_steadily_it_sends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice_server, "HELLO_TIMEOUT_S", 0.3)
    connection = socket.create_connection(("127.0.0.1", world.server.port), BOUND_S)
    connection.settimeout(0.05)
    with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sent, received = 0, b"-"
        while received and sent < BOUND_S / 0.05:
            connection.sendall(b" ")
            sent += 1
            with contextlib.suppress(TimeoutError):
                received = connection.recv(1000)
        assert not received, "it was listened to for ever"
    monkeypatch.setattr(notice_server, "HELLO_TIMEOUT_S", BOUND_S)  # a node may be slow too
    assert world.enrol() == ADDRESS


def test_without_encryption_no_certificate_is_signed(world: World) -> None:
    server = NoticeServer(world.event_queue, SECRET)
    try:
        with pytest.raises(OSError):
            ask(world.place(server.port), lambda address: signing_request(new_key(), NODE, address))
    finally:
        server.close()
    assert world.facts() == []


def test_a_manager_that_comes_late_is_waited_for(world: World) -> None:
    port = world.server.port
    world.server.close()
    enrolled: list[str] = []
    thread = threading.Thread(target=lambda: enrolled.append(world.enrol(port, patience_s=BOUND_S)))
    thread.start()
    desk = EnrolmentDesk(world.event_queue, load_authority(world.run))
    world.server = NoticeServer(world.event_queue, SECRET, port=port, desk=desk)
    thread.join(BOUND_S)
    assert enrolled == [ADDRESS]


SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def test_the_command_becomes_the_node_with_its_certificate(world: World, tmp_path: Path) -> None:
    secret = tmp_path / "node-secret"
    secret.write_text(f"{credential()}\n", encoding="utf-8")
    options = [
        f"--manager=127.0.0.1:{world.server.port}", f"--node={NODE}", f"--secret-file={secret}",
        f"--authority={world.authority}", f"--directory={tmp_path / 'tls'}", "--patience-s=5", f"--address={ADDRESS}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "manager.enrolment.node", *options, "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", SHOW, "--block"], capture_output=True, text=True, timeout=BOUND_S, check=True
    )
    arguments, environment = json.loads(done.stdout)
    assert arguments == ["--block", f"--node-ip-address={ADDRESS}"]
    files = {name: environment[f"RAY_TLS_{name}"] for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT")}
    assert environment["RAY_USE_TLS"] == "1"
    pem = Path(files["SERVER_CERT"]).read_text()
    key = load_pem_private_key(Path(files["SERVER_KEY"]).read_bytes(), None)
    check_certificate(pem, Path(files["CA_CERT"]).read_bytes(), key, ADDRESS)  # type: ignore[arg-type]
    assert secret.read_text().strip() not in json.dumps([arguments, environment, os.environ.copy()])
    world.server.close()
    refused = subprocess.run(
        [*(part.replace("=5", "=0") if "patience" in part else part for part in command), "/bin/true"],
        capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: no TLS: no certificate came from 127.0.0.1:")
    assert len(refused.stderr.splitlines()) == 1

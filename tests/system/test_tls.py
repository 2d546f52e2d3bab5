"""A run whose orders are encrypted: the same weights, and nobody without a certificate is let in."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from manager.engine.certificates import Certificates, make_certificates
from morph.checkpoint.manifest import read_manifest
from morph.contract.profile import load_profile
from tests.system.harness import JOB, uninterrupted
from tests.system.watched import WatchedMorph

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

STEPS = 400
SETTINGS = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
BOUND_S = 20.0
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""With which every connection of HTTP/2, and so of gRPC, begins; a server answers with a frame of its own."""


def let_in(port: int, context: ssl.SSLContext | None) -> bool:
    """Whether the head node answers someone who comes like this; None: without TLS."""
    with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as plain:
        try:
            connection = context.wrap_socket(plain, server_hostname="127.0.0.1") if context else plain
            with connection:
                connection.sendall(HELLO)
                return connection.recv(9) != b""
        except (ssl.SSLError, ConnectionError):
            return False


def contexts(authority: str, certificate: str, key: str, other: Certificates) -> dict[str, ssl.SSLContext | None]:
    """A member of the run, and strangers."""
    found: dict[str, ssl.SSLContext | None] = {"without TLS": None}
    shown = {"a member": (certificate, key), "of another run": (other.certificate, other.key), "no certificate": None}
    for name, chain in shown.items():
        context = ssl.create_default_context(cafile=authority)
        context.set_alpn_protocols(["h2"])
        if chain is not None:
            context.load_cert_chain(*chain)
        found[name] = context
    return found


def test_a_run_with_tls_has_the_same_weights_and_refuses_whoever_has_no_certificate_of_it(
    calibrated: Path, tmp_path: Path
) -> None:
    run_dir, cluster = tmp_path / "run", tmp_path / "cluster.yaml"
    cluster.write_text("vms: {num_vms: 2, tls: true}\npolicy: {checkpoint_every_steps: 10}\n", encoding="utf-8")
    arguments = ("--profile", calibrated, "--cluster", cluster, "--run-dir", run_dir, "--steps", STEPS, "--plain")
    other = make_certificates(tmp_path / "other", "127.0.0.1")
    with WatchedMorph(tmp_path / "made", "run", JOB, *arguments) as command:
        command.wait_for("the checkpoint of version")
        environments = [process.environ() for process in command.family() if process.is_running()]
        shown = next(found for found in environments if found.get("RAY_USE_TLS") == "1")
        (head,) = [found.port for found in command.listening() if found.process == "gcs_server"]
        member = {name: shown[name] for name in SETTINGS}
        visitors = contexts(
            member["RAY_TLS_CA_CERT"],
            member["RAY_TLS_SERVER_CERT"],
            member["RAY_TLS_SERVER_KEY"],
            other,
        )
        answered = {name for name, context in visitors.items() if let_in(head, context)}
        assert command.process_runs, command.output
        assert answered == {"a member"}
        command.wait_for("picture:")
        assert command.wait_for_end() == 0, command.output
        assert not Path(member["RAY_TLS_SERVER_KEY"]).exists()
    manifest = read_manifest(str(run_dir / "checkpoints"), STEPS)
    reference = uninterrupted(STEPS, tmp_path / "reference", load_profile(calibrated).num_sections)
    assert {entry.unit: entry.sha256 for entry in manifest.units} == reference

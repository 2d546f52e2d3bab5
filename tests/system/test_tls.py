"""A run whose Ray traffic is encrypted has the same weights, and accepts no connection without a certificate."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.engine.joining.certificates import Tls, make_certificates
from manager.enrolment.files import Certificates
from morph.checkpoint.manifest import read_manifest
from morph.contract.profile import load_profile
from tests.system.encrypted import answered, visitors
from tests.system.exposure import shown_by
from tests.system.harness import uninterrupted
from tests.system.held import HeldJob
from tests.system.watched import WatchedMorph

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STEPS = 12
SETTINGS = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")


def test_a_run_with_tls_has_equal_weights_and_refuses_strangers(calibrated: Path, tmp_path: Path) -> None:
    """``test_provided_vms`` has several workers in such runs."""
    run_dir, cluster = tmp_path / "run", tmp_path / "cluster.yaml"
    cluster.write_text(
        "vms: {num_vms: 1, tls: true}\npolicy: {checkpoint_every_steps: 4, order_timeout_s: 500}\n", encoding="utf-8"
    )
    arguments = ("--profile", calibrated, "--cluster", cluster, "--run-dir", run_dir, "--steps", STEPS, "--verbose")
    (tmp_path / "other").mkdir()
    job = HeldJob(tmp_path / "code", tmp_path / "gate", 6)
    other = make_certificates(tmp_path / "other", Tls())
    with WatchedMorph(tmp_path / "made", "run", job.path, *arguments) as command:
        command.wait_for("the checkpoint of version")
        environments = shown_by(command.family()).environments.values()
        shown = next(found for found in environments if found.get("RAY_USE_TLS") == "1")
        (head,) = [found.port for found in command.listening() if found.process == "gcs_server"]
        member = Certificates(*(Path(shown[name]) for name in SETTINGS), authority_key=Path("none"))
        coming = visitors(member.authority, {"a member": member, "of another run": other, "no certificate": None})
        let_in = answered("127.0.0.1", head, coming)
        assert command.process_runs, command.output
        assert let_in == {"a member"}
        job.let_go()
        command.wait_for("to draw this run:")
        assert command.wait_for_end() == 0, command.output
        assert not member.key.exists()
    manifest = read_manifest(str(run_dir / "checkpoints"), STEPS)
    reference = uninterrupted(STEPS, tmp_path / "reference", load_profile(calibrated).num_sections)
    assert {entry.unit: entry.sha256 for entry in manifest.units} == reference

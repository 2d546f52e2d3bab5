"""A run with checkpoints in an object store over the real SDKs: refused, failing, stopped, resumed and pruned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest

from manager.report.journal_reader import read_report
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.profile import load_profile
from morph.contract.rules import CheckpointRules
from tests.checkpoint.fake_blobs import CONTAINER, BlobService, blob_service
from tests.checkpoint.fake_buckets import BucketService, bucket_service
from tests.cli.given import without_phases
from tests.system.commands import RunningMorph, ended
from tests.system.exposure import files_below, files_with
from tests.system.harness import uninterrupted
from tests.system.held import BEAT_S, ORDER_S, HeldJob
from tests.waiting import START_S

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

STEPS, MANY = 60, 10_000  # a worker that reads half of the samples is held at 44
CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"


@dataclass(frozen=True)
class Place:
    """Where checkpoints go.

    ``wrong``: the environment of a user whom the store does not know. ``expired``: how the store refuses credentials
    that were valid before.
    """

    url: str
    service: BlobService | BucketService
    secret: str
    environment: dict[str, str]
    wrong: dict[str, str]
    expired: tuple[int, str]


def _blobs(stack: ExitStack) -> Place:
    pytest.importorskip("adlfs")
    service = stack.enter_context(blob_service())
    known = {CONNECTION: service.connection_string}
    wrong = {CONNECTION: BlobService(port=service.port).connection_string}
    return Place(f"abfs://{CONTAINER}/run", service, service.key, known, wrong, (403, "AuthenticationFailed"))


def _buckets(stack: ExitStack) -> Place:
    service = stack.enter_context(bucket_service())
    wrong = BucketService(port=service.port).environment
    url, expired = f"s3://{service.bucket}/run", (400, "ExpiredToken")
    return Place(url, service, service.key, service.environment, wrong, expired)


@pytest.fixture(params=[_blobs, _buckets], ids=["Azure", "S3"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with ExitStack() as stack:
        place: Place = request.param(stack)
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        filesystem = fsspec.get_filesystem_class(place.url.partition(":")[0])
        filesystem.clear_instance_cache()
        stack.callback(filesystem.clear_instance_cache)
        yield place


def test_runs_in_a_failing_store_are_resumed_and_pruned_with_equal_weights(
    place: Place, calibrated: Path, tmp_path: Path
) -> None:
    run_dir, cluster = tmp_path / "run", tmp_path / "cluster.yaml"
    job = HeldJob(tmp_path / "code", tmp_path / "gate", 7)  # one checkpoint
    named = ", ".join(place.environment)
    vms = f"{{num_vms: 2, launcher: processes, pass_variables: [{named}]}}"
    beats = f"start_patience_s: {START_S}, heartbeat_timeout_s: {BEAT_S}"
    policy = f"{{checkpoint_every_steps: 5, {beats}, order_timeout_s: {ORDER_S}}}"
    cluster.write_text(f"vms: {vms}\npolicy: {policy}\n", encoding="utf-8")
    arguments = (
        *("run", job.path, "--profile", calibrated, "--cluster", cluster, "--run-dir", run_dir, "--steps", STEPS),
        *("--checkpoint-url", place.url, "--verbose", "--no-page"),
    )
    refused = ended(*arguments, **place.wrong)
    (line,) = without_phases(refused.stderr)
    assert f"{place.url}: cannot be read: " in line
    assert refused.returncode == 1
    with RunningMorph(*arguments) as run:
        run.wait_for_line("the checkpoint of version")
        with place.service.lock:
            place.service.faults += [place.expired] * MANY
        job.allow(14)  # the save of version 10, even if a step is read twice
        told = run.wait_for_line("could not write its part of a checkpoint: unit ")
        assert "Error: " in told
        with place.service.lock:
            place.service.faults.clear()
        job.allow(22)
        run.wait_for_line("the checkpoint of version")
        run.press_ctrl_c()
        run.wait_for_line("SIGINT: the run ends at the next step boundary")
        job.let_go()
        assert run.wait_for_end() == 130, run.output
    stopped = read_report(run_dir).version
    assert complete_versions(place.url)[-1] == stopped < STEPS
    with RunningMorph("resume", run_dir, "--plain", "--no-page") as resumed:
        resumed.wait_for_line(f"all {STEPS} steps are done and saved")
        assert resumed.wait_for_end() == 0, resumed.output
    versions = complete_versions(place.url)
    assert (len(versions), versions[-1]) == (CheckpointRules().keep_newest, STEPS)
    manifest = read_manifest(place.url, STEPS)
    reference = uninterrupted(STEPS, tmp_path / "undisturbed", load_profile(calibrated).num_sections)
    assert {entry.unit: entry.sha256 for entry in manifest.units} == reference
    files = {str(path): data for path, data in files_below(run_dir)}
    shown = {"refused": refused.stdout + refused.stderr, "run": run.output, "resumed": resumed.output}
    assert files_with({**files, **{name: text.encode() for name, text in shown.items()}}, [place.secret]) == set()
    assert not any(name.endswith(".safetensors") for name in files)

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from azure.core.exceptions import ClientAuthenticationError
from typer.testing import CliRunner

from manager.providers.azure import provider as azure_provider
from manager.providers.hosts.ssh import SshHost
from morph.cli.main import app
from tests.providers.azure_world import BOUNDS, SPEC, Credential, Line, azure_client, provider
from tests.providers.fake_arm import FakeArm, Fault, served

AZURE = Path(__file__).parents[2] / "configs/clouds/azure.yaml"


@pytest.fixture
def arm() -> Iterator[FakeArm]:
    with served() as fake:
        yield fake


def cloud_file(arm: FakeArm, directory: Path, monkeypatch: pytest.MonkeyPatch, **changes: str) -> Path:
    """Return a cloud file for the fake Azure, and a client of this Azure."""
    spec = SPEC.model_copy(update=changes)

    def client(subscription: str, **where: str | None) -> object:
        assert where == {"base_url": spec.resource_manager, "authority": None}
        return azure_client(subscription, open_credential=Credential, base_url=arm.url, policies=[Line()])

    monkeypatch.setattr(azure_provider, "azure_client", client)
    monkeypatch.setattr(azure_provider, "Bounds", lambda: BOUNDS)
    path = directory / "azure.yaml"
    path.write_text(spec.model_dump_json(), encoding="utf-8")  # JSON is YAML
    return path


def morph(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def test_a_dry_run_prints_what_would_be_created_without_requests() -> None:
    code, output = morph("cloud", "dry-run", AZURE, "--count", 2, "--job", "tiny")
    assert code == 0
    calls = json.loads(output)
    assert [call["put"].rsplit("/", 1)[-1] for call in calls] == ["run", "tiny-1-0", "tiny-1-1"]
    assert calls[1]["body"]["properties"]["hardwareProfile"] == {"vmSize": "Standard_NC4as_T4_v3"}
    assert calls[1]["body"]["properties"]["evictionPolicy"] == "Delete"
    assert calls[1]["body"]["properties"]["storageProfile"]["osDisk"]["diskSizeGB"] == 128


def test_a_dry_run_shows_the_cloud_config_without_secrets(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    described = {"kind": "azure", "cloud": str(AZURE), "keep": 1, "memory_bytes": 10**9, "address": "10.0.0.4"}
    vms = {**described, "notice_port": 7070, "environment": {"setup": ["mount /data"], "packages": ["adlfs"]}}
    path.write_text(json.dumps({"vms": vms}), encoding="utf-8")
    code, output = morph("cloud", "dry-run", AZURE, "--cluster", path)
    assert code == 0
    shown = json.loads(output)[1]["body"]["properties"]["osProfile"]["customData"]
    assert list(shown) == ["bootcmd", "write_files", "runcmd"]
    ((_, _, line),) = shown["runcmd"]
    assert "-- 'mount /data'; }" in line
    assert "--manager=10.0.0.4:7070" in line
    assert "(secret)" in shown["bootcmd"][0]
    path.write_text("vms: {kind: local}", encoding="utf-8")
    code, output = morph("cloud", "dry-run", AZURE, "--cluster", path)
    assert (code, "vms.kind: is not the cloud file's kind (got 'local'); allowed: azure" in output) == (2, True)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("location: westus2", "location: West US", "location"),
        ("spot: true", "spott: true", "unknown key"),
        ("image: microsoft-dsvm:ubuntu-hpc:2404:latest", "image: ubuntu", "image"),
        ("resource_group: train", "", "resource_group"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(tmp_path: Path, old: str, new: str, told: str) -> None:
    path = tmp_path / "azure.yaml"
    text = AZURE.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    code, output = morph("cloud", "dry-run", path)
    assert code == 2
    assert str(path) in output
    assert told in output
    assert len(output.strip().splitlines()) == 1


def test_reconcile_ends_what_a_run_left_and_nothing_else(
    arm: FakeArm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cloud_file(arm, tmp_path, monkeypatch)
    provider(arm, tmp_path).request("a", 2)
    provider(arm, tmp_path, run="another").request("b", 1)
    arm.faults = [Fault("GET", "virtualMachines", 503)]
    code, output = morph("cloud", "reconcile", path, "--run", "tiny-1", "--job", "tiny")
    assert code == 1
    assert "repeat the command to continue" in output
    code, output = morph("cloud", "reconcile", path, "--run", "tiny-1", "--job", "tiny")
    assert (code, "2 VMs of tiny-1 were there; none is left" in output) == (0, True)
    for run, job in (("tiny-1", "tiny"), ("anothre", "tiny"), ("another", "tinny")):
        code, output = morph("cloud", "reconcile", path, "--run", run, "--job", job)
        assert (code, "none is left" in output) == (1, False), output
        assert f"nothing in resource group train has the tags of run {run} of job {job}" in output
        assert "runs whose VMs are there: another of job tiny" in output
    assert set(arm.machines) == {"b-0"}
    assert set(arm.sets) == {"another"}


def test_a_missing_resource_group_is_not_an_empty_one(
    arm: FakeArm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cloud_file(arm, tmp_path, monkeypatch, resource_group="trian")
    provider(arm, tmp_path).request("a", 2)
    arm.group = "train"
    code, output = morph("cloud", "reconcile", path, "--run", "tiny-1", "--job", "tiny")
    assert (code, "none is left" in output) == (1, False), output
    assert "ResourceGroupNotFound: Resource group 'trian' could not be found" in output
    assert "repeat the command" not in output
    assert len(arm.machines) == 2


def test_a_scale_set_that_morph_did_not_make_is_named_and_kept(
    arm: FakeArm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cloud_file(arm, tmp_path, monkeypatch)
    for name in ("web-1", "web-2"):
        arm.put_by_others(name, scale_set="web")
    code, output = morph("cloud", "reconcile", path, "--run", "web", "--job", "tiny")
    assert code == 1
    assert "scale set web does not have the tags of this run: it is left alone" in output
    assert "has the tags of run web of job tiny" in output
    assert set(arm.machines) == {"web-1", "web-2"}
    assert set(arm.sets) == {"web"}


def test_a_locked_vm_is_reported_and_the_others_are_ended(
    arm: FakeArm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cloud_file(arm, tmp_path, monkeypatch)
    provider(arm, tmp_path).request("a", 3)
    arm.locked = {"a-1"}
    code, output = morph("cloud", "reconcile", path, "--run", "tiny-1", "--job", "tiny")
    assert code == 1
    assert "a-1 is left: ScopeLocked" in output
    assert set(arm.machines) == {"a-1"}


def test_reconcile_ends_what_a_run_left_on_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def shell(host: SshHost, remote: str, secret: str = "") -> None:
        ended.append(host.address)

    monkeypatch.setattr("manager.providers.hosts.static.run_ssh", shell)
    leases = {"h1:22": ("tiny-1", "tiny-1-1-1-0"), "h2:22": ("other", "other-0"), "h3:22": ("tiny-1", "tiny-1-1-1-1")}
    kept = {
        key: {"run": run, "job": "tiny", "vm": {"name": name, "request": "r"}} for key, (run, name) in leases.items()
    }
    del kept["h3:22"]["job"]  # from an earlier version
    (tmp_path / "leases.json").write_text(json.dumps(kept), encoding="utf-8")
    path = tmp_path / "hosts.yaml"
    path.write_text("hosts: [{address: h1}, {address: h2}, {address: h3}]", encoding="utf-8")
    code, output = morph("cloud", "reconcile", path, "--run", "tiny-1", "--job", "tiny")
    assert (code, "2 VMs of tiny-1 were there; none is left" in output) == (0, True), output
    for run, job in (("tiny-1", "tiny"), ("tiny-2", "tiny"), ("other", "tinny")):
        code, output = morph("cloud", "reconcile", path, "--run", run, "--job", job)
        assert (code, f"run {run} of job {job} has no host: it has ended already" in output) == (1, True), output
    assert sorted(ended) == ["h1", "h3"]
    assert list(json.loads((tmp_path / "leases.json").read_text())) == ["h2:22"]


def test_a_cloud_file_for_aws_is_known_by_its_fields(tmp_path: Path) -> None:
    aws = AZURE.with_name("aws.yaml")
    code, output = morph("cloud", "dry-run", aws, "--count", 2, "--cluster", AZURE.parents[1] / "runs/aws.yaml")
    assert code == 0
    version, fleet = json.loads(output)[1:3]
    assert version["body"]["LaunchTemplateData"]["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert list(version["body"]["LaunchTemplateData"]["UserData"]) == ["bootcmd", "write_files", "runcmd"]
    assert fleet["body"]["Type"] == "instant"
    code, output = morph("cloud", "policy", aws)
    assert code == 0
    assert "ec2:CreateFleet" in json.loads(output)["Statement"][1]["Action"]
    code, output = morph("cloud", "check", AZURE.with_name("hosts.yaml"))
    told = "error: --kind: cloud files of this kind have no checks (got 'static'); allowed: azure or aws\n"
    assert (code, output) == (2, told)


def test_a_dry_run_on_slurm_shows_the_jobs_and_their_script_without_secrets() -> None:
    configs = AZURE.parents[1]
    slurm = configs / "clouds/slurm.yaml"
    options = ["--count", 2, "--job", "tiny", "--cluster", configs / "runs/slurm.yaml"]
    code, output = morph("cloud", "dry-run", slurm, *options)
    assert code == 0, output
    jobs = json.loads(output)
    commands = [shlex.split(job["command"]) for job in jobs]
    assert [command[0] for command in commands] == ["sbatch", "sbatch"]
    logs = (configs / "clouds" / "../../runs/slurm-logs").resolve()
    for node, command in zip(("tiny-1-0", "tiny-1-1"), commands, strict=True):
        outputs = [option.removeprefix("--output=") for option in command if option.startswith("--output=")]
        assert [Path(path).resolve() for path in outputs] == [logs / f"{node}-%j.log"]
        assert {f"--job-name={node}", "--partition=preempt", "--gres=gpu:1", "--time=8:00:00"} <= {*command}
    script = jobs[0]["standard input"]
    assert script[0] == "#!/bin/sh"
    assert script.count("(secret)") == 2
    assert "(the boot program)" in script
    assert any("module load python/3.11" in line for line in script)
    code, output = morph("cloud", "dry-run", slurm)
    assert (code, json.loads(output)[0]["standard input"]) == (0, "(the job script; it holds secrets)")
    code, output = morph("cloud", "policy", slurm)
    assert (code, output) == (2, "error: --kind: cloud files of this kind have no policy (got 'slurm'); allowed: aws\n")


def test_without_an_account_every_market_says_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_scopes: str, **_options: object) -> None:
        raise ClientAuthenticationError("the credential failed.\nAttempted:\n\tthis\n\tthat")

    monkeypatch.setattr("azure.identity.DefaultAzureCredential.get_token", nobody)
    monkeypatch.setattr("manager.run.markets.shutil.which", lambda _program: None)
    for name, said in (
        ("azure", "no login to Azure (`az login`, or an identity of this VM): the credential failed."),
        ("slurm", "needs Slurm's programs, and sbatch is not on the PATH of this machine"),
    ):
        code, output = morph("cloud", "reconcile", AZURE.with_name(f"{name}.yaml"), "--run", "r", "--job", "j")
        assert (code != 0, len(output.strip().splitlines())) == (True, 1), output
        assert said in output

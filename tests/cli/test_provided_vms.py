"""Cluster files with VMs of a provider: a mistake gives one line that names it before anything is started."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import NodeFacts
from manager.engine.machines.provider_machines import Providing
from manager.providers.interface.cloud import TAG_CHARACTERS
from manager.providers.interface.provider import Price, RunName, Vm
from manager.providers.local import LocalProvider
from manager.providers.slurm.answers import Mark
from manager.providers.slurm.spec import JOB_NAME_CHARACTERS, SlurmSpec
from manager.run.checkpoint_location import check_storage
from manager.run.markets import Cloud, Market, SlurmMarket
from manager.run.prepared import Inputs, resolve
from manager.run.request import RunRequest
from morph.cli.main import app
from morph.contract.base import Value
from morph.contract.cluster import JOB_UID, AzureVms, Environment, ProvidedVms, SlurmVms, StaticVms
from morph.contract.errors import ConfigError
from morph.yaml_files import load_job_file, load_yaml
from simulator import synthetic_profile
from simulator.inputs.synthetic import with_type
from tests.cli.given import without_phases
from tests.providers.azure_world import START

ROOT = Path(__file__).parents[2]
CODE = ROOT / "configs/jobs/tiny_gpt.py"
Described = dict[str, Any]


def vms_of(kind: str) -> Described:
    return {
        "kind": kind,
        "cloud": "cloud.yaml",
        "keep": 2,
        "memory_bytes": 10**9,
        "device": "cpu",
        "address": "127.0.0.2" if kind == "static" else "10.250.250.250",
    }


@pytest.fixture
def described(tmp_path: Path) -> Described:
    (tmp_path / "train.py").write_bytes(CODE.read_bytes())
    profile = synthetic_profile(num_sections=6, batch_size=12, micro_batch_sizes=(1, 2))
    (tmp_path / "profile.json").write_text(profile.model_dump_json(), encoding="utf-8")
    (tmp_path / "cloud.yaml").write_text(
        "hosts: [{address: h1, node_address: 127.0.0.11}, {address: localhost}]\n", encoding="utf-8"
    )
    job = {"code": "train.py:job", "profile": "profile.json", "steps": 5, "checkpoint_url": "memory://ckpt"}
    return {"job": job, "vms": vms_of("static")}


def resolved(directory: Path, described: Described) -> Inputs:
    path = directory / "job.yaml"
    path.write_text(json.dumps(described), encoding="utf-8")  # JSON is YAML
    return resolve(RunRequest(job=str(path), steps=1), path, load_job_file(path))


def refused(directory: Path, described: Described, *command: str) -> str:
    path = directory / "job.yaml"
    path.write_text(json.dumps(described), encoding="utf-8")
    before = sorted(directory.iterdir())
    result = CliRunner().invoke(app, [*(command or ("run",)), str(path)])
    assert result.exit_code == 2, result.output
    assert sorted(directory.iterdir()) == before, "something was written"
    (line,) = without_phases(result.stderr)
    return line


def set_in(described: Described, dotted: str, value: object) -> None:
    section = described
    *parts, last = dotted.split(".")
    for part in parts:
        section = section.setdefault(part, {})
    section[last] = value


@pytest.mark.parametrize(
    ("dotted", "value", "told"),
    [
        ("vms.kind", "moon", "vms.kind: no such kind (got 'moon'); allowed: local or azure or aws or slurm or static"),
        ("vms.keep", 0, "vms.keep"),
        ("vms.num_vms", 3, "vms.num_vms: unknown key"),
        ("vms.address", "gpu1", "vms.address: is not an IPv4 address (got 'gpu1')"),
        ("vms.address", "0.0.0.0", "vms.address: is not an address that a VM can reach"),
        ("vms.address", "10.250.250.250", "vms.address: cannot be listened on"),
        ("vms.notice_port", 65536, "vms.notice_port"),
        ("vms.first_port", 40000, "vms.first_port"),
        ("vms.lonely_s", 0, "vms.lonely_s"),
        ("vms.cloud", "nowhere.yaml", "nowhere.yaml: cannot be read"),
        ("vms.environment.python", "python3", "vms.environment.python"),
        ("vms.environment.packages", ["-r x.txt"], "vms.environment.packages: is an option of pip, not a requirement"),
        ("vms.environment.setup", ["a\nb"], "vms.environment.setup"),
        ("vms.environment.files", ["../x.py"], "vms.environment.files: '../x.py' is not below"),
        ("vms.environment.files", ["/x.py"], "vms.environment.files: '/x.py' is not below"),
        ("vms.environment.files", ["x.py"], "vms.environment.files: there is no such file or folder (got 'x.py')"),
        ("vms.environment.image", "a:b:c:d", "vms.environment: image: static hosts are not made from images"),
        ("vms.environment.pakages", [], "vms.environment.pakages: unknown key"),
        ("job.checkpoint_url", None, "job.checkpoint_url: is not given"),
        ("job.checkpoint_url", "ckpt", "job.checkpoint_url: is on this machine"),
        ("job.checkpoint_url", "file:///tmp/ckpt", "job.checkpoint_url: is on this machine"),
        ("job.checkpoint_url", "nope://ckpt", "job.checkpoint_url: cannot be used"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    tmp_path: Path, described: Described, dotted: str, value: object, told: str
) -> None:
    set_in(described, dotted, value)
    assert told in refused(tmp_path, described)


@pytest.mark.parametrize(
    ("missing", "told"),
    [("cloud", "vms.cloud"), ("keep", "vms.keep"), ("memory_bytes", "vms.memory_bytes"), ("address", "vms.address")],
)
def test_missing_required_fields_are_named(tmp_path: Path, described: Described, missing: str, told: str) -> None:
    del described["vms"][missing]
    assert f"{told}: Field required" in refused(tmp_path, described)


@pytest.mark.parametrize(
    ("kind", "most"), [("azure", TAG_CHARACTERS), ("aws", TAG_CHARACTERS), ("slurm", JOB_NAME_CHARACTERS)]
)
def test_a_jobs_name_that_a_market_refuses_is_refused_before_the_first_request(
    tmp_path: Path, described: Described, monkeypatch: pytest.MonkeyPatch, kind: str, most: int
) -> None:
    monkeypatch.setattr(SlurmMarket, "check", lambda _self, _source: None)  # Slurm need not be here
    described["vms"] = vms_of(kind)
    cloud = ROOT / "configs/clouds" / f"{kind}.yaml"
    described["vms"] |= {"cloud": str(cloud), "shared_storage": True}
    profile = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))
    for length in (most, most + 1):
        profile["job"]["name"] = "ü" * length
        (tmp_path / "profile.json").write_text(json.dumps(profile), encoding="utf-8")
        if length == most:
            assert resolved(tmp_path, described).profile.job.name == "ü" * length
    told = refused(tmp_path, described, "config", "check")
    assert f"profile.json: job.name: has {most + 1} characters, which {kind} refuses" in told
    assert f"allowed: at most {most} characters" in told
    code = CliRunner().invoke(app, ["cloud", "dry-run", str(cloud), "--job", "x" * (most + 1)])
    assert (code.exit_code, "--job: has " in code.output) == (2, True)


def test_the_comment_of_a_slurm_job_has_room_for_the_longest_job_name() -> None:
    name = RunName(run="r" * 31, job="\0" * JOB_NAME_CHARACTERS)  # six bytes each, where others have four at most
    mark = Mark(run=name.run, job=name.job, request=f"{name.requests}-{10**9}", devices=10**6)
    assert len(mark.text.encode()) <= 1024


def test_the_loopback_is_refused_where_vms_are_elsewhere(tmp_path: Path, described: Described) -> None:
    described["vms"] = {**vms_of("azure"), "address": "127.0.0.1"}
    assert "vms.address: is a loopback address, which no VM of a cloud can reach" in refused(tmp_path, described)


def test_the_loopback_is_refused_where_a_host_is_elsewhere(tmp_path: Path, described: Described) -> None:
    (tmp_path / "cloud.yaml").write_text("hosts: [{address: localhost}, {address: gpu1, user: me}]\n", encoding="utf-8")
    described["vms"]["address"] = "127.0.0.1"
    told = refused(tmp_path, described)
    assert refused(tmp_path, described, "config", "check") == told
    assert "vms.address: is a loopback address, which me@gpu1 of " in told
    assert "cloud.yaml cannot reach (got '127.0.0.1'); allowed: an address of this machine that the hosts reach" in told


def test_a_cloud_file_of_the_wrong_kind_is_named(tmp_path: Path, described: Described) -> None:
    described["vms"] = vms_of("azure")
    told = refused(tmp_path, described)
    assert "cloud.yaml" in told
    assert "is a file of hosts" in told or "unknown key" in told


class Craters(Value):
    """The settings of another package's market in a cluster file."""

    num_craters: int


class MoonMarket(Market):
    """A market of another package."""

    described = Craters

    def most_devices(self, described: Craters) -> int:
        return described.num_craters

    def vm_kind(self, described: Craters) -> NodeFacts:
        return NodeFacts(provider="moon")

    def price(self, described: Craters, path: Path) -> Price | None:
        return Price(usd_per_h=3.0, source=str(path))

    def elsewhere(self, described: Craters) -> str:
        return ""

    def providing(self, described: Craters, vms: ProvidedVms, path: Path, name: RunName, run_dir: Path) -> Providing:
        return Providing(lambda _start: LocalProvider(None, described.num_craters))  # type: ignore[arg-type]

    def end_run(
        self, described: Craters, path: Path, run: str, job: str, told: Callable[[str], None]
    ) -> tuple[Vm, ...]:
        return (Vm(name=f"{run}-0", request=job),)


def test_another_package_brings_a_market_of_its_own(
    tmp_path: Path, described: Described, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = EntryPoint("moon", f"{__name__}:MoonMarket", "morph.markets")
    monkeypatch.setattr("morph.contract.cluster.entry_points", lambda group: [found])
    (tmp_path / "cloud.yaml").write_text("num_craters: 7", encoding="utf-8")
    described["vms"]["kind"] = "moon"
    run = resolved(tmp_path, described)
    assert (run.cloud.vms.market, run.cloud.most_devices, run.vm_kind.provider) == ("moon", 7, "moon")
    assert run.cloud.price() == Price(usd_per_h=3.0, source=str(tmp_path / "cloud.yaml"))
    provider = run.cloud.providing(RunName(run="r", job="j"), tmp_path).make_provider(START)
    assert provider.capabilities().max_vms == 7
    ended = CliRunner().invoke(
        app, ["cloud", "reconcile", str(tmp_path / "cloud.yaml"), "--run", "r", "--job", "j", "--kind", "moon"]
    )
    assert (ended.exit_code, "ended r-0" in ended.output) == (0, True), ended.output
    told = CliRunner().invoke(
        app, ["cloud", "reconcile", str(tmp_path / "cloud.yaml"), "--run", "r", "--job", "j", "--kind", "sun"]
    )
    assert (told.exit_code, "no such kind" in told.output) == (2, True), told.output
    found = EntryPoint("moon", "builtins:object", "morph.markets")
    with pytest.raises(ConfigError, match=r"vms\.kind: cannot be used: .* is not a Market"):
        resolved(tmp_path, described)


def test_a_trace_beside_kept_vms_is_refused(tmp_path: Path, described: Described) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(described), encoding="utf-8")
    (tmp_path / "trace.csv").write_text("time_s,event,node_id\n0,add,a\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["run", str(path), "--trace", str(tmp_path / "trace.csv")])
    assert result.exit_code == 2
    assert "vms.keep" in result.stderr


def test_shared_storage_allows_a_folder_and_the_run_directory(tmp_path: Path, described: Described) -> None:
    described["vms"]["shared_storage"] = True
    for given, url in [(None, None), ("ckpt", str(tmp_path / "ckpt")), ("memory://x", "memory://x")]:
        described["job"]["checkpoint_url"] = given
        assert resolved(tmp_path, described).request.checkpoint_url == url


def test_the_code_and_what_it_needs_is_gathered(tmp_path: Path, described: Described) -> None:
    (tmp_path / "beside.py").write_text("x = 1", encoding="utf-8")
    described["vms"]["environment"] = {"files": ["beside.py"]}
    run = resolved(tmp_path, described)
    assert set(run.job_files.files) == {"train.py", "beside.py"}


def test_explain_and_schema_know_every_kind(tmp_path: Path, described: Described) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(described), encoding="utf-8")
    explained = CliRunner().invoke(app, ["config", "explain", str(path)])
    assert explained.exit_code == 0, explained.output
    assert "vms.environment.python" in explained.output
    schema = json.loads(CliRunner().invoke(app, ["config", "schema", "cluster"]).output)
    assert {"LocalVms", "AzureVms", "AwsVms", "StaticVms", "Environment"} <= set(schema["$defs"])


def test_the_example_for_azure_is_a_file_that_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("azure.mgmt.compute")
    text = (ROOT / "configs/runs/azure.yaml").read_text(encoding="utf-8")
    place = tmp_path / "configs/runs/azure.yaml"
    for name in ("jobs/tiny_gpt.py", "clouds/azure.yaml"):
        copy = tmp_path / "configs" / name
        copy.parent.mkdir(parents=True)
        copy.write_bytes((ROOT / "configs" / name).read_bytes())
    place.parent.mkdir(parents=True)
    place.write_text(text, encoding="utf-8")
    profile = synthetic_profile(num_sections=6, batch_size=12, micro_batch_sizes=(1, 2))
    (tmp_path / "profile.json").write_text(profile.model_dump_json(), encoding="utf-8")
    monkeypatch.setattr("manager.run.prepared.check_url", lambda *_: None)  # the tests do not depend on adlfs
    run = resolve(RunRequest(job=str(place), steps=1), place, load_job_file(place))
    assert isinstance(run.cluster.vms, AzureVms)
    assert run.cloud.described.location == "westus2"
    # the image with Python 3.12: with that of 22.04 no VM would ever join
    assert run.cloud.described.image.split(":")[2] == "2404"
    assert run.cluster.vms.environment.setup[-1] == "/usr/bin/python3 -m venv /opt/morph"
    assert run.cluster.vms.environment.python == "/opt/morph/bin/python"
    assert run.request.checkpoint_url == "abfs://checkpoints@ACCOUNT.dfs.core.windows.net/tiny-gpt"


def test_vms_without_credentials_for_storage_are_refused_before_any_is_requested() -> None:
    def vms(**given: object) -> AzureVms:
        known = {"kind": "azure", "cloud": "c.yaml", "keep": 2, "memory_bytes": 1, "address": "10.0.0.4"}
        return AzureVms.model_validate({**known, **given})

    url = "abfs://checkpoints@ACCOUNT.dfs.core.windows.net/tiny-gpt"
    with pytest.raises(
        ConfigError, match=r"job\.yaml: job\.checkpoint_url: the VMs have no credentials for it"
    ) as caught:
        check_storage(vms(), url, "job.yaml", "job.checkpoint_url")
    assert "vms.metadata: true" in str(caught.value)
    for given in ({"metadata": True}, {"pass_variables": ["AZURE_STORAGE_SAS_TOKEN"]}, {"job_uid": 0}):
        check_storage(vms(**given), url, "job.yaml", "job.checkpoint_url")
    assert (vms().uid, vms(shared_storage=True).uid) == (JOB_UID, 0)
    assert vms(shared_storage=True, job_uid=1000).uid == 1000


def test_the_example_for_slurm_is_one_and_its_check_asks_slurm_nothing(
    tmp_path: Path, described: Described, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = yaml.safe_load((ROOT / "configs/runs/slurm.yaml").read_text(encoding="utf-8"))
    spec = load_yaml(ROOT / "configs/clouds/slurm.yaml", SlurmSpec)
    assert (spec.partition, spec.gres, spec.size) == ("preempt", "gpu:1", "preempt/gpu:1")
    (tmp_path / "cloud.yaml").write_text((ROOT / "configs/clouds/slurm.yaml").read_text(encoding="utf-8"))
    vms = {**run["vms"], "cloud": "cloud.yaml"}
    described |= {"vms": vms}
    monkeypatch.setattr("manager.run.markets.socket.create_server", lambda _address: socket.socket())
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert "vms.kind: needs Slurm's programs, and sbatch is not on the PATH" in refused(tmp_path, described)
    (tmp_path / "bin").mkdir()
    for program in ("sbatch", "squeue", "scancel"):
        (tmp_path / "bin" / program).write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n", encoding="utf-8")
        (tmp_path / "bin" / program).chmod(0o755)
    found = resolved(tmp_path, described)
    assert isinstance(found.cluster.vms, SlurmVms)
    assert (found.cloud.most_devices, found.cloud.price()) == (1, None)
    assert not (tmp_path / "asked").exists()
    described["vms"] = {**vms, "address": "127.0.0.2"}
    assert "is a loopback address, which a node of partition preempt" in refused(tmp_path, described)
    described["vms"] = {**vms, "environment": {"image": "a:b:c:d"}}
    assert "vms.environment: image: container_image in the cloud file" in refused(tmp_path, described)


def test_the_example_of_hosts_is_one() -> None:
    from manager.providers.hosts.static import Hosts

    hosts = load_yaml(ROOT / "configs/clouds/hosts.yaml", Hosts)
    assert [host.shown for host in hosts.hosts] == [
        "morph@gpu1.example.org",
        "morph@gpu2.example.org",
        "morph@big.example.org",
    ]


@pytest.mark.parametrize(
    ("in_cluster", "in_cloud", "found"), [(0.7, 0.2, 0.7), (None, 0.2, 0.2), (None, None, None), (0.0, 0.2, 0.0)]
)
def test_a_price_is_the_cluster_files_or_else_the_providers(
    in_cluster: float | None, in_cloud: float | None, found: float | None
) -> None:
    from manager.providers.hosts.ssh import SshHost
    from manager.providers.hosts.static import Hosts

    vms = StaticVms.model_validate({**vms_of("static"), "usd_per_h": in_cluster})
    price = Cloud(vms, Path("hosts.yaml"), Hosts(hosts=(SshHost(address="h"),), usd_per_h=in_cloud)).price()
    assert (price.usd_per_h if price else None) == found


@pytest.mark.parametrize(
    "package", ["morph-train", "Morph_Train==1.2", "morph.train[tls]", "morph-train @ https://x/y"]
)
def test_morph_itself_is_not_requested_from_an_index(package: str) -> None:
    with pytest.raises(ValidationError, match="the manager provides Morph"):
        Environment(packages=(package,))
    assert Environment(packages=("morph-trains", "adlfs", "/wheels/x.whl")).packages


def test_a_run_on_one_named_type_is_planned_with_its_times(tmp_path: Path, described: Described) -> None:
    """``morph profile refine`` later writes what the run has learned into this type."""
    profile = synthetic_profile(num_sections=6, batch_size=12, micro_batch_sizes=(1, 2))
    (tmp_path / "profile.json").write_text(with_type(profile, "t4", 2.0).model_dump_json(), encoding="utf-8")
    alike = resolved(tmp_path, described | {"vms": {"num_vms": 2}}).config()
    config = resolved(tmp_path, described | {"vms": {"node_types": {"t4": 2}}}).config()
    assert (alike.node_type, config.node_type) == ("", "t4")
    assert config.section_compute_s == pytest.approx([2 * each for each in alike.section_compute_s])
    assert ControllerConfig.model_validate_json(config.model_dump_json()) == config

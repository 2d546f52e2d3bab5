"""Users' and foreign files: a mistake is refused in one line that names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from manager.host.environment import variables
from manager.providers.azure.spec import AzureSpec
from manager.providers.hosts.static import Hosts
from morph.cli.main import app
from morph.contract.base import Value
from morph.contract.cluster import ClusterConfig, JobFile, LocalVms, Policy
from morph.contract.errors import ConfigError, TraceError
from morph.contract.trace import parse_trace
from morph.yaml_files import load_cluster, load_yaml
from simulator import synthetic_profile

ELSEWHERE = ["../elsewhere", "/elsewhere", "..", ".", "a/../../elsewhere", "\\elsewhere", ".hidden", " "]
HEADER = "time_s,event,node_id,zone,instance_type,source"
ROOT = Path(__file__).resolve().parents[2]


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("form", ["options", "job file"])
def test_a_job_named_like_a_path_in_a_profile_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    profile = json.loads(synthetic_profile(num_sections=4, batch_size=8, micro_batch_sizes=(1,)).model_dump_json())
    profile["job"]["name"] = name
    (inside / "profile.json").write_text(json.dumps(profile), encoding="utf-8")
    (inside / "cluster.yaml").write_text("", encoding="utf-8")
    (inside / "job.py").write_text("", encoding="utf-8")
    (inside / "run.yaml").write_text("job: {code: 'job.py:job', profile: profile.json}\n", encoding="utf-8")
    before = set(tmp_path.rglob("*"))
    options = ("run", "job.py:job", "--profile", "profile.json", "--cluster", "cluster.yaml")
    told = refused(*(options if form == "options" else ("run", "run.yaml")))
    assert "job.name" in told
    assert "profile.json" in told
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", [name for name in ELSEWHERE if name not in ("..", ".", ".hidden")])
def test_a_trace_names_no_vm_like_a_path(name: str) -> None:
    with pytest.raises(TraceError, match="node_id"):
        parse_trace([HEADER, f"0,add,{name},z,t,s"], "trace.csv")


Place = tuple[Any, ...]
PROVIDED = {"keep": 2, "memory_bytes": 2**30, "address": "10.0.0.1", "cloud": "x.yaml"}
FILES: dict[str, tuple[type[Value], dict[str, Any]]] = {
    "local": (ClusterConfig, {"vms": {"keep": 6, "limits": {}}, "policy": {"rules": {}}}),
    "azure": (ClusterConfig, {"vms": {"kind": "azure", **PROVIDED, "limits": {}}}),
    "static": (ClusterConfig, {"vms": {"kind": "static", **PROVIDED, "environment": {}}}),
    "job": (JobFile, {"job": {"code": "jobs.py:job", "profile": "profile.json"}}),
    "hosts": (Hosts, yaml.safe_load((ROOT / "configs/clouds/hosts.yaml").read_text())),
    "cloud": (AzureSpec, yaml.safe_load((ROOT / "configs/clouds/azure.yaml").read_text())),
}


def _leaves(node: dict[str, Any], root: dict[str, Any], path: Place = ()) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield every field of a schema: its path and its definition."""
    if "$ref" in node:
        node = root["$defs"][node["$ref"].rsplit("/", 1)[1]]
    for option in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _leaves(option, root, path)
    for name, child in node.get("properties", {}).items():
        yield from _leaves(child, root, (*path, name))
    if "items" in node:
        yield from _leaves(node["items"], root, (*path, 0))
    if path:
        yield path, node


@cache
def _places(kind: str) -> list[Place]:
    schema = FILES[kind][0].model_json_schema()
    return list(dict.fromkeys(path for path, _ in _leaves(schema, schema)))


def _read(kind: str, path: Path, *changes: tuple[Place, Any]) -> str:
    """Read a file of this kind that is valid except at these paths; return the refusal, or "" if it is accepted."""
    value_type, right = FILES[kind]
    content = json.loads(json.dumps(right))
    for (*above, last), value in changes:
        parent = content
        for key in above:
            if isinstance(parent, dict):
                parent = parent.setdefault(key, {})
            elif isinstance(parent, list) and parent:
                parent = parent[0]
        if isinstance(parent, dict):
            parent[last] = value
    path.write_text(yaml.safe_dump(content))
    try:
        load_yaml(path, value_type)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", FILES)
def test_every_number_has_a_range(kind: str) -> None:
    schema = FILES[kind][0].model_json_schema()
    lows, highs = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
    numbers = [(path, node) for path, node in _leaves(schema, schema) if node.get("type") in ("integer", "number")]
    assert len(numbers) > 3
    assert [path for path, node in numbers if not (lows & set(node) and highs & set(node))] == []


@pytest.mark.parametrize(
    ("kind", "place", "value", "says"),
    [
        ("local", "policy.heartbeat_timeout_s", 1e300, "(got 1e+300); allowed: a number above 0 and at most 10"),
        ("local", "policy.rules.wait.vms_patience_s", 1e10, "allowed: a number above 0 and at most 1000000000"),
        ("local", "policy.takeover_patience_s", 1e300, "allowed: a number at least 0 and at most 1000000000"),
        ("local", "policy.checkpoint_every_steps", 10**20, "allowed: an integer at least 1 and at most 2147483648"),
        ("local", "policy.rules.ahead.bytes_per_s", 1e300, "at most 1000000000000000"),
        ("local", "vms.num_vms", 10**20, "(got 100000000000000000000); allowed: an integer at least 1 and at most 64"),
        ("local", "vms.limits.max_vms", 10**20, "allowed: an integer at least 1 and at most 100000"),
        ("local", "vms.limits.budget_usd", 1e300, "allowed: a number above 0 and at most 1000000000"),
        ("azure", "vms.memory_bytes", 2**62, "allowed: an integer at least 1 and at most 1125899906842624"),
        ("azure", "vms.usd_per_h", 1e7, "allowed: a number at least 0 and at most 1000000"),
        ("static", "vms.lonely_s", 1e300, "allowed: a number above 0 and at most 1000000000"),
        ("static", "vms.ray_port", 65536, "allowed: an integer at least 0 and at most 65535"),
        ("job", "job.batch_size", 10**12, "allowed: an integer at least 1 and at most 1000000000"),
        ("job", "job.steps", 10**20, "allowed: an integer at least 1 and at most 2147483648"),
        ("job", "job.num_replicas", 10**20, "allowed: an integer at least 1 and at most 100000"),
        ("hosts", "usd_per_h", 1e300, "allowed: a number at least 0 and at most 1000000"),
        ("cloud", "max_usd_per_h", 1e300, "allowed: a number above 0 and at most 1000000"),
    ],
)
def test_a_number_out_of_range_is_refused_with_field_value_and_range(
    kind: str, place: str, value: float, says: str, tmp_path: Path
) -> None:
    said = _read(kind, tmp_path / "odd.yaml", (tuple(place.split(".")), value))
    assert said.startswith(f"{tmp_path / 'odd.yaml'}: {place}: ")
    assert says in said


ODD: tuple[Any, ...] = (
    *(True, False, None, "", "x", "1", [], {}, [1], 0, -1, 0.5, 1e-300, 1e10, 1e300, float("nan"), float("inf")),
    *(2**31, 2**62, 10**12, 10**20, {1: 2}, {"x": {}}),
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data(), kind=st.sampled_from(sorted(FILES)))
def test_odd_values_are_taken_or_refused_in_one_line(
    data: st.DataObject, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    places = st.sampled_from(_places(kind))
    changes = data.draw(st.lists(st.tuples(places, st.sampled_from(ODD)), min_size=1, max_size=2))
    path = tmp_path_factory.getbasetemp() / "odd.yaml"
    said = _read(kind, path, *changes)
    assert said.startswith(str(path)) or not said
    assert "\n" not in said


@pytest.mark.parametrize(
    "text",
    [
        "vms: {2026-01-01: 3}",
        "vms: {[1, 2]: 3}",
        "vms: {num_vms: 2026-13-45}",
        "vms: {num_vms: 0x_}",
        "vms: !!bool maybe",
        f"vms: {{num_vms: {'1' * 5000}}}",
        "vms: " + "[" * 500,
    ],
)
def test_what_yaml_itself_cannot_read_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"odd\.yaml(, line 1)?: [^\n]*$"):
        load_yaml(path, ClusterConfig)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_cluster_file_shows_the_defaults() -> None:
    assert load_cluster(ROOT / "configs/clusters/local.yaml") == ClusterConfig()


def test_the_shipped_cluster_file_shows_every_key() -> None:
    text = (ROOT / "configs/clusters/local.yaml").read_text(encoding="utf-8")
    for key in (*LocalVms.model_fields, *Policy.model_fields):
        assert f" {key}: " in text


def test_an_empty_file_gives_every_default(tmp_path: Path) -> None:
    assert load_cluster(write(tmp_path, "# nothing yet\n")) == ClusterConfig()


def test_keys_left_out_keep_their_defaults(tmp_path: Path) -> None:
    typed = load_cluster(write(tmp_path, "vms: {node_types: {t4: 2, v100: 4}}"))
    assert typed.vms == LocalVms(node_types={"t4": 2, "v100": 4}, num_vms=6)
    with pytest.raises(ConfigError, match=r"num_vms: is 5, but node_types has 6 VMs; leave one of the two out"):
        load_cluster(write(tmp_path, "vms: {node_types: {t4: 2, v100: 4}, num_vms: 5}"))
    with pytest.raises(ConfigError, match=r"vms.node_types.t4: .* \(got 0\)"):
        load_cluster(write(tmp_path, "vms: {node_types: {t4: 0}}"))
    config = load_cluster(write(tmp_path, "vms: {num_vms: 3}\npolicy:\n  heartbeat_timeout_s: 2\n"))
    assert config.vms == LocalVms(num_vms=3)
    assert config.policy == Policy(heartbeat_timeout_s=2.0)


@pytest.mark.parametrize(
    ("text", "field", "value", "allowed"),
    [
        ("vms: {num_vms: 0}", "vms.num_vms", 0, "an integer at least 1 and at most 64"),
        ("vms: {num_vms: many}", "vms.num_vms", "many", "an integer at least 1 and at most 64"),
        ("vms: {num_vms: '6'}", "vms.num_vms", "6", "an integer at least 1 and at most 64"),
        ("vms: {num_vms: true}", "vms.num_vms", True, "an integer at least 1 and at most 64"),
        ("vms: {device: tpu}", "vms.device", "tpu", "cpu or cuda"),
        ("vms: {links: nvlink}", "vms.links", "nvlink", "auto or ipc or staged"),
        ("vms: {kind: moon}", "vms.kind", "moon", "local or azure or aws or slurm or static"),
        ("vms: {memory_bytes: -1}", "vms.memory_bytes", -1, "an integer at least 1 and at most 1125899906842624"),
        ("vms: 6", "vms", 6, "the keys " + ", ".join(LocalVms.model_fields)),
        ("vms: {gpus: 6}", "vms.gpus", 6, "the keys " + ", ".join(LocalVms.model_fields)),
        ("vmz: 6", "vmz", 6, "the keys vms, policy, samples, trackers, callbacks, notify"),
        (
            "policy: {heartbeat_timeout_s: 0}",
            "policy.heartbeat_timeout_s",
            0,
            "a number above 0 and at most 1000000000",
        ),
        (
            "policy: {heartbeat_timeout_s: .inf}",
            "policy.heartbeat_timeout_s",
            None,
            "a number above 0 and at most 1000000000",
        ),
        ("policy: {min_join_gain: -0.5}", "policy.min_join_gain", -0.5, "a number at least 0 and at most 1000"),
        (
            "policy: {start_patience_s: 2026-01-01}",
            "policy.start_patience_s",
            "2026-01-01",
            "a number above 0 and at most 1000000000",
        ),
        (
            "- vms",
            None,
            None,
            "a cluster file, such as configs/clusters/local.yaml; its keys are "
            "vms, policy, samples, trackers, callbacks, notify",
        ),
    ],
)
def test_a_wrong_entry_is_named_with_its_value_and_what_is_allowed(
    tmp_path: Path, text: str, field: str | None, value: object, allowed: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    error = caught.value
    assert (error.source, error.field, error.allowed) == (str(path), field, allowed)
    assert error.value == value or value is None


def test_the_word_off_is_what_it_says(tmp_path: Path) -> None:
    assert load_cluster(write(tmp_path, "policy: {redundancy: off}")).policy.redundancy == "off"
    assert load_cluster(write(tmp_path, "policy: {redundancy: salvage}")).policy.redundancy == "salvage"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("policy: {patience: 3}", r"policy\.patience: unknown key \(got 3\); allowed: the keys checkpoint_every"),
        ("vms:\n  num_vms: 2\n  num_vms: 4\n", "line 3: num_vms: key is given twice"),
        ("vms: {num_vms: 2\npolicy: 3", r"cluster\.yaml, line 2: is not YAML"),
        ("vms: !!python/object/apply:os.getcwd []\n", "line 1: is not YAML"),
    ],
)
def test_yaml_errors_are_named_with_their_place(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_cluster(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        load_cluster(tmp_path / "absent.yaml")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"vms: \xff\xfe")
    with pytest.raises(ConfigError, match=r"cluster\.yaml: is not UTF-8"):
        load_cluster(path)


def test_named_variables_are_read_and_one_that_is_unset_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMED", "s3cret")
    monkeypatch.delenv("NOT_SET", raising=False)
    assert variables(["NAMED"]) == {"NAMED": "s3cret"}
    with pytest.raises(ConfigError, match=r"vms\.pass_variables.*NOT_SET") as error:
        variables(["NAMED", "NOT_SET"])
    assert "s3cret" not in str(error.value)


def test_settings_count_in_place_of_what_the_file_says(tmp_path: Path) -> None:
    path = write(tmp_path, "vms: {num_vms: 3, usd_per_h: 2}")
    settings = ["vms.usd_per_h=9e-1", "policy.redundancy=off", "vms.pass_variables=[A, B]"]
    config = load_cluster(path, settings)
    assert (config.vms.num_vms, config.vms.usd_per_h, config.policy.redundancy) == (3, 0.9, "off")
    assert config.vms.pass_variables == ("A", "B")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["vms.num_vms"], r"--set: is not a setting \(got 'vms\.num_vms'\); allowed: KEY=VALUE"),
        (["vms..num_vms=3"], r"--set: is not a setting"),
        (["vms.num_vms=3", "vms.num_vms=4"], r"--set vms\.num_vms: is set twice \(got '4'\)"),
        (["vms.num_vms=many"], r"^--set vms\.num_vms: .* \(got 'many'\); allowed: an integer"),
        (["vms.number=3"], r"^--set vms\.number: unknown key"),
        (["vms.num_vms.more=3"], r"--set vms\.num_vms\.more: is in no section"),
        (["vms.pass_variables=[A"], r"--set vms\.pass_variables: is not YAML"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, settings: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_cluster(write(tmp_path, "vms: {num_vms: 3}"), settings)

"""Odd values in the files that users write: each number has a range, and what is outside is refused with it."""

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

from manager.providers.azure.spec import AzureSpec
from manager.providers.hosts.static import Hosts
from morph.contract.base import Value
from morph.contract.cluster import ClusterConfig, JobFile
from morph.contract.errors import ConfigError
from morph.yaml_files import load_yaml

REPOSITORY = Path(__file__).parents[2]
Place = tuple[Any, ...]
PROVIDED = {"keep": 2, "memory_bytes": 2**30, "address": "10.0.0.1", "cloud": "x.yaml"}
FILES: dict[str, tuple[type[Value], dict[str, Any]]] = {
    "local": (ClusterConfig, {"vms": {"keep": 6, "limits": {}}, "policy": {"rules": {}}}),
    "azure": (ClusterConfig, {"vms": {"kind": "azure", **PROVIDED, "limits": {}}}),
    "static": (ClusterConfig, {"vms": {"kind": "static", **PROVIDED, "environment": {}}}),
    "job": (JobFile, {"job": {"code": "jobs.py:job", "profile": "profile.json"}}),
    "hosts": (Hosts, yaml.safe_load((REPOSITORY / "configs/clouds/hosts.yaml").read_text())),
    "cloud": (AzureSpec, yaml.safe_load((REPOSITORY / "configs/clouds/azure.yaml").read_text())),
}


def _leaves(node: dict[str, Any], root: dict[str, Any], path: Place = ()) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Every place of a schema: its path, and what is said of it."""
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
    """Read a file of this kind, right but for these places; return with what it is refused, or "" where it is taken."""
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
        (
            "local",
            "policy.heartbeat_timeout_s",
            1e300,
            "(got 1e+300); allowed: a number above 0 and at most 10",
        ),
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
def test_a_number_out_of_range_is_refused_with_file_field_value_and_range(
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
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
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

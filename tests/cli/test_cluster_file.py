from __future__ import annotations

from pathlib import Path

import pytest

from morph.contract.cluster import ClusterConfig, LocalVms, Policy
from morph.contract.errors import ConfigError
from morph.yaml_files import load_cluster

REPOSITORY = Path(__file__).parents[2]
A_WAIT = "a number above 0 and at most 1000000000"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_cluster_file_shows_the_defaults() -> None:
    assert load_cluster(REPOSITORY / "configs/clusters/local.yaml") == ClusterConfig()


def test_the_shipped_cluster_file_shows_every_key() -> None:
    text = (REPOSITORY / "configs/clusters/local.yaml").read_text(encoding="utf-8")
    for key in (*LocalVms.model_fields, *Policy.model_fields):
        assert f" {key}: " in text


def test_an_empty_file_gives_every_default(tmp_path: Path) -> None:
    assert load_cluster(write(tmp_path, "# nothing yet\n")) == ClusterConfig()


def test_keys_left_out_keep_their_defaults(tmp_path: Path) -> None:
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
        ("vms: {kind: moon}", "vms.kind", "moon", "local or azure or static"),
        ("vms: {memory_bytes: -1}", "vms.memory_bytes", -1, "an integer at least 1 and at most 1125899906842624"),
        (
            "vms: 6",
            "vms",
            6,
            "the keys " + ", ".join(LocalVms.model_fields),
        ),
        (
            "vms: {gpus: 6}",
            "vms.gpus",
            6,
            "the keys " + ", ".join(LocalVms.model_fields),
        ),
        ("vmz: 6", "vmz", 6, "the keys vms, policy"),
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
        ("- vms", None, None, "the keys vms, policy"),
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


def test_settings_count_in_place_of_what_the_file_says(tmp_path: Path) -> None:
    path = write(tmp_path, "vms: {num_vms: 3, usd_per_h: 2}")
    settings = ["vms.usd_per_h=9e-1", "policy.redundancy=off", "vms.pass_variables=[A, B]"]
    config = load_cluster(path, settings)
    assert (config.vms.num_vms, config.vms.usd_per_h, config.policy.redundancy) == (3, 0.9, "off")
    assert config.vms.pass_variables == ("A", "B")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["vms.num_vms"], r"--set: is no setting \(got 'vms\.num_vms'\); allowed: KEY=VALUE"),
        (["vms..num_vms=3"], r"--set: is no setting"),
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


def test_an_unknown_key_is_called_unknown(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"policy\.patience: unknown key \(got 3\); allowed: the keys checkpoint_every"
    ):
        load_cluster(write(tmp_path, "policy: {patience: 3}"))


def test_a_key_given_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 3: num_vms: key is given twice"):
        load_cluster(write(tmp_path, "vms:\n  num_vms: 2\n  num_vms: 4\n"))


def test_broken_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.yaml, line 2: is not YAML"):
        load_cluster(write(tmp_path, "vms: {num_vms: 2\npolicy: 3"))


def test_yaml_cannot_make_objects(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1: is not YAML"):
        load_cluster(write(tmp_path, "vms: !!python/object/apply:os.getcwd []\n"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        load_cluster(tmp_path / "absent.yaml")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"vms: \xff\xfe")
    with pytest.raises(ConfigError, match=r"cluster\.yaml: is not UTF-8"):
        load_cluster(path)

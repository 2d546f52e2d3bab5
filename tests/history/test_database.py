"""The history is one file that several managers write; each fault of this file is reported in one sentence."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from manager.controller.state.config import ControllerConfig, ExpectedLosses, Offer
from manager.controller.state.events import NodeFacts
from manager.history import database
from manager.history.database import FILE_NAME, HistoryError, forget_lives, history_path, keep_lives, kept_lives
from manager.history.vm_history import VmHistory
from manager.journal.journal import Journal
from manager.providers.azure.spec import AzureSpec
from manager.providers.hosts.ssh import SshHost
from manager.providers.hosts.static import Hosts
from manager.report.lives import Ending, Life
from manager.run.markets import Cloud
from morph.contract.cluster import AzureVms, StaticVms
from morph.contract.errors import RunDirError
from tests.providers.azure_world import SPEC
from tests.small_disk import read_only, small_disk
from tests.waiting import BOUND_S

ROOT = Path(__file__).resolve().parents[2]


def life(vm: str, ended_s: float = 100.0, ending: Ending = Ending.REVOKED, **facts: str) -> Life:
    return Life(
        vm=vm,
        facts=NodeFacts(**{"provider": "azure", **facts}),
        begun_s=10.0,
        ended_s=ended_s,
        ending=ending,
        lost_with=1,
    )


def test_stored_lives_come_back_and_storing_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / FILE_NAME
    assert kept_lives(path, {}) == ()
    lives = (life("a"), life("b", 200.0, zone="2"))
    for _ in range(2):
        keep_lives(path, "run", lives)
    assert kept_lives(path, {}) == lives
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_surviving_vm_is_known_by_its_last_news_within_its_run(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    keep_lives(path, "run", [life("a", 50.0, Ending.RUN_OVER)])
    keep_lives(path, "another", [life("a", 60.0)])
    keep_lives(path, "run", [life("a", 70.0)])
    assert [(one.ended_s, one.ending) for one in kept_lives(path, {})] == [
        (60.0, Ending.REVOKED),
        (70.0, Ending.REVOKED),
    ]


def test_a_kind_is_read_and_forgotten_by_itself(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    kinds = ({"size": "NC6", "zone": "1"}, {"size": "NC6", "zone": "2"}, {"size": "NC24"}, {"provider": "local"})
    keep_lives(path, "run", [life(f"v{number}", number + 20.0, **kind) for number, kind in enumerate(kinds)])
    assert [one.vm for one in kept_lives(path, {"provider": "azure", "size": "NC6"})] == ["v0", "v1"]
    assert forget_lives(path, {"zone": "2"}) == 1
    assert forget_lives(path, {"provider": "static"}) == 0
    assert [one.vm for one in kept_lives(path, {})] == ["v0", "v2", "v3"]
    assert forget_lives(tmp_path / "none", {"zone": "2"}) == 0


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MOST_LIVES", 3)
    path = tmp_path / FILE_NAME
    for number in range(6):
        keep_lives(path, f"run {number}", [life("a", 100.0 - number), life("b", 200.0 + number)])
    assert [one.ended_s for one in kept_lives(path, {})] == [203.0, 204.0, 205.0]


WRITER = """
import sys
from pathlib import Path
from manager.history import database
from manager.report.lives import Ending, Life
database.BUSY_S = 60.0
path, run = Path(sys.argv[1]), sys.argv[2]
for number in range(15):
    for vm in (f"v{number}", "same"):
        life = Life(vm=vm, begun_s=1.0, ended_s=2.0, ending=Ending.REVOKED)
        database.keep_lives(path, run, [life])
    database.kept_lives(path, {})
"""


@pytest.mark.slow
def test_several_managers_write_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "not there yet" / FILE_NAME
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), f"run {number}"], cwd=ROOT, stderr=subprocess.PIPE)
        for number in range(3)
    ]
    for writer in writers:
        _, told = writer.communicate(timeout=BOUND_S)
        assert writer.returncode == 0, told.decode()
    assert len(kept_lives(path, {})) == 3 * 16


def lock(path: Path) -> sqlite3.Connection:
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    return holder


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100:] = b"\xff" * (len(content) - 100)
    path.write_bytes(content)


def by_a_newer_morph(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()


def with_what_is_no_life(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("""UPDATE lives SET life_json = '{"vm": 7}'""")
    connection.close()


def by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "locked": (lock, "cannot be read: database is locked", "cannot be written: database is locked"),
    "no database": (lambda path: path.write_text("no database" * 99), "file is not a database", "not a database"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:5000]), "malformed", "malformed"),
    "damaged": (damage, "malformed|not a database", "malformed|not a database"),
    "newer": (by_a_newer_morph, r"a newer Morph \(schema 7\)", r"a newer Morph \(schema 7\)"),
    "a folder": (by_a_folder, "unable to open|disk I/O", "unable to open|disk I/O|Is a directory"),
    "not a life": (with_what_is_no_life, "an entry is not a VM", ""),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_broken_history_file_is_reported_and_the_run_continues(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.0)
    monkeypatch.setenv("MORPH_DATA_DIR", str(tmp_path))
    path, (make, unread, unwritten) = history_path(), HARMS[harm]
    keep_lives(path, "run", [life(f"v{number}") for number in range(100)])
    holder = make(path)
    with pytest.raises(HistoryError, match=unread) as read:
        kept_lives(path, {})
    assert str(read.value).startswith(f"{path}: ")
    if unwritten:
        with pytest.raises(HistoryError, match=unwritten):
            keep_lives(path, "run", [life("new")])
    told: list[str] = []
    history = VmHistory(told.append)
    for _ in range(2):
        assert history.expected(NodeFacts(provider="azure")) == ExpectedLosses()
    assert told == [f"the lives of VMs of earlier runs are not known: {read.value}"]
    if isinstance(holder, sqlite3.Connection):
        holder.close()


def test_a_full_disk_leaves_the_history_as_it_was(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        path = disk.path / FILE_NAME
        keep_lives(path, "run", [life("a")])
        disk.fill()
        with pytest.raises(HistoryError, match="full"):
            keep_lives(path, "more", [life(f"v{number}") for number in range(500)])
        assert [one.vm for one in kept_lives(path, {})] == ["a"]
        disk.free()
        keep_lives(path, "more", [life("b")])
        assert len(kept_lives(path, {})) == 2


def test_a_folder_without_write_permission_is_read_only(tmp_path: Path) -> None:
    path = tmp_path / "data" / FILE_NAME
    keep_lives(path, "run", [life("a")])
    with read_only(path.parent):
        with pytest.raises(HistoryError, match="cannot be written: attempt to write a readonly database"):
            keep_lives(path, "run", [life("b")])
        with pytest.raises(HistoryError, match="Read-only file system"):
            keep_lives(path.parent / "below" / FILE_NAME, "run", [life("b")])
        assert [one.vm for one in kept_lives(path, {})] == ["a"]


def test_a_run_enters_the_history_once_wherever_its_directory_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[str, tuple[Life, ...]]] = []
    monkeypatch.setattr("manager.history.vm_history.keep_lives", lambda path, run, lives: taken.append((run, lives)))
    told: list[str] = []
    history = VmHistory(told.append)
    history.take_in(tmp_path)
    for name, time_s in (("one", 1.0), ("another", 2.0)):
        (tmp_path / name).mkdir()
        with Journal.open(tmp_path / name / "journal.sqlite") as journal:
            journal.append(time_s, "fact", '{"name": "first"}')
    (tmp_path / "one").rename(tmp_path / "moved")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "journal.sqlite").write_bytes((tmp_path / "moved" / "journal.sqlite").read_bytes())
    for name in ("one", "another", "moved"):
        history.take_in(tmp_path / name)
    (one, _), (another, _), (moved, _) = taken
    assert one == moved != another
    assert told == []


def test_an_unreadable_journal_is_reported_and_otherwise_ignored(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_text("no database" * 99)
    told: list[str] = []
    VmHistory(told.append).take_in(tmp_path)
    with pytest.raises(RunDirError) as error:
        Journal.open(tmp_path / "journal.sqlite", read_only=True)
    assert told == [f"the lives of this run's VMs are not stored: {error.value}"]
    (tmp_path / "journal.sqlite").unlink()
    with Journal.open(tmp_path / "journal.sqlite") as journal:
        journal.append(1.0, "event", '{"kind":"node_appeared","of_another_version":1}')
    VmHistory(told.append).take_in(tmp_path)
    assert "line 1 of the journal cannot be read: it was written by another version of Morph, or is damaged" in told[1]


def test_a_run_is_given_the_observations_of_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORPH_DATA_DIR", str(tmp_path))
    lives = [life(f"v{number}", 10.0 + 3600.0 * 50, Ending.RUN_OVER) for number in range(4)]
    keep_lives(history_path(), "run", lives)
    expected = VmHistory(print).expected(NodeFacts(provider="azure"))
    assert expected.per_vm_h == pytest.approx(0.39 * 7.2 / 207.2)
    assert expected.source == "200 VM-hours of azure in earlier runs, and published traces"
    assert VmHistory(print).expected(NodeFacts(provider="local")) == ExpectedLosses()
    assert ControllerConfig.model_fields["expected_losses"].annotation is ExpectedLosses


COMMON = {"cloud": "cloud.yaml", "keep": 2, "memory_bytes": 2**30}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, NodeFacts(provider="azure", region="westus2")),
        ({"sizes": SPEC.sizes[1:]}, NodeFacts(provider="azure", size="Standard_NC6", region="westus2")),
        (
            {"sizes": SPEC.sizes[1:], "zones": ("2",)},
            NodeFacts(provider="azure", size="Standard_NC6", region="westus2", zone="2"),
        ),
        ({"resource_manager": "http://127.0.0.1:9"}, NodeFacts(provider="local", region="westus2")),
    ],
)
def test_on_azure_the_kind_holds_what_the_cloud_file_fixes(change: dict[str, object], kind: NodeFacts) -> None:
    vms = AzureVms.model_validate({"kind": "azure", "address": "10.0.0.4", **COMMON})
    spec = AzureSpec.model_validate({**SPEC.model_dump(), **change})
    assert Cloud(vms, Path("cloud.yaml"), spec).vm_kind == kind


def test_files_with_types_of_gpu_give_maximum_and_price_of_each() -> None:
    azure = AzureVms.model_validate({"kind": "azure", "address": "10.0.0.4", **COMMON})
    sizes = (
        {"name": "Standard_A", "num_gpus": 4, "usd_per_h": 2.0, "node_type": "t4"},
        {"name": "Standard_B", "usd_per_h": 0.75, "node_type": "t4"},
        {"name": "Standard_C", "usd_per_h": 3.0, "node_type": "v100"},
    )
    spec = AzureSpec.model_validate({**SPEC.model_dump(), "sizes": sizes})
    offers = (Offer(node_type="t4", usd_per_h=0.75), Offer(node_type="v100", usd_per_h=3.0))
    assert Cloud(azure, Path("cloud.yaml"), spec).offers() == offers
    static = StaticVms.model_validate({"kind": "static", "address": "10.0.0.4", **COMMON})
    hosts = (
        SshHost(address="h1", num_gpus=4, node_type="t4", usd_per_h=2.0),
        SshHost(address="h2", node_type="v100"),
        SshHost(address="h3", num_gpus=2, node_type="t4", usd_per_h=1.0),
    )
    offers = (Offer(node_type="t4", usd_per_h=0.5, most=6), Offer(node_type="v100", most=1))
    assert Cloud(static, Path("hosts.yaml"), Hosts(hosts=hosts)).offers() == offers
    assert Cloud(static, Path("hosts.yaml"), Hosts(hosts=(SshHost(address="h1"),))).offers() == ()
    with pytest.raises(ValidationError, match="some have a node_type, others do not"):
        Hosts(hosts=(*hosts, SshHost(address="h4")))


def test_hosts_are_all_one_kind() -> None:
    vms = StaticVms.model_validate({"kind": "static", "address": "10.0.0.4", **COMMON})
    hosts = Hosts(hosts=(SshHost(address="h1"), SshHost(address="h2")))
    assert Cloud(vms, Path("hosts.yaml"), hosts).vm_kind == NodeFacts(provider="static")

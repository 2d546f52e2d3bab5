"""Scripts on spot VMs that are taken end with the weights of an undisturbed run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from manager.engine.loop.event_queue import EventQueue
from manager.engine.vms.budget import Spending
from manager.providers.interface.provider import Misconfigured
from manager.providers.local import LocalProvider
from manager.run.markets import load_cloud
from manager.spot.factory import open_local, open_provided
from manager.spot.launcher import TAKEN_CODE, Launcher, ScriptEnd, VmSource
from manager.spot.spec import SpotJob
from morph.cli.main import app
from morph.contract.cluster import Limits
from morph.contract.errors import InputError
from morph.contract.lives import Change
from morph.spot.script import Script
from morph.spot.storage import read_newest, write_backup
from morph.yaml_files import load_cluster
from tests.forked_scripts import Nursery
from tests.grids import IS_LONG
from tests.system.hosts import Hosts
from tests.waiting import BOUND_S

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Takings:
    """Warns or takes one VM after another, each once its script has left a mark in the folder.

    ``takings``: the mark and the notice's lead; without a lead, the VM is taken once a backup is complete.
    """

    end_s = math.inf

    def __init__(self, takings: Sequence[tuple[str, float | None]], folder: Path) -> None:
        self._takings, self._folder = list(takings), folder
        self._done: set[str] = set()

    def between(self, vms: Mapping[str, float], after_s: float, until_s: float) -> tuple[Change, ...]:
        (vm,) = vms
        if vm in self._done or not self._takings or not (self._folder / self._takings[0][0]).exists():
            return ()
        _, lead_s = self._takings[0]
        if lead_s is None and not any(self._folder.glob("backups/*/manifest.json")):
            return ()
        del self._takings[0]
        self._done.add(vm)
        if lead_s is None:
            return (Change(until_s, "taken", (vm,)),)
        return (Change(until_s, "warned", (vm,), until_s + lead_s),)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Fork scripts whose own start is not tested; otherwise each would load torch and its Trainer for seconds."""
    packages = {"accelerate": "morph.spot.hugging_face", "pytorch_lightning": "morph.spot.lightning"}
    nursery = Nursery.with_modules(*(module for package, module in packages.items() if find_spec(package) is not None))
    yield nursery
    nursery.close()


def run(
    folder: Path,
    script: str,
    takings: Sequence[tuple[str, float | None]],
    monkeypatch: pytest.MonkeyPatch,
    nursery: Nursery | None,
    vms: str = "local",
    num_vms: int = 1,
    **environment: str,
) -> ScriptEnd:
    code = folder / "code"
    code.mkdir(parents=True, exist_ok=True)
    for name in ("spot_model.py", script):
        (code / name).write_text((HERE / name).read_text())
    for name, value in {"OUT": str(folder), "PYTHONPATH": str(ROOT), **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(code)  # for "here"
    popen = subprocess.Popen if nursery is None else nursery.popen
    monkeypatch.setattr("manager.spot.agent.subprocess", SimpleNamespace(Popen=popen))
    job = SpotJob(storage=str(folder / "backups"), vms=vms, num_vms=num_vms)
    lives = Takings(takings, folder) if takings else None
    where = None if vms == "here" else code
    outcome = open_local(job, [sys.executable, script], folder / "vms", where, lives).run()
    assert list((folder / "vms").iterdir()) == []
    return outcome


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "package"), [("plain", "torch"), ("hugging_face", "accelerate"), ("lightning", "pytorch_lightning")]
)
def test_a_script_whose_vms_are_taken_ends_with_undisturbed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery, script: str, package: str
) -> None:
    """With a notice nothing is lost; without one, the steps after the newest complete backup are repeated."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    quiet = run(tmp_path / "quiet", f"{script}_script.py", [], monkeypatch, None if script == "plain" else nursery)
    assert (quiet.code, quiet.num_vms) == (0, 1)
    takings = [("waiting-25", 30.0), ("stopped-45", None)]
    taken = run(tmp_path / "taken", f"{script}_script.py", takings, monkeypatch, nursery, PAUSES="25+,45")
    assert (taken.code, taken.num_vms) == (0, 3), taken.reasons
    begins = [int(one) for one in (tmp_path / "taken" / "begins").read_text().split()]
    assert begins[:2] == [0, 26]
    assert begins[2] in (26, 30, 40)
    assert (tmp_path / "taken" / "end").read_text() == (tmp_path / "quiet" / "end").read_text()
    assert sum("the script saves" in reason for _, reason in taken.reasons) == 1


@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_group_of_vms_goes_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery) -> None:
    """One of two VMs is warned: both go, and two others continue from the first one's backup."""
    takings = [("waiting-25", 30.0)]
    taken = run(tmp_path, "plain_script.py", takings, monkeypatch, nursery, num_vms=2, PAUSES="25+")
    assert (taken.code, taken.num_vms) == (0, 2), taken.reasons
    assert sorted((tmp_path / "begins").read_text().split()) == ["0", "0", "26", "26"]


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.skipif(not IS_LONG, reason="two ranks of a Trainer, in two VMs, twice: only in make test-long")
@pytest.mark.parametrize(("script", "package"), [("hugging_face", "accelerate"), ("lightning", "pytorch_lightning")])
def test_a_trainer_of_two_ranks_on_two_vms_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery, script: str, package: str
) -> None:
    """Each rank draws its own dropout, and the first one's backup has the generators of both."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert run(tmp_path / "quiet", f"{script}_script.py", [], monkeypatch, nursery, num_vms=2).code == 0
    takings = [(25, 60.0)]
    taken = run(tmp_path / "taken", f"{script}_script.py", takings, monkeypatch, nursery, num_vms=2, PAUSES="25+")
    assert (taken.code, taken.num_vms) == (0, 2), taken.reasons
    assert sorted((tmp_path / "taken" / "begins").read_text().split()) == ["0", "0", "26", "26"]
    assert (tmp_path / "taken" / "end").read_text() == (tmp_path / "quiet" / "end").read_text()


@pytest.mark.skipif(not IS_LONG, reason="imports both Trainers: only in make test-long")
@pytest.mark.parametrize(("module", "package"), [("hugging_face", "accelerate"), ("lightning", "pytorch_lightning")])
def test_only_sharding_across_vms_is_refused(monkeypatch: pytest.MonkeyPatch, module: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    spot = import_module(f"morph.spot.{module}").Spot()
    sharded = SimpleNamespace(fsdp="full_shard", deepspeed=None, world_size=4, strategy=type("FSDPStrategy", (), {})())
    begin = spot.on_train_begin if module == "hugging_face" else spot.setup
    with pytest.raises(InputError, match="none of which has a whole checkpoint"):
        begin(sharded)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    begin(sharded)


class Noting(Takings):
    """Also records every process of every host once the script runs there."""

    def __init__(self, takings: Sequence[tuple[str, float | None]], folder: Path, hosts: Hosts) -> None:
        super().__init__(takings, folder)
        self._hosts = hosts

    def between(self, vms: Mapping[str, float], after_s: float, until_s: float) -> tuple[Change, ...]:
        changes = super().between(vms, after_s, until_s)
        if changes:
            self._hosts.note()
        return changes


@pytest.mark.system
@pytest.mark.timeout(900)
def test_hosts_over_ssh_run_the_code_and_are_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "spot_model.py").write_text((HERE / "spot_model.py").read_text())
    (code / "plain_script.py").write_text((HERE / "plain_script.py").read_text() + "    print('all is done')\n")
    hosts = Hosts(tmp_path / "hosts", number=2)
    for name, value in {"OUT": str(tmp_path), "PAUSES": "25+", **hosts.environment}.items():
        monkeypatch.setenv(name, value)
    given = {"kind": "static", "cloud": str(hosts.file), "keep": 1, "memory_bytes": 10**9, "device": "cpu"}
    given |= {"address": "127.0.0.2", "shared_storage": True, "pass_variables": ["OUT", "PAUSES"]}
    given |= {"environment": {"python": sys.executable}, "limits": {"max_vms": 2}}
    (tmp_path / "cluster.yaml").write_text(json.dumps({"vms": given}))
    cloud = load_cloud(load_cluster(tmp_path / "cluster.yaml"), tmp_path / "cluster.yaml")
    assert cloud is not None
    job, lives = SpotJob(storage=str(tmp_path / "backups")), Noting([("waiting-25", 30.0)], tmp_path, hosts)
    (tmp_path / "root").mkdir()
    try:
        command = ["python", "plain_script.py"]
        outcome = open_provided(job, command, cloud, tmp_path / "root", code, lives).run()
        assert (outcome.code, outcome.num_vms) == (0, 2), outcome.reasons
        assert hosts.wait_until_empty() == []
        assert list(hosts.directory.glob("h*/.morph/nodes/*")) == []
        assert json.loads((hosts.directory / "leases.json").read_text()) == {}
    finally:
        hosts.close()
    assert (tmp_path / "begins").read_text().split() == ["0", "26"]
    assert "all is done" in capfd.readouterr().out


class Played:
    """A ``ScriptServer`` without any VMs: the script does a step at once, and ends on the second VM."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(self, vms: Sequence[str], command: Sequence[str], storage: str) -> None:
        self.started += vms
        self.left = [b'{"kind": "step", "seconds": 0.001}\n']

    def said(self, vm: str) -> bytes:
        return self.left.pop() if self.left else b""

    def ended(self, vm: str) -> int | None:
        return 0 if len(self.started) == 2 else None

    def save(self, vm: str, number: int) -> None: ...

    def are_silent(self, vms: Sequence[str]) -> bool:
        return False

    def end(self, vms: Sequence[str]) -> None: ...

    def close(self) -> None: ...


class Counted:
    """A fleet that counts its VMs."""

    def __init__(self) -> None:
        self.living, self.most = 0, 0

    def request(self, node: str, *, answers: str | None = None) -> str:
        self.living += 1
        self.most = max(self.most, self.living)
        return node

    def release(self, *nodes: str) -> None:
        self.living -= len(nodes)


@pytest.mark.parametrize(("max_vms", "most"), [(1, 1), (2, 2)])
def test_the_next_vm_is_requested_at_the_notice_where_limits_allow(max_vms: int, most: int) -> None:
    fleet, machines = Counted(), Played()

    class Taken:
        end_s = math.inf
        is_warned = False

        def between(self, vms: Mapping[str, float], after_s: float, until_s: float) -> tuple[Change, ...]:
            ((vm, since_s),) = vms.items()
            if not self.is_warned and not machines.left:
                self.is_warned = True
                return (Change(until_s, "warned", (vm,), until_s + 0.5),)
            return (Change(until_s, "taken", (vm,)),) if until_s - since_s > 0.3 and fleet.most == most else ()

    source = VmSource(LocalProvider(fleet, 2), 1, 1, Spending(Limits(max_vms=max_vms)))
    outcome = Launcher(SpotJob(storage="x"), ["true"], source, machines, Taken(), EventQueue()).run()
    assert (outcome.code, outcome.num_vms, fleet.most, fleet.living) == (0, 2, most, 0)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_vms": 1}, r"vms\.limits\.max_vms is 1"),
        ({"budget_usd": 1.0}, "the price of a VM is not known"),
    ],
)
def test_where_limits_allow_no_group_at_all_the_command_ends(limits: dict[str, float], said: str) -> None:
    source = VmSource(LocalProvider(Counted(), 2), 2, 2, Spending(Limits.model_validate(limits)))
    with pytest.raises(Misconfigured, match=f"no VM may be requested: .*{said}"):
        Launcher(SpotJob(storage="x"), ["true"], source, Played(), None, EventQueue()).run()


@pytest.mark.system
@pytest.mark.timeout(900)
def test_on_a_bare_vm_the_same_command_resumes_on_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery
) -> None:
    first = run(tmp_path, "plain_script.py", [("waiting-25", 30.0)], monkeypatch, nursery, vms="here", PAUSES="25+")
    assert (first.code, first.num_vms) == (TAKEN_CODE, 1), first.reasons
    assert not (tmp_path / "end").exists()
    assert run(tmp_path, "plain_script.py", [], monkeypatch, nursery, vms="here").code == 0
    assert (tmp_path / "begins").read_text().split() == ["0", "26"]


@pytest.mark.system
@pytest.mark.timeout(900)
def test_the_command_ends_with_the_script_s_code_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("storage: backups\n")
    (tmp_path / "fails.py").write_text("import sys; sys.exit(3)")
    command = [sys.executable, "-m", "morph.cli.main", "spot-run", str(tmp_path / "job.yaml"), "--"]
    done = subprocess.run([*command, sys.executable, "fails.py"], capture_output=True, text=True, timeout=2 * BOUND_S)
    assert done.returncode == 3
    assert "the script ended with code 3" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("storage: x\nvms: azure\n", "vms: is not a file (got 'azure'"),
        ("storage: x\nvms: here\nnum_vms: 2\n", "num_vms: is for local VMs"),
        ("storage: x\ncode: nowhere\n", "code: is not a folder (got 'nowhere')"),
        ("storage: x\npreemptions: {mttp_s: 0}\n", "preemptions.mttp_s"),
        ("vms: local\n", "storage"),
        ("storage: x\nnotices: azur\n", "(got 'azur'); allowed: '' or azure or aws or gcp"),
        (
            "storage: nowhere://bucket/job\n",
            "storage: cannot be used: Protocol not known: nowhere (got 'nowhere://bucket/job'); "
            "allowed: a URL fsspec knows",
        ),
        ("storage: x\n", "COMMAND: cannot be started (got './train'); allowed: a program: -- python train.py"),
    ],
)
def test_a_job_that_cannot_be_run_is_refused_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    result = CliRunner().invoke(app, ["spot-run", str(tmp_path / "job.yaml"), "--", "./train"])
    assert result.exit_code == 2
    assert said in result.output


def test_without_a_launcher_a_script_trains_as_it_is(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, morph.spot as spot; pathlib.Path('x').write_text('x')\n"
        "with spot.step(): pass\n"
        "print(spot.should_save(), spot.restore(), spot.backup('x'), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=2 * BOUND_S,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert done.stdout.split() == ["False", "None", "None", "False"]


def test_ranks_of_a_vm_share_one_restore_and_the_first_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, source = str(tmp_path / "storage"), tmp_path / "model.pt"
    (tmp_path / "vm").mkdir()
    (tmp_path / "vm" / "save").write_text("1")
    source.write_text("state")
    write_backup(storage, source)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("morph.spot.script.Script._send_backups", lambda _: None)
    found = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        script = Script(tmp_path / "vm", storage)
        found.append((script.restore(), script.should_save()))
        source.write_text("newer")
        write_backup(storage, source)
    (path, _), _ = found
    assert found == [(path, True), (path, False)]
    assert path.read_text() == "state"


def test_the_newest_whole_backup_comes_back_and_two_are_kept(tmp_path: Path) -> None:
    storage, source = str(tmp_path / "storage"), tmp_path / "model"
    (source / "deep").mkdir(parents=True)
    assert read_newest(storage, tmp_path / "back") is None
    for number in range(1, 5):
        (source / "deep" / "part").write_text(f"state {number}")
        assert write_backup(storage, source) == number
    assert sorted(one.name for one in (tmp_path / "storage").iterdir()) == ["b00000003", "b00000004"]
    found = read_newest(storage, tmp_path / "back")
    assert (found.name, (found / "deep" / "part").read_text()) == ("model", "state 4")


@pytest.mark.parametrize("damage", ["flip", "cut", "no manifest", "no JSON", "no file"])
def test_a_damaged_backup_is_skipped(tmp_path: Path, damage: str) -> None:
    storage, source = str(tmp_path / "storage"), tmp_path / "model.pt"
    for number in (1, 2):
        source.write_text(f"state {number}")
        write_backup(storage, source)
    newest = tmp_path / "storage" / "b00000002"
    (stored,) = (one for one in newest.iterdir() if one.name != "manifest.json")
    match damage:
        case "flip":
            stored.write_text("state 3")
        case "cut":
            stored.write_text("state")
        case "no manifest":
            (newest / "manifest.json").unlink()
        case "no JSON":
            (newest / "manifest.json").write_text("{")
        case "no file":
            stored.unlink()
    found = read_newest(storage, tmp_path / "back")
    assert found.read_text() == "state 1"


def awkward_folder(base: Path) -> tuple[Path, dict[str, bytes], set[str]]:
    """Make a folder; return it with what a restore must bring, and with the names that no backup can hold."""
    folder = base / "run"
    for name in ("epoch=3-val:0.5*?#%20 [a]{b}~'\"\\", "manifest.json", "empty", "é", os.fsdecode(b"\xff")):
        for path in (folder / name, folder / "deep" / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"" if name == "empty" else os.fsencode(str(path)))
    (folder / "none").mkdir()
    (base / "beside" / "more").mkdir(parents=True)
    (base / "beside" / "more" / "weights").write_bytes(b"beside")
    (folder / "latest").symlink_to("deep")
    (folder / "out").symlink_to(base / "beside")
    right = {
        str(Path(where, name).relative_to(folder)): Path(where, name).read_bytes()
        for where, _, names in os.walk(folder, followlinks=True)
        for name in names
    }
    (folder / "gone").symlink_to("nowhere")
    (folder / "self").symlink_to("self")
    (folder / "around").symlink_to(".")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(folder):
        one.bind("socket")
    return folder, right, {"gone", "self", "around", "pipe", "socket"}


def test_a_backup_has_every_file_under_its_name_or_says_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, right, left_out = awkward_folder(tmp_path)
    (tmp_path / "vm").mkdir()
    script = Script(tmp_path / "vm", str(tmp_path / "storage"))
    monkeypatch.chdir(folder / "none")
    for path in (folder, Path("..")):
        script.backup(path)
        script._wait_for_backups()
        restored = script.restore()
        assert restored.name == "run"
        assert {
            str(one.relative_to(restored)): one.read_bytes() for one in restored.rglob("*") if one.is_file()
        } == right
        assert (restored / "none").is_dir()
    said = [record.getMessage() for record in caplog.records]
    assert {line.split(":")[0].rpartition("/")[2] for line in said} == left_out
    for name in (".", "manifest.json", "none"):  # by themselves
        monkeypatch.chdir(folder / "deep" if name == "manifest.json" else folder)
        script.backup(Path(name))
        script._wait_for_backups()
        restored = script.restore()
        assert restored.name == ("run" if name == "." else name)
        assert restored.is_file() == (name == "manifest.json")


def test_a_backup_that_cannot_be_copied_is_said_and_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "vm").mkdir()
    (tmp_path / "model.pt").write_text("state")
    script = Script(tmp_path / "vm", str(tmp_path / "storage"))
    monkeypatch.setattr("shutil.copyfile", full)
    script.backup(tmp_path / "model.pt")
    assert "cannot be copied on the VM's disk: [Errno 28]" in caplog.text
    told = json.loads((tmp_path / "vm" / "events").read_text())
    assert (told["kind"], [one.name for one in (tmp_path / "vm").iterdir()]) == ("refused", ["events"])
    (tmp_path / "vm" / "events").unlink()
    (tmp_path / "vm" / "events").mkdir()  # nothing can be told either
    script.backup(tmp_path / "model.pt")
    with script.step():
        pass
    assert "cannot tell morph spot-run" in caplog.text


def test_a_backup_of_an_earlier_version_is_restored(tmp_path: Path) -> None:
    folder = tmp_path / "storage" / "b00000001"
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "model.pt").write_text("state")
    entry = {"bytes": 5, "sha256": hashlib.sha256(b"state").hexdigest()}
    (folder / "manifest.json").write_text(
        json.dumps({"schema_version": 1, "name": "run", "files": {"run/model.pt": entry}})
    )
    restored = read_newest(str(tmp_path / "storage"), tmp_path / "back")
    assert restored is not None
    assert (restored / "model.pt").read_text() == "state"


def test_a_backup_that_points_elsewhere_is_skipped(tmp_path: Path) -> None:
    storage, source = str(tmp_path / "storage"), tmp_path / "model.pt"
    source.write_text("state")
    write_backup(storage, source)
    manifest = tmp_path / "storage" / "b00000001" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('{"model.pt"', '{"../model.pt"'))
    assert read_newest(storage, tmp_path / "back") is None

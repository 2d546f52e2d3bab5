"""Morph's own wheel goes from the manager's files to a VM that has only Python and Morph's requirements."""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import io
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import yaml

from manager.controller.state.events import WorkerLost
from manager.engine.joining.notice_server import NoticeServer
from manager.engine.loop.event_queue import EventQueue
from manager.journal.records import Fact
from manager.providers.boot.first_boot import (
    MODULES,
    Caller,
    Unfit,
    Unheard,
    bring,
    check_python,
    install,
    lacking,
    packed,
    run_setup,
    watch,
)
from manager.providers.boot.own_wheel import Lock, kept_wheel, make_lock, make_wheel, python_version, requirements
from morph.contract.errors import ClusterError
from morph.link.authority import authority_of
from tests.cloud.image import bare_python
from tests.waiting import BOUND_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECRET, NODE = "n0de-secret-77aa", "tiny-1-0"
WHEEL = "from manager.providers.boot.own_wheel import make_wheel; import sys; sys.stdout.buffer.write(make_wheel())"


@pytest.fixture(scope="module")
def wheel() -> bytes:
    return make_wheel()


class World:
    """A notice server that offers a wheel, and what the manager hears."""

    def __init__(self, wheel: bytes) -> None:
        self.event_queue = EventQueue()
        self.lock = b"tiny-part==1.2\n"
        self.server = NoticeServer(self.event_queue, SECRET, wheel=wheel, lock=lambda: self.lock)
        self.address = f"127.0.0.1:{self.server.port}"

    def caller(self, secret: str = SECRET, num_devices: int = 1) -> Caller:
        return Caller(self.address, NODE, num_devices, authority_of(secret).credential("node"))

    def heard(self) -> list[object]:
        found = [self.event_queue.get(0.0) for _ in range(len(self.event_queue))]
        return [stamped.item for stamped in found if stamped is not None]

    def boot(
        self, directory: Path, options: dict[str, str], wanted: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run the program as a VM does: isolated, and from one file."""
        (directory / "boot.pyz").write_bytes(base64.b64decode(packed()))
        (directory / "secret").write_text(authority_of(SECRET).credential("node"))
        given = {
            "manager": self.address, "node": NODE, "devices": "1", "secret-file": str(directory / "secret"),
            "folder": str(directory / "code"), "python": sys.executable, "python-version": python_version(),
            "sha256": hashlib.sha256(make_wheel()).hexdigest(), "patience-s": "0", "end": "group", **options,
        }  # fmt: skip
        python = given["python"]
        runs = python if os.access(python, os.X_OK) else sys.executable  # chosen as by cloud_init.boot_line
        command = [runs, "-I", str(directory / "boot.pyz"), *(f"--{name}={value}" for name, value in given.items())]
        return subprocess.run(
            [*command, "--", *requirements(), *wanted], capture_output=True, text=True, timeout=BOUND_S, check=False
        )


@pytest.fixture
def world(wheel: bytes) -> Iterator[World]:
    world = World(wheel)
    yield world
    world.server.close()


def test_the_served_wheel_has_every_file_and_reproduces_itself(wheel: bytes, tmp_path: Path) -> None:
    name = f"morph_train-{metadata.version('morph-train')}-py3-none-any.whl"
    (tmp_path / name).write_bytes(wheel)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", tmp_path / "lib"]
    subprocess.run([*pip, tmp_path / name], check=True, timeout=BOUND_S)
    for package in ("calibrate", "manager", "morph", "simulator"):
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert (tmp_path / "lib" / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib")}  # installed, and not in place any more
    again = subprocess.run(
        [bare_python(tmp_path / "image"), "-c", WHEEL],
        capture_output=True, env=environment, cwd=tmp_path, timeout=BOUND_S, check=True,
    )  # fmt: skip
    assert again.stdout == wheel
    assert make_wheel() == wheel


def test_requirements_are_published_and_critical_versions_pinned() -> None:
    found = requirements()
    version = metadata.version("torch")
    assert {f"ray=={metadata.version('ray')}", f"torch=={version}"} <= set(found)
    if version.endswith("+cpu"):
        assert f"torch=={version.partition('+')[0]}" in requirements(any_build=True)
    assert lacking(list(found)) == []
    assert not [one for one in found if one.startswith("morph")]
    known = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert {one.partition("=")[0] for one in found} - {"setuptools"} <= known  # pip itself brings these


def texts() -> Iterator[tuple[Path, str]]:
    """Return what a user reads or copies: files, docs, and messages in the code."""
    for folder in ("benchmarks", "calibrate", "configs", "docs", "manager", "morph", "notebooks", "simulator", "."):
        for path in (ROOT / folder).glob("*" if folder == "." else "**/*"):
            if path.suffix in (".md", ".yaml", ".yml", ".py", ".ipynb", ".json") or path.name == "Makefile":
                yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def test_no_file_doc_or_message_has_an_index_asked_for_morph() -> None:
    named = {str(path) for path, text in texts() if re.search(r"morph[-_.]+train(?!ers\b)", text, re.IGNORECASE)}
    assert named == {"manager/providers/boot/own_wheel.py"}  # the name of the installed distribution
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for path in (ROOT / "configs/runs").glob("*.yaml"):
        packages = yaml.safe_load(path.read_text()).get("vms", {}).get("environment", {}).get("packages", [])
        assert set(packages) <= {*pinned, "s3fs"}, path  # s3fs allows no botocore as new as the pinned boto3's


def test_the_runs_wheel_outlives_its_manager(tmp_path: Path, wheel: bytes) -> None:
    with pytest.raises(ClusterError, match="wheel is gone"):
        kept_wheel(tmp_path / "wheel", make=False)
    assert kept_wheel(tmp_path / "wheel", make=True) == kept_wheel(tmp_path / "wheel", make=False) == wheel


def test_the_first_program_needs_nothing_but_an_old_python(tmp_path: Path) -> None:
    (tmp_path / "boot.pyz").write_bytes(base64.b64decode(packed()))
    done = subprocess.run(  # not even packages
        [sys.executable, "-I", "-S", tmp_path / "boot.pyz", "--help"], capture_output=True, text=True, timeout=BOUND_S
    )
    assert "--sha256" in done.stdout, done.stderr
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(packed()))) as archive:
        assert sorted(archive.namelist()) == sorted(("__main__.py", *MODULES))
        for name in MODULES:
            ast.parse(archive.read(name), feature_version=(3, 8))


def test_a_vm_gets_morph_from_its_first_program_without_an_index(world: World, tmp_path: Path) -> None:
    python = bare_python(tmp_path / "image")
    look = [python, "-c", "import manager.notices.agent as found; print(found.__file__)"]
    assert subprocess.run(look, capture_output=True, cwd=tmp_path, timeout=BOUND_S, check=False).returncode != 0
    done = world.boot(tmp_path, {"python": python})
    assert (done.returncode, done.stdout) == (0, ""), done.stderr  # nothing was missing, so pip was not called
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "code")}
    found = subprocess.run(look, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=BOUND_S)
    assert found.stdout.strip() == str(tmp_path / "code/manager/notices/agent.py"), found.stderr
    assert world.heard() == []


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder that is pip's only index: two versions of a package."""
    folder = tmp_path / "index"
    folder.mkdir()
    for version in ("1.2", "1.3"):
        publish(folder, version)
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(folder))):
        monkeypatch.setenv(name, value)
    return folder


def publish(folder: Path, version: str, content: str = "") -> None:
    with zipfile.ZipFile(folder / f"tiny_part-{version}-py3-none-any.whl", "w") as archive:
        info = f"tiny_part-{version}.dist-info"
        archive.writestr("tiny_part.py", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_missing_packages_are_installed_in_the_runs_versions(world: World, tmp_path: Path, index: Path) -> None:
    world.lock = make_lock(["tiny-part<1.3"]).encode()
    python = bare_python(tmp_path / "image")
    done = world.boot(tmp_path, {"python": python}, ("tiny-part",))
    assert (done.returncode, done.stdout) == (0, "missing: tiny-part\n"), done.stderr
    look = [python, "-c", "from importlib.metadata import version; print(version('tiny-part'), version('ray'))"]
    found = subprocess.run(look, capture_output=True, text=True, cwd=tmp_path, timeout=BOUND_S, check=True)
    assert found.stdout.split() == ["1.2", metadata.version("ray")]


def test_a_file_that_is_not_the_locked_one_is_not_installed(world: World, tmp_path: Path, index: Path) -> None:
    world.lock = make_lock(["tiny-part==1.2"]).encode()
    publish(index, "1.2", "import os")
    done = world.boot(tmp_path, {"python": bare_python(tmp_path / "image")}, ("tiny-part",))
    assert done.returncode == 1
    fact = world.heard()[0]
    assert isinstance(fact, Fact)
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in fact.detail


def test_a_lock_is_made_once_for_a_run_whatever_is_published_later(tmp_path: Path, index: Path) -> None:
    told: list[str] = []
    path = tmp_path / "requirements.lock"
    first = Lock(path, ["tiny-part"], told.append)()
    assert b"tiny-part==1.3 --hash=sha256:" in first
    publish(index, "1.4")
    assert Lock(path, ["tiny-part"], told.append)() == first  # another manager of the run, a week later
    assert b"tiny-part==1.2 --hash=" in Lock(path, ["tiny-part<1.3"], told.append)()
    assert told == []
    assert Lock(path, ["no-such-thing==1"], told.append)() == b"no-such-thing==1\n"
    (sentence,) = told
    assert sentence.startswith(
        "pip cannot determine what VMs should install: ERROR: No matching distribution found for no-such"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"python-version": "3.12.99"}, f"is Python {platform.python_version()}, and Ray needs the manager's 3.12.99"),
        ({"python": "/opt/none/bin/python"}, "there is no /opt/none/bin/python: vms.environment.python must name"),
        ({"sha256": "0" * 64}, f"not the run's {'0' * 64}"),
    ],
)
def test_the_reason_why_a_vm_is_unfit_is_one_sentence(
    world: World, tmp_path: Path, options: dict[str, str], told: str
) -> None:
    done = world.boot(tmp_path, options)
    assert done.returncode == 1
    fact, lost = world.heard()
    assert isinstance(fact, Fact)
    assert isinstance(lost, WorkerLost)
    assert (fact.name, fact.worker, lost.worker) == ("vm_unfit", NODE, NODE)
    assert fact.detail == lost.cause
    assert told in fact.detail
    assert "\n" not in fact.detail
    assert not (tmp_path / "code").exists()


@pytest.mark.parametrize(
    ("damage", "told"),
    [("wheel", "BadZipFile: File is not a zip file"), ("folder", "NotADirectoryError: ")],
)
def test_any_failure_of_the_boot_is_reported(tmp_path: Path, damage: str, told: str) -> None:
    wheel = b"no zip" if damage == "wheel" else make_wheel()
    world, options = World(wheel), {"sha256": hashlib.sha256(wheel).hexdigest()}
    if damage == "folder":
        (tmp_path / "file").touch()
        options["folder"] = str(tmp_path / "file" / "code")
    try:
        done = world.boot(tmp_path, options)
        fact, lost = world.heard()
    finally:
        world.server.close()
    assert done.returncode == 1
    assert isinstance(fact, Fact)
    assert isinstance(lost, WorkerLost)
    assert (fact.name, lost.worker, lost.unfit) == ("vm_unfit", NODE, True)
    assert fact.detail.startswith(told), fact.detail


def test_a_line_of_setup_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    line = f"sleep 1000 & echo $! >{tmp_path}/child; wait"
    with pytest.raises(Unfit, match=r"vms.environment.setup: .* did not end within 2 s"):
        run_setup(["false", line], timeout_s=2.0)
    child = int((tmp_path / "child").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(BOUND_S)


def test_a_watchdog_waits_while_it_is_told_to_stay(tmp_path: Path) -> None:
    path, now_s = tmp_path / "stay", 0.0

    def pause(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if now_s < 1000.0:
            path.touch()

    watch(path, 960.0, clock=lambda: now_s, pause=pause)
    assert 1000.0 + 960.0 <= now_s + 10.0 < 2000.0
    watch(tmp_path / "never", 960.0, clock=lambda: now_s, pause=pause)
    assert now_s >= 1900.0 + 960.0


def test_each_worker_of_an_unfit_vm_is_given_up_and_recorded_once(world: World) -> None:
    for _ in range(2):
        world.caller(num_devices=2).tell_unfit("no room")
    heard = world.heard()
    assert [one.worker for one in heard if isinstance(one, WorkerLost)] == [f"{NODE}.d0", f"{NODE}.d1"] * 2
    assert [one for one in heard if isinstance(one, Fact)] == [Fact(name="vm_unfit", worker=NODE, detail="no room")]


def test_a_stranger_gets_nothing_and_is_not_heard(world: World, tmp_path: Path) -> None:
    stranger = world.caller("another-secret")
    with pytest.raises(OSError, match="certificate"):
        stranger.file("wheel")
    with contextlib.suppress(OSError):
        stranger.tell_unfit("everything")
    assert world.heard() == []
    with pytest.raises(Unheard, match="within 0 s"):
        bring(stranger, "0" * 64, tmp_path / "code", 0.0)


def test_another_wheel_than_the_runs_is_not_unpacked(world: World, tmp_path: Path) -> None:
    with pytest.raises(Unfit, match="not the run's"):
        bring(world.caller(), hashlib.sha256(b"another").hexdigest(), tmp_path / "code", 0.0)
    assert list(tmp_path.iterdir()) == []


def test_installed_packages_are_not_requested() -> None:
    ray = metadata.version("ray")
    assert lacking(["ray", f"ray=={ray}", "ray>=2.9", "torch>=2"]) == []
    wrong = ["ray==0.1", "ray>=99.1", "no-such-thing", "no-such-thing>=1", "ray~=2.0", "ray; python_version > '3'"]
    assert lacking(wrong) == wrong
    torch = metadata.version("torch").partition("+")[0]
    assert lacking([f"torch=={torch}"]) == []
    assert lacking([f"torch=={torch}+none"]) == [f"torch=={torch}+none"]


def test_a_failure_of_pip_is_reported_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_DISABLE_PIP_VERSION_CHECK"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(Unfit, match="pip cannot install no-such-thing==1: ERROR: Could not find a version"):
        install(["pip", "no-such-thing==1"], lambda: "no-such-thing==1\n")
    with pytest.raises(Unfit, match="there is no /none"):
        check_python("/none", python_version())

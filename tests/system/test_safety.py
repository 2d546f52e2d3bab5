"""What a run exposes: its sockets and files, and what is left when its terminal is closed."""

from __future__ import annotations

import base64
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manager.dashboard.server import read_address
from manager.host.processes import lives
from manager.journal.journal import Journal
from manager.report.journal_reader import read_report
from manager.run_dir import JOURNAL
from morph.checkpoint.manifest import complete_versions
from morph.cli.main import app
from tests.system.commands import ended, environment_of_commands
from tests.system.exposure import Shown, files_below, files_with, holds, shown_by, with_secrets
from tests.system.held import BEAT_S, ORDER_S, HeldJob
from tests.system.watched import WatchedMorph
from tests.waiting import BOUND_S, START_S

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

MANY_STEPS, HELD_AFTER = 1_000_000, 8
VMS = "{num_vms: 3, launcher: ray, pass_variables: [OF_STORE]}"
POLICY = (
    f"{{checkpoint_every_steps: 5, start_patience_s: {START_S}, heartbeat_timeout_s: {BEAT_S}, "
    f"order_timeout_s: {ORDER_S}}}"
)
PRIVATE = ("attach.json", "page.json")
"""Files of a run directory that hold a secret during the run."""
STRANGER = """
import sys
from ray._raylet import GcsClient
try:
    print("came in:", len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=60)), "nodes")
except Exception as error:
    print(f"refused: {type(error).__name__}: {error}")
"""


@dataclass(frozen=True)
class Seen:
    """Observations of one run, while it trained and after its terminal was closed.

    ``shown``: what its processes expose. ``ray_files``: Ray's logs and sessions. ``files``: the run directory.
    ``live_modes``: modes of the files with secrets.
    """

    tokens: dict[str, str]
    all_secrets: tuple[str, ...]
    shown: Shown
    live_modes: dict[str, int]
    ray_files: dict[str, bytes]
    files: dict[str, bytes]
    outputs: dict[str, str]
    strangers: dict[str, str]
    code: int
    run_dir: Path
    modes: dict[str, int]


@pytest.fixture(scope="module")
def credentials() -> Iterator[str]:
    """Set a variable that workers get, as credentials of a store are; return its value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OF_STORE", value := secrets.token_hex())
        yield value


@pytest.fixture(scope="module")
def seen(calibrated: Path, credentials: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("safety")
    run_dir, cluster = folder / "run", folder / "cluster.yaml"
    job = HeldJob(folder / "code", folder / "gate", HELD_AFTER)
    cluster.write_text(f"vms: {VMS}\npolicy: {POLICY}\n", encoding="utf-8")
    arguments = (
        *("run", job.path, "--profile", calibrated, "--cluster", cluster, "--run-dir", run_dir),
        *("--steps", MANY_STEPS, "--plain", "--verbose"),
    )
    with WatchedMorph(folder / "made", *arguments) as command:
        command.wait_for("the checkpoint of version")
        family = [process for process in command.family() if process.is_running()]
        shown = shown_by(family)
        environments = shown.environments.values()
        ray_directory = Path(next(found["RAY_TMPDIR"] for found in environments if "RAY_TMPDIR" in found))
        token = ray_directory / "token"
        live_modes = {path.name: path.stat().st_mode for path in (token, *(run_dir / name for name in PRIVATE))}
        live_modes["the directory of Ray"] = ray_directory.stat().st_mode
        modes = {f"{path} meanwhile": path.lstat().st_mode for path in (run_dir, *run_dir.rglob("*")) if path.exists()}
        address = read_address(run_dir)
        tokens = {"Ray's token": token.read_text(encoding="ascii"), "the page's token": address.token}
        (head,) = [found.port for found in shown.listening if found.process == "gcs_server"]
        address_of_head = f"127.0.0.1:{head}"
        strangers = {
            "another token": _stranger(address_of_head, RAY_AUTH_TOKEN="f" * 64),
            "no token": _stranger(address_of_head),
            "the token": _stranger(address_of_head, RAY_AUTH_TOKEN_PATH=str(token)),
        }
        outputs = {
            "the same command again": _told_again(*arguments),
            "status": _told("status", run_dir, "--png", run_dir / "run.png"),
            "events": _told("events", run_dir),
            "status as JSON": _told("status", run_dir, "--json"),
        }
        _told("report", run_dir, "--price", 1, "--on-demand-price", 3, "-o", run_dir / "report.html")
        outputs["inject"] = _told("inject", run_dir, "--vm", "vm2", "--notice", "1s")
        command.wait_for("vm2 was lost")
        before = command.output.count("the checkpoint of version")
        worker = next(process for process in family if lives(process) and process.name().startswith("ray::Worker"))
        worker.kill()
        command.wait_for("its process is gone")
        assert before
        ray_files = {str(path.relative_to(ray_directory)): data for path, data in files_below(ray_directory)}
        job.let_go()
        command.close_terminal()
        code = command.wait_for_end()
        outputs["the run"] = command.output
        assert not ray_directory.exists()
        all_secrets = (*command.secrets, credentials)
    modes |= {str(path): path.lstat().st_mode for path in (run_dir, *run_dir.rglob("*"))}
    files = {str(path.relative_to(run_dir)): data for path, data in files_below(run_dir)}
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        files["the journal, line by line"] = "\n".join(entry.payload_json for entry in journal.read()).encode()
    return Seen(
        tokens, all_secrets, shown, live_modes, ray_files, files, outputs, strangers, code, run_dir, modes
    )  # fmt: skip


def _stranger(address: str, **token: str) -> str:
    """Return the answer of Ray's head node to a process with this token, or without one."""
    environment = {**environment_of_commands(), "RAY_AUTH_MODE": "token" if token else "disabled", **token}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, address], capture_output=True, text=True, timeout=BOUND_S, env=environment
    )
    return done.stdout + done.stderr


def _told_again(*arguments: object) -> str:
    done = ended(*arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "is in use by process" in done.stderr
    return done.stdout + done.stderr


def _told(*arguments: object) -> str:
    """Return what a command in this process writes to both of its outputs."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_search_finds_what_it_looks_for() -> None:
    for text in (b"x s3cret-of-many-letters y", base64.b64encode(b"ab s3cret-of-many-letters y")):
        assert holds(text, "s3cret-of-many-letters")
    assert not holds(b"s3cret of many letters", "s3cret-of-many-letters")


def test_everything_listens_on_loopback_alone(seen: Seen) -> None:
    assert {found for found in seen.shown.listening if found.address != "127.0.0.1"} == set()
    names = {found.process.split("::")[-1] for found in seen.shown.listening}
    assert {"gcs_server", "raylet"} <= names  # the right processes were examined


def test_the_secrets_of_the_run_are_known_to_this_test(seen: Seen) -> None:
    assert set(seen.tokens.values()) <= set(seen.all_secrets)
    assert len(set(seen.all_secrets)) >= 5  # includes the run's secret, and the one from which the workers' own follow
    assert all(len(secret) >= 32 for secret in seen.all_secrets)


def test_no_secret_is_in_the_run_directory(seen: Seen) -> None:
    assert {"run.json", JOURNAL, "report.html"} <= seen.files.keys()
    assert any(name.endswith(".safetensors") for name in seen.files)
    assert files_with(seen.files, seen.all_secrets) == set()
    assert not any((seen.run_dir / name).exists() for name in PRIVATE)


def test_rays_logs_hold_no_secret_and_its_token_is_in_one_file(seen: Seen) -> None:
    assert any(name.endswith(".log") or name.endswith(".out") for name in seen.ray_files)
    assert files_with(seen.ray_files, seen.all_secrets) == {"token"}


def test_no_secret_is_in_a_command_line_or_an_environment(seen: Seen, credentials: str) -> None:
    assert seen.shown.command_lines
    assert with_secrets(seen.shown, set(seen.all_secrets) - {credentials}) == []


def test_no_secret_is_shown_by_any_command_or_error(seen: Seen) -> None:
    for name, text in {**seen.outputs, **seen.strangers}.items():
        assert text, name
        assert not any(holds(text.encode(), secret) for secret in seen.all_secrets), name


def test_files_with_a_secret_are_their_owner_s_alone(seen: Seen) -> None:
    directory = seen.live_modes["the directory of Ray"]
    assert stat.S_IMODE(directory) == 0o700
    for name in ("token", *PRIVATE):
        assert stat.S_IMODE(seen.live_modes[name]) == 0o600, name


def test_everything_in_the_run_directory_is_its_user_s_alone(seen: Seen) -> None:
    names = {Path(path.removesuffix(" meanwhile")).name for path in seen.modes}
    assert {"run.json", JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm", "run.png", "report.html", *PRIVATE} <= names
    assert any(name.endswith(".safetensors") for name in names)
    folders = {path for path, mode in seen.modes.items() if stat.S_ISDIR(mode)}
    assert {path: oct(mode) for path, mode in seen.modes.items() if stat.S_IMODE(mode) & 0o077} == {}
    assert {stat.S_IMODE(seen.modes[path]) for path in folders} == {0o700}
    assert {stat.S_IMODE(mode) for path, mode in seen.modes.items() if path not in folders} == {0o600}


def test_ray_refuses_clients_with_another_token_or_none(seen: Seen) -> None:
    # the head node and three VMs
    assert "came in: 4 nodes" in seen.strangers["the token"], seen.outputs["the run"]
    for kind in ("another token", "no token"):
        assert "refused" in seen.strangers[kind], kind
        assert "came in" not in seen.strangers[kind], kind


def test_a_closed_terminal_ends_the_run_saved(seen: Seen) -> None:
    assert seen.code == 130, seen.outputs["the run"]
    report = read_report(seen.run_dir)
    assert report.outcome == "stopped"
    assert complete_versions(str(seen.run_dir / "checkpoints"))[-1] == report.version
    assert signal.Signals.SIGHUP.name in str(seen.files["the journal, line by line"])

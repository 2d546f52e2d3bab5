from __future__ import annotations

import errno
import io
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from calibrate.timing.samples import timing
from morph import __version__
from morph.cli.main import OFFERED, app
from morph.cli.reading import progress
from morph.cli.reading.errors import MorphGroup
from morph.cli.reading.help import MAX_COLUMNS, MAX_LINES, found_by_name
from morph.contract.errors import ClusterError, InputError, PeerLost, PlanError, WaitTimeout
from morph.contract.profile import load_profile
from simulator import synthetic_profile
from tests.cli.given import Given
from tests.waiting import BOUND_S, poll_until

COMMANDS = ("calibrate", "plan", "simulate", "run", "resume", "status", "demo", "trace-deps", "elastic")
HEAVY = ("torch", "ray", "numpy", "fsspec", "numba", "pandas", "matplotlib", "simpy", "transformers", "yaml", "psutil")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S, check=True)
    return done.stdout


def test_help_loads_nothing_heavy() -> None:
    loaded = run_python(
        "import sys\n"
        "sys.argv = ['morph', '--help']\n"
        "from morph.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert "Usage: morph" in loaded
    assert loaded.splitlines()[-1] == "LOADED []"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_loads_nothing_heavy(name: str) -> None:
    loaded = run_python(
        "import sys\n"
        f"sys.argv = ['morph', {name!r}, '--help']\n"
        "from morph.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert loaded.splitlines()[-1] == "LOADED []"


def test_ctrl_c_while_the_process_ends_shows_no_traceback() -> None:
    code = (
        "import atexit, os, signal, sys\n"
        "from morph.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['morph', '--version']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_importing_morph_and_listing_its_names_loads_no_torch() -> None:
    code = "import sys, morph; names = dir(morph); print([n for n in ('torch', 'ray') if n in sys.modules], *names)"
    loaded, *names = run_python(code).split()
    assert loaded == "[]"
    assert {"CutPoint", "Job", "LossScaling", "elastic", "spot", "__version__"} <= set(names)


def test_every_name_that_morph_lists_can_be_fetched() -> None:
    import morph

    assert [name for name in dir(morph) if not hasattr(morph, name)] == []


def helps(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for sub, found in getattr(command, "commands", {}).items():
        yield from helps(found, f"{name} {sub}")


HELPS = dict(helps(typer.main.get_command(app), ""))


@pytest.mark.parametrize("name", HELPS)
def test_each_help_fits_a_screen_and_names_every_option(name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split(), "--help"], prog_name="morph").output
    lines = shown.splitlines()
    assert len(lines) <= MAX_LINES, shown
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []
    assert shown.index("Example") < shown.index("\n  --" if name else "Measure")
    for param in HELPS[name].params if name else ():
        if getattr(param, "hidden", False):
            continue
        options = [option for option in param.opts if option.startswith("-") and option != "--help"]
        assert not options or any(option.removeprefix("--") in shown for option in options), options


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_an_example(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "Example:" in result.output
    lines = result.output.splitlines()
    assert any(line.strip().startswith(f"morph {name}") for line in lines), "an example must keep its own line"


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"morph {__version__}\n")


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(app, ["evaporate"])
    assert result.exit_code == 2
    assert "evaporate" in result.output


UP_TO_AN_IMPORT = """
import os, sys

class Watch:
    awaited = sys.argv.pop(1)

    def find_spec(self, name, path=None, target=None):
        if name == self.awaited:
            sys.stderr.flush()
            os._exit(42)

sys.meta_path.insert(0, Watch())
from morph.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["cut", "jobs.py:good"], "loading PyTorch and jobs.py:good ...\n"),
        (["calibrate", "jobs.py:good"], "loading PyTorch and jobs.py:good ...\n"),
        (["rehearse", "profile.json", "-P", "2", "-D", "1"], "planning 2 x 1 ...\n"),
        (["demo"], "loading PyTorch and the simulator ...\n"),
        (
            ["run", "jobs.py:good", "--profile", "profile.json", "--cluster", "cluster.yaml", "--log-format", "json"],
            "checking the job: loading PyTorch, cutting the model, comparing it with the plain one ...\n",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_says_what_it_does_before_it_loads_what_is_slow(given: Given, command: list[str], said: str) -> None:
    slow = "numba" if command[0] == "rehearse" else "torch"
    code = [sys.executable, "-c", UP_TO_AN_IMPORT, slow]
    done = subprocess.run([*code, *command], cwd=given.folder, capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 42, done.stderr
    lines = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith("reading")]  # if it was long
    assert ("".join(lines), done.stdout) == (said, "")


def test_help_lists_every_command_under_a_title() -> None:
    rows = CliRunner().invoke(app, ["--help"]).output.rpartition("\n\n")[2].splitlines()
    assert rows[0].split()[:2] == ["Measure", "calibrate"]
    listed = [row[11:].split()[0] for row in rows]
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def app_raising(error: BaseException) -> typer.Typer:
    app = typer.Typer(cls=MorphGroup, rich_markup_mode=None)

    @app.callback()
    def root() -> None:
        """Root."""

    @app.command()
    def work() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("is empty", source="job.py", field="data"), 2, "error: job.py: data: is empty\n"),
        (
            PlanError("too many GPUs", source="--gpus", value=64, allowed="at most 8"),
            2,
            "error: --gpus: too many GPUs (got 64); allowed: at most 8\n",
        ),
        (InputError("first line\n    second line"), 2, "error: first line second line\n"),
        (WaitTimeout("no answer in 5 s"), 1, "error: no answer in 5 s\n"),
        (ClusterError("cannot start"), 1, "error: cannot start\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(errno.ENOSPC, "No space left on device", "a.png"), 1, "error: a.png: No space left on device\n"),
        (OSError(errno.EROFS, "Read-only file system"), 1, "error: Read-only file system\n"),
    ],
)
def test_an_expected_error_is_one_line_and_a_code(error: BaseException, code: int, line: str) -> None:
    result = CliRunner().invoke(app_raising(error), ["work"])
    assert result.exit_code == code
    assert (result.stderr, result.stdout) == (line, "")


@pytest.mark.parametrize(
    "make",
    [lambda: ZeroDivisionError("bug"), lambda: OSError(errno.EBADF, "bug"), lambda: PeerLost("leaked out of its loop")],
)
def test_an_unexpected_error_keeps_its_traceback(make: Callable[[], Exception]) -> None:
    error = make()
    result = CliRunner().invoke(app_raising(error), ["work"])
    assert result.exception is error
    assert result.stderr == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_phase_has_a_bar_on_a_terminal_and_a_line_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG_S", 0.0)
    for shown, said in ((Terminal(), "0:00:00"), (io.StringIO(), "simulating ...\n")):
        monkeypatch.setattr(sys, "stderr", shown)
        with progress.doing_if_long("simulating"):
            poll_until(lambda shown=shown, said=said: said in shown.getvalue(), said)  # type: ignore[misc]
        assert "simulating" in shown.getvalue()


def test_what_the_root_offers_other_rooms_is_what_their_commands_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(callable(found_by_name(place)) for place in OFFERED.values())
    profile = synthetic_profile()
    (tmp_path / "profile.json").write_text(profile.model_dump_json(), encoding="utf-8")
    planned = CliRunner().invoke(app, ["plan", str(tmp_path / "profile.json"), "--gpus", "2"])
    assert "followers, auto: " in planned.stdout, planned.output
    monkeypatch.setattr("calibrate.writing.measure.calibrate", lambda *_, **__: profile)
    monkeypatch.setitem(OFFERED, "commit round", f"{__name__}:rounds_s")
    measured = ["calibrate", "configs/jobs/tiny_gpt.py:job", "--samples", "5", "--commit-round", "-o"]
    done = CliRunner().invoke(app, [*measured, str(tmp_path / "with.json")])
    assert done.exit_code == 0, done.output
    assert load_profile(tmp_path / "with.json").commit == timing(rounds_s(5))


def rounds_s(num_samples: int) -> list[float]:
    return [0.25] * num_samples

"""The outputs in the tutorial and in README are from one run of the tutorial's commands, in order.

python -m tests.system.test_tutorial     # `make tutorial-output`: writes them anew
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.commands import COMMAND, COMMAND_TIMEOUT_S, ROOT, environment_of_commands

TUTORIAL = ROOT / "docs/start/tutorial.md"
PAGES = (TUTORIAL, ROOT / "README.md")
FILE = re.compile(r"^`(\S+\.(?:py|yaml))`[^`\n](?:[^\n]+\n)*\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```\n((?:morph .*\n)+)```", re.MULTILINE)
OUTPUT = re.compile(r"(<!-- output of (.+?)(?:; lines with (.+?))? -->\n+```\n)(.*?)(```)", re.DOTALL)
RUN, INJECT = "morph run run.yaml", "morph inject"
ENOUGH = "no step lost|run again"
"""The end of a line of the run once training continues after the loss."""
FIGURES = (
    (r"no step lost|\d+ steps? run again", "COST"),
    (r"\d+ ?x ?\d+( \+ \d+ ?x ?\d+)*", "SHAPE"),
    (r"[\d.,]*\d[\d.,]*(e-\d+)?( ?(ms|s|min|MiB|KiB|MB|GB))?\b", "N"),
    (r"[\s─━═│┃]+", " "),
)


def files() -> dict[str, str]:
    """Return the tutorial's files by name."""
    return dict(FILE.findall(TUTORIAL.read_text(encoding="utf-8")))


def commands() -> list[str]:
    """Return the tutorial's commands, without comments."""
    blocks = COMMANDS.findall(TUTORIAL.read_text(encoding="utf-8"))
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]


def printed(folder: Path) -> dict[str, list[str]]:
    """Carry out the tutorial's commands in a folder; return the lines of each."""
    for name, text in files().items():
        (folder / name).write_text(text, encoding="utf-8")
    found: dict[str, list[str]] = {}
    log, running = folder / "run.log", None
    try:
        for command in commands():
            if command == RUN:
                with log.open("w") as file:
                    running = subprocess.Popen(_words(command), cwd=folder, env=_environment(), stdout=file)
                _wait_for("training", log, running)
                continue
            done = subprocess.run(
                _words(command),
                cwd=folder,
                env=_environment(),
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
            )
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            found[command] = done.stdout.splitlines()
            if running is not None and command.startswith(INJECT):
                _wait_for(ENOUGH, log, running)
                _wait_for(f"(?s)({ENOUGH}).*training .* step", log, running)
    finally:
        if running is not None:
            running.send_signal(signal.SIGINT)
            running.wait(COMMAND_TIMEOUT_S)
    found[RUN] = log.read_text(encoding="utf-8").splitlines()
    return found


def _words(command: str) -> list[str]:
    return [*COMMAND, *shlex.split(command)[1:]]


def _environment() -> dict[str, str]:
    return environment_of_commands() | {"COLUMNS": "100"}


def _wait_for(pattern: str, log: Path, running: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + COMMAND_TIMEOUT_S
    while re.search(pattern, text := log.read_text(encoding="utf-8")) is None:
        assert running.poll() is None, text
        assert time.monotonic() < until_s, f"waited {COMMAND_TIMEOUT_S:g} s for {pattern!r}:\n{text}"
        time.sleep(0.2)


def outputs(text: str) -> Iterator[tuple[str, str | None, list[str]]]:
    """Return of each block of output its command, the pattern of its lines, and the lines."""
    for found in OUTPUT.finditer(text):
        yield found[2], found[3], found[4].splitlines()


def chosen(lines: list[str], pattern: str | None) -> list[str]:
    return [line for line in lines if pattern is None or re.search(pattern, line)]


def without_figures(line: str) -> str:
    for pattern, word in FIGURES:
        line = re.sub(pattern, word, line)
    return line.strip()


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(1200)
def test_the_tutorials_commands_print_what_the_pages_show(tmp_path: Path) -> None:
    found = printed(tmp_path)
    for page in PAGES:
        for command, pattern, stored in outputs(page.read_text(encoding="utf-8")):
            known = [without_figures(line) for line in chosen(found[command], pattern)]
            assert [line for line in map(without_figures, stored) if line not in known] == [], (page, command)


def test_every_output_on_the_pages_is_of_a_command_of_the_tutorial() -> None:
    """Both pages show the same run: what is in README is in the tutorial."""
    shown = [list(outputs(page.read_text(encoding="utf-8"))) for page in PAGES]
    assert {command for of_page in shown for command, _, _ in of_page} <= set(commands())
    assert shown[1]
    in_tutorial = {line for _, _, lines in shown[0] for line in lines}
    assert [line for _, _, lines in shown[1] for line in lines if line not in in_tutorial] == []
    assert [line for line in in_tutorial if len(line) > 100] == []


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tutorial") as folder:
        found = printed(Path(folder))
    for page in PAGES:

        def anew(block: re.Match[str]) -> str:
            lines = chosen(found[block[2]], block[3])
            return f"{block[1]}{''.join(line.rstrip() + chr(10) for line in lines)}{block[5]}"

        page.write_text(OUTPUT.sub(anew, page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())

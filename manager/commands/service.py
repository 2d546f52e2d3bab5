"""``morph service``: print a unit or script that restarts a run's manager, under systemd or in a Slurm cluster."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

STOP_S = 900
"""Longest time (seconds) that a manager may take to stop: it saves first, which depends on storage."""

UNIT = """\
# systemctl --user: ~/.config/systemd/user/{name}.service, then
#   systemctl --user daemon-reload && systemctl --user enable --now {name} && loginctl enable-linger
[Unit]
Description=Morph: {what}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec={limit_s}
StartLimitBurst={starts}

[Service]
Type=exec
WorkingDirectory={folder}
# variables that vms.pass_variables and notify name, and credentials of storage and cloud: NAME=value lines, mode 0600
EnvironmentFile=-{environment}
ExecStart={command}
Restart=on-failure
# pauses grow from {first_s} s to {longest_s} s (systemd 254; an older one waits {first_s} s each time); StartLimitBurst
# bounds the starts within StartLimitIntervalSec
RestartSec={first_s}
RestartSteps=8
RestartMaxDelaySec={longest_s}
# exit codes after morph stop (75) and systemctl stop (130); 2: refused, which another start does not change
SuccessExitStatus=75 130
RestartPreventExitStatus=2
# VMs outlive a manager that dies, so that the next one can take them over; a manager that is stopped ends them itself
KillMode=process
OOMPolicy=continue
TimeoutStopSec={stop_s}

[Install]
WantedBy=default.target
"""

SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --output={log}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR2@{stop_s}
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
# The manager of a run of Morph: {what}. Before the time limit it saves and stops, and the job is queued again.
cd {folder} || exit 2
again= asked= pid=
stop() {{ asked=1; [ -z "$pid" ] || kill -TERM "$pid"; }}
trap 'again=1; stop' USR2
trap stop TERM INT
{command} &
pid=$!
[ -z "$asked" ] || kill -TERM "$pid"
wait "$pid"; code=$?
while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
# 0: finished, 2: refused, which another start does not change, 75: morph stop, 130: stopped by scancel or for the limit
case "$code" in
0|2|75|130) rm -f {failures} ;;
*)
    failed=$(cat {failures} 2>/dev/null); [ "$SECONDS" -lt {longest_s} ] || failed=0
    failed=$((${{failed:-0}} + 1)); echo "$failed" >{failures}
    pause=$(({first_s} << (failed > 8 ? 7 : failed - 1))); [ "$pause" -lt {longest_s} ] || pause={longest_s}
    if [ "$failed" -lt {starts} ]; then
        echo "ended with code $code, $failed of {starts} times: queued again in $pause s"
        again=1; [ -n "$asked" ] || {{ sleep "$pause" & wait $!; }}
    else
        echo "ended with code $code {starts} times in a row: it is not queued again; sbatch starts it anew"
        rm -f {failures}
    fi ;;
esac
if [ -n "$again" ] && [ "$code" -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


FIRST_S, LONGEST_S, STARTS, LIMIT_S = 30, 3600, 20, 86400
"""First and longest pause (seconds) after failures, and the most starts: in ``LIMIT_S`` under systemd, in a row under
Slurm. ``--forever`` restarts a manager that dies, so only failures of ``--forever`` itself or of its machine count."""


class Kind(StrEnum):
    """The kinds of text that are printed."""

    SYSTEMD = "systemd"
    SLURM = "slurm"


def service_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN_DIR_OR_JOB_FILE", help="The run's directory, or a job file (YAML).")
    ],
    kind: Annotated[
        Kind, typer.Option("--for", help="What to print: a systemd unit, or a Slurm job script.")
    ] = Kind.SYSTEMD,
) -> None:
    """Print a systemd unit or a Slurm script for a run: it restarts the run after crashes and reboots of its machine.

    Each start continues the run, as `morph resume --forever` does, and takes over VMs that are still alive.

    \b
    Example:
      morph service runs/tiny > ~/.config/systemd/user/morph-tiny.service
      morph service runs/tiny --for slurm > tiny.sbatch
    """
    from manager.run.request import is_job_file
    from manager.run_dir import read_facts
    from morph.contract.errors import ConfigError
    from morph.yaml_files import load_job_file

    path = Path(run).resolve()
    if "\n" in f"{path}{Path.cwd()}":
        raise ConfigError(
            "holds a line break, which cannot be written to a unit or a script", field="RUN_DIR_OR_JOB_FILE"
        )
    if is_job_file(run):
        load_job_file(path)
        verb, named = "run", path.stem
    else:
        read_facts(path)
        verb, named = "resume", path.name
    script = Path(sys.executable).with_name("morph")
    morph = [str(script)] if script.exists() else [sys.executable, "-m", "morph.cli.main"]
    command = [*morph, verb, str(path), "--plain", "--forever"]
    print(service_text(kind, named, path, command), end="")


def service_text(kind: Kind, named: str, path: Path, command: Sequence[str]) -> str:
    """Return the unit or script that runs a command in this process's working directory."""
    known = {"what": str(path), "name": f"morph-{named}", "folder": str(Path.cwd()), "stop_s": str(STOP_S)}
    known |= {"first_s": str(FIRST_S), "longest_s": str(LONGEST_S), "starts": str(STARTS), "limit_s": str(LIMIT_S)}
    beside = path if path.is_dir() else path.parent
    if kind is Kind.SLURM:
        log = f"{known['folder']}/{known['name']}".replace("%", "%%") + "-%j.log"
        known |= {"folder": shlex.quote(known["folder"]), "name": _of_sbatch(known["name"])}
        known["failures"] = shlex.quote(str(beside / f".{named}.failures"))
        return SLURM.format(**known, log=_of_sbatch(log), command=shlex.join(command))
    known = {name: value.replace("%", "%%") for name, value in known.items()}
    environment = str(beside / "service.env").replace("%", "%%")
    return UNIT.format(**known, environment=environment, command=" ".join(map(_of_systemd, command)))


def _of_sbatch(value: str) -> str:
    """Quote a value in a line of ``#SBATCH``, where a backslash escapes within quotes too."""
    return shlex.quote(value.replace("\\", "\\\\"))


def _of_systemd(word: str) -> str:
    """Quote a word of a command line for systemd."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if any(sign in escaped for sign in " \t\"';\\") else escaped

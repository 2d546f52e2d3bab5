"""Mistakes with every command: one line names file or option, value, what is allowed and what to do next."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Iterator

import click
import pytest
import typer
from typer.testing import CliRunner

from morph.cli.main import app
from tests.cli.given import Given
from tests.system.commands import ROOT

NO_RUN = "there is no such run directory; allowed: the folder of a run, runs/NAME unless `morph run` was given another"
NOT_A_RUN = "is not a run directory: it has no run.json; allowed: the folder of a run"
NO_FOLDER = "there is no such folder; allowed: a run directory, a folder with checkpoints, or a URL"
NOTHING_STORED = "is not a run directory, and holds no complete checkpoint"
NOT_READ = "cannot be read: No such file or directory"
OF_CALIBRATE = "allowed: a JSON file that `morph calibrate JOB -o FILE` wrote"
NO_PROFILE = f"{NOT_READ}; {OF_CALIBRATE}"
NO_JOB = "names no job; allowed: path/to/file.py:name"
NO_PARENT = "cannot be written: its folder does not exist; allowed: a file in an existing folder"
NO_PROTOCOL = "cannot be used: Protocol not known: nope (got 'nope://x'); allowed: a URL fsspec knows"
NO_SECRET = "--token-file: the two nodes need a shared secret to recognise each other; allowed: a file with a secret"
NOT_WHOLE = "must be an integer (got 'x')"
NOT_A_NUMBER = "must be a number (got 'x')"
NO_TRACE = "is in no known format (got 'hello'); allowed: a header with time_s"
A_JOB_FILE = "is a job file of `morph run`"
OF_CLOUDS = "allowed: a cloud file, as in configs/clouds; its keys are subscription_id"
OF_CLUSTERS = "allowed: a cluster file, such as configs/clusters/local.yaml; its keys are vms, policy"
OF_JOBS = "allowed: a job file, such as configs/runs/tiny_gpt.yaml; its keys are vms, policy, samples, trackers"
OF_TRACES = "allowed: a trace, as `morph trace generate -o FILE` writes one"
UNKNOWN_SETTING = "--set x: unknown key (got 1); allowed: the keys "

JOB_MISTAKES = {
    "run.yaml": f"run.yaml: {A_JOB_FILE}; allowed: path/to/file.py:name",
    "profile.json": "profile.json: is a profile; allowed: path/to/file.py:name",
    "jobs.py": "jobs.py: is Python code; allowed: path/to/file.py:name",
    "notes.txt": f"notes.txt: {NO_JOB}",
    "empty": "empty: is a folder; allowed: path/to/file.py:name",
    "''": "JOB: is empty; allowed: a value",
    "none.py:job": "none.py: no such file; allowed: path/to/file.py:name",
    "jobs.py:god": "jobs.py: defines no 'god'; allowed: branching, drifting, extreme, good",
    "jobs.py:number": "number: is not a Job (got 'int'); allowed: a morph.Job, or a function without arguments",
    "jobs.py:failing": "failing: calling it failed: ValueError: not today",
}
"""By what stands in the place of a job; so the further tables."""

RUN_MISTAKES = {
    "none": f"none: {NO_RUN}",
    "empty": f"empty: {NOT_A_RUN}",
    "run.yaml": f"run.yaml: {A_JOB_FILE}; allowed: the folder of a run",
    "jobs.py:good": "jobs.py:good: is a job; allowed: the folder of a run",
    "profile.json": "profile.json: is a profile; allowed: the folder of a run",
    "notes.txt": f"notes.txt: {NO_RUN}",
    "emptyy": "emptyy: there is no such run directory (is empty meant?); allowed: the folder of a run",
}
STORED_MISTAKES = {
    "none": f"none: {NO_FOLDER}",
    "run.yaml": f"run.yaml: {A_JOB_FILE}; allowed: a run directory",
    "profile.json": "profile.json: is a profile; allowed: a run directory",
    "nope://x": f"RUN_DIR_OR_URL: {NO_PROTOCOL}",
}
PROFILE_MISTAKES = {
    "none.json": f"none.json: {NO_PROFILE}",
    "profil.json": f"profil.json: {NOT_READ} (is profile.json meant?); {OF_CALIBRATE}",
    "run.yaml": f"run.yaml: {A_JOB_FILE}; {OF_CALIBRATE}",
    "cluster.yaml": f"cluster.yaml: is a cluster file; {OF_CALIBRATE}",
    "jobs.py": f"jobs.py: is Python code; {OF_CALIBRATE}",
    "jobs.py:good": f"jobs.py:good: is a job; {OF_CALIBRATE}",
    "broken.json": f"broken.json: is not JSON; {OF_CALIBRATE}",
    "trace.csv": f"trace.csv: is a spot trace; {OF_CALIBRATE}",
    "empty": f"empty: is a folder; {OF_CALIBRATE}",
    "plan.json": f"plan.json: is a plan; {OF_CALIBRATE}",
}
CLOUD_MISTAKES = {
    "none.yaml": f"none.yaml: {NOT_READ}",
    "run.yaml": f"run.yaml: {A_JOB_FILE}; {OF_CLOUDS}",
    "cluster.yaml": f"cluster.yaml: is a cluster file; {OF_CLOUDS}",
    "notes.txt": f"notes.txt: is not a mapping of keys to values; {OF_CLOUDS}",
    "empty": "empty: is a folder",
    "hosts.yaml --kind aws": "hosts.yaml: is a file of hosts, which a cluster file names as vms.cloud; allowed: ",
    "azure.yaml --kind moon": "--kind: no such kind (got 'moon'); allowed: azure or aws or slurm or static",
}
FILE_MISTAKES = {
    "none.yaml": f"none.yaml: {NOT_READ}",
    "notes.txt": f"notes.txt: is not a mapping of keys to values; {OF_CLUSTERS}",
    "jobs.py": "jobs.py, line 9: is Python code",
    "plan.json": f"plan.json: is a plan; {OF_CLUSTERS}",
    "trace.csv": f"trace.csv: is a spot trace; {OF_CLUSTERS}",
    "empty": "empty: is a folder",
    "azure.yaml": f"azure.yaml: is a cloud file, which `morph cloud dry-run` checks; {OF_CLUSTERS}",
    "hosts.yaml": "hosts.yaml: is a file of hosts, which a cluster file names as vms.cloud; allowed: ",
    "typed.yaml": "typed.yaml: vms.num_vms: must be an integer (got 'many'); allowed: an integer at least",
}
TRACE_MISTAKES = {
    "none.csv": f"none.csv: {NOT_READ}",
    "notes.txt": f"notes.txt, line 1: {NO_TRACE}",
    "run.yaml": f"run.yaml: {A_JOB_FILE}; {OF_TRACES}",
    "profile.json": f"profile.json: is a profile; {OF_TRACES}",
    "empty": f"empty: is a folder; {OF_TRACES}",
}

PLACES: tuple[tuple[str, dict[str, str]], ...] = (
    ("calibrate {}", JOB_MISTAKES),
    ("cut {}", JOB_MISTAKES),
    ("trace-deps {}", JOB_MISTAKES),
    ("profile estimate {} --device h100", JOB_MISTAKES),
    *((f"{command} {{}}", RUN_MISTAKES) for command in ("status", "events", "report", "page", "timeline", "stop")),
    *((f"{command} {{}}", RUN_MISTAKES) for command in ("resume", "inject --vm a", "profile refine")),
    *((f"checkpoints {command}", STORED_MISTAKES) for command in ("ls {}", "verify {}", "keep {} 1", "rm {} 1")),
    *((f"checkpoints {command}", STORED_MISTAKES) for command in ("gc {}", "copy {} out")),
    *((command, STORED_MISTAKES) for command in ("export {} out", "sample {}")),
    *((command, PROFILE_MISTAKES) for command in ("plan {} --gpus 2", "simulate {} -P 1", "rehearse {} -P 1")),
    *((f"profile {command}", PROFILE_MISTAKES) for command in ("show {}", "add-type {} x --slower 2")),
    ("run jobs.py:good --cluster cluster.yaml --profile {}", PROFILE_MISTAKES),
    *((f"cloud {command} {{}}", CLOUD_MISTAKES) for command in ("dry-run", "check", "policy")),
    ("cloud reconcile --run x --job y {}", CLOUD_MISTAKES),
    *((f"config {command} {{}}", FILE_MISTAKES) for command in ("check", "explain")),
    *((command, TRACE_MISTAKES) for command in ("trace stats {}", "trace convert {} -o out.csv")),
    *((command, TRACE_MISTAKES) for command in ("trace plot {} --png a.png", "replay profile.json --trace {}")),
)
"""Commands with a place for each kind of file."""

TABLE: dict[str, dict[str, str]] = {
    "calibrate jobs.py:good": {
        "--samples 1": "--samples: must be at least 5 (got '1')",
        "--samples x": f"--samples: {NOT_WHOLE}",
        "--device tpu": "--device: this machine has no such device (got 'tpu'); allowed: cpu",
        "-m 5": "--micro-batch: does not divide the global batch (got 5); allowed: divisors of 8",
        "-o none/p.json": f"none/p.json: {NO_PARENT}",
        "-o empty": "empty: cannot be written: it is a folder; allowed: a file name",
        "-o jobs.py": "jobs.py: cannot be written: .py is the ending of code or settings; allowed: another name",
        "--peer nohost": "--peer: is not an address (got 'nohost'); allowed: HOST:PORT, as 10.0.0.2:7420",
        "--peer 127.0.0.1:9": NO_SECRET,
        "--links wrong": "--links: is unknown (got 'wrong'); allowed: staged, ipc, auto",
        "--add-node-type x": "--add-node-type: needs a profile to add to (got 'x'); allowed: with --profile",
        "--profile none.json": "--profile: is used only to add to it (got 'none.json'); allowed: with --add-node-type",
        "--checkpoint-url nope://x": "--checkpoint-url: cannot be written: Protocol not known: nope",
    },
    "calibrate-peer": {
        "": NO_SECRET,
        "--listen nohost": "--listen: is not an address (got 'nohost'); allowed: HOST:PORT, as 10.0.0.2:7420",
        "--listen 127.0.0.1": "--listen: is not an address (got '127.0.0.1'); allowed: HOST:PORT",
        "--token-file notes.txt": "notes.txt: --token-file: others can read the secret (got '0644'); allowed: mode",
        "--wait-s -1": "--wait-s: must be at least 1 (got '-1')",
    },
    "plan profile.json": {
        "": "--gpus: is missing; allowed: a number, a range as 16..128, or --nodes or --pool instead",
        "--gpus x": "--gpus: is not a number of GPUs (got 'x'); allowed: a number, or a range as 16..128",
        "--gpus 0": "--gpus: is out of range (got 0); allowed: a whole number from 1 to 100000",
        "--gpus 2 --schedule fast": "--schedule: is unknown (got 'fast'); allowed: varuna, gpipe, 1f1b",
        "--gpus 2 --pool a=2": "--pool: cannot be combined with --gpus",
        "--pool a2": "--pool: is not a pool (got 'a2'); allowed: a number of GPUs, or numbers by type such as v100=12",
        "--gpus 2 --set x=1": UNKNOWN_SETTING,
        "--gpus 2 --csv none/x.csv": f"none/x.csv: {NO_PARENT}",
    },
    "simulate profile.json": {
        "": "-P: is missing; allowed: stages of a pipeline, or --plan FILE",
        "--plan none.json": f"none.json: {NOT_READ}; allowed: a file that `morph plan PROFILE -o FILE` wrote",
        "--plan profile.json": "profile.json: is a profile; allowed: a file that `morph plan PROFILE -o FILE` wrote",
        "-P 1 --slow 1": "--slow: is not a slow worker (got '1'); allowed: STAGE:FACTOR or STAGE/REPLICA:FACTOR",
        "-P 1 --engine slow": "--engine: is unknown (got 'slow'); allowed: compiled, reference",
    },
    "cut jobs.py:good": {
        "-K 50": "num_sections: only 4 sections are possible (got 50); allowed: fewer sections",
        "--png none/a.png": f"none/a.png: {NO_PARENT}",
    },
    "run": {
        "none.yaml": f"none.yaml: {NOT_READ}",
        "unmeasured.yaml": f"none.json: {NO_PROFILE}",
        "profile.json": "profile.json: is a profile; allowed: path/to/file.py:name, or a job file (YAML)",
        "cluster.yaml": f"cluster.yaml: is a cluster file; {OF_JOBS}",
        "run.yaml --set vms.num=3": "--set vms.num: unknown key (got 3); allowed: the keys kind, launcher, num_vms",
        "run.yaml --log-format xml": "--log-format: is unknown (got 'xml'); allowed: text, json",
        "run.yaml --checkpoint-url nope://x": "Protocol not known: nope",
        "run.yaml --epochs 1": "give one of the two",
        "run.yaml -D 9999999999": "-D: must be at most 2147483648 (got '9999999999')",
        "jobs.py:good --profile profile.json --cluster run.yaml": f"run.yaml: {A_JOB_FILE}; {OF_CLUSTERS}",
    },
    "resume": {"nope://x": f"RUN_DIR_OR_URL: {NO_PROTOCOL}"},
    "service": {
        "none": NO_RUN,
        "empty": NOT_A_RUN,
        "none.yaml": f"none.yaml: {NOT_READ}",
        "cluster.yaml": f"cluster.yaml: is a cluster file; {OF_JOBS}",
        "run.yaml --for k8s": "--for: is unknown (got 'k8s'); allowed: systemd, slurm",
    },
    "elastic": {
        "none.py": "COMMAND: cannot be started: No such file or directory (got 'none.py'); allowed: a program: ",
        "--workers x script.py": f"--workers: {NOT_WHOLE}",
        "--workers 2 --founders 3 script.py": "MORPH_ELASTIC_SECRET: is not set; allowed: one for all machines: ",
        "--join nohost script.py": "--join: is not an address (got 'nohost'); allowed: HOST:PORT",
        "--silence-s 0 script.py": "--silence-s: must be at least 0.5 (got '0')",
    },
    "spot-run": {
        "none.yaml python a.py": f"none.yaml: {NOT_READ}",
        "azure.yaml python a.py": "azure.yaml: is a cloud file, which `morph cloud dry-run` checks; allowed: ",
        "cluster.yaml python a.py": "cluster.yaml: is a cluster file; allowed: a job file of `morph spot-run`",
    },
    "timeline empty": {"--png none/x.png": f"none/x.png: {NO_PARENT}", "--step x": f"--step: {NOT_WHOLE}"},
    "report empty": {"--price x": f"--price: {NOT_A_NUMBER}"},
    "checkpoints": {
        "ls empty": NOTHING_STORED,
        "keep empty x": f"VERSION: {NOT_WHOLE}",
        "gc empty": NOTHING_STORED,
        "copy empty notes.txt": "DEST_URL: is a file (got 'notes.txt'); allowed: a folder of its own, or a URL",
    },
    "export empty": {
        "out": NOTHING_STORED,
        "jobs.py": "jobs.py: exists already; allowed: a new file, or --overwrite",
        "out --version 3 --best": "--best: is given with --version; allowed: one of the two",
    },
    "import jobs.py:good": {
        "none.safetensors new": "none.safetensors: no such file; allowed: a .safetensors file, or a folder of them",
        "empty new": "empty: holds no such file; allowed: a .safetensors file, or a folder of them",
        "notes.txt new": "notes.txt: is not a safetensors file: ",
        "none.safetensors new --rename x": "--rename: has no = (got 'x'); allowed: REGEX=TEXT",
    },
    "sample empty": {
        "": "--job: is not given; allowed: path/to/file.py:name; no code is read from storage",
        "--job none.py:x": "none.py: no such file; allowed: path/to/file.py:name",
        "--device tpu": "--device: this machine has no such device (got 'tpu'); allowed: cpu",
    },
    "demo": {
        "--seed x": f"--seed: {NOT_WHOLE}",
        "--seconds x": f"--seconds: {NOT_A_NUMBER}",
    },
    "rehearse profile.json": {
        "-P -1": "profile.json: -P: the model cannot be cut so (got -1); allowed: 1 to 2 (its sections)",
        "-P 1 --steps 9999999": "--steps: is out of range (got 9999999); allowed: a whole number from 1 to 100000",
        "": "-P: give one of -P (with -D), --plan and --trace",
        "-P 1 --batch-size 7": "--batch-size: is not a whole number of micro-batches (got 7); allowed: multiples of 2",
    },
    "replay": {
        "none.json --trace trace.csv": f"none.json: {NO_PROFILE}",
        "profile.json": "--vms: is missing; allowed: one of --vms, --like, --model",
        "profile.json --trace trace.csv --until x": "--until: is not a bound (got 'x'); allowed: steps (100000), hours",
        "profile.json --trace trace.csv --policy fast": "--policy: is not a policy (got 'fast'); allowed: compared",
        "profile.json --trace trace.csv --price inf": "--price: must be at most 1000000 (got 'inf')",
        "profile.json --trace trace.csv --set x=1": UNKNOWN_SETTING,
    },
    "trace stats": {"trace.csv trace.csv": "trace.csv: is given twice; allowed: each trace once"},
    "config schema": {"cloud": "kind: is unknown (got 'cloud'); allowed: job, cluster"},
    "trace generate -o out.csv": {
        "": "--vms: is missing; allowed: one of --vms, --like, --model",
        "--hours 1 --model none.json": f"none.json: {NOT_READ}; allowed: a file that `morph trace generate",
        "--vms 2 --like none.csv": "--vms and --like: cannot be combined; allowed: one of --vms, --like, --model",
        "--vms 2 --hours x": f"--hours: {NOT_A_NUMBER}",
        "--vms 2 --set x=1": UNKNOWN_SETTING,
    },
}
"""By command, and by the arguments that follow: a part of the line."""

MISTAKES = {command.format(name): part for command, table in PLACES for name, part in table.items()}
MISTAKES |= {f"{command} {rest}".strip(): part for command, table in TABLE.items() for rest, part in table.items()}


def leaves(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    below = getattr(command, "commands", {})
    for sub, found in below.items():
        yield from leaves(found, f"{name} {sub}".strip())
    if not below:
        yield name, command


COMMANDS = dict(leaves(typer.main.get_command(app)))


def command_of(mistake: str) -> str:
    return next(name for name in COMMANDS if f"{mistake} ".startswith(f"{name} "))


@pytest.fixture
def folder(given: Given, monkeypatch: pytest.MonkeyPatch) -> Given:
    monkeypatch.chdir(given.folder)
    monkeypatch.delenv("MORPH_PEER_TOKEN", raising=False)
    monkeypatch.delenv("MORPH_ELASTIC_SECRET", raising=False)
    job = "job: {code: 'jobs.py:good', profile: %s, steps: 4}\nvms: {num_vms: 2}\n"
    given.file("run.yaml", job % "profile.json")
    given.file("unmeasured.yaml", job % "none.json")
    given.file("typed.yaml", "vms: {num_vms: many}\n")
    given.file("trace.csv", "time_s,event,node_id\n0,add,a\n5,remove,a\n")
    given.file("notes.txt", "hello\n").chmod(0o644)
    given.file("broken.json", '{"a": 1')
    given.file("plan.json", '{"schema_version": 1, "orders": []}')
    (given.folder / "empty").mkdir()
    for name in ("azure", "hosts"):
        shutil.copy(ROOT / f"configs/clouds/{name}.yaml", given.folder)
    return given


def test_every_command_is_tried_with_mistakes() -> None:
    tried = Counter(map(command_of, MISTAKES))
    assert {name for name in COMMANDS if not tried[name]} == {"history"}  # it has no file to get wrong


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_with_a_command_is_one_line_that_names_it(folder: Given, command: str) -> None:
    """All mistakes of a command in one test: most take a few milliseconds, and the folder is made once."""
    wrong = {}
    for mistake, part in MISTAKES.items():
        if command_of(mistake) == command:
            line = folder.refused(*shlex.split(mistake))
            if part not in line:
                wrong[mistake] = line
    assert wrong == {}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_does_not_exist_and_a_missing_argument_show_the_usage(folder: Given, command: str) -> None:
    needed = [param for param in COMMANDS[command].params if param.required]
    for more in (["--no-such-option"], []) if needed else (["--no-such-option"],):
        done = CliRunner().invoke(app, [*command.split(), *more], prog_name="morph")
        assert done.exit_code == 2, done.output
        assert done.stderr.startswith(f"Usage: morph {command} "), done.stderr
        assert done.stderr.splitlines()[-1].startswith("Error: "), done.stderr

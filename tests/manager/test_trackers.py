"""Trackers and callbacks get each event of a run exactly once, from its journal, and never delay the run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from simulated_cluster import Faults, JournalledCluster
from typer.testing import CliRunner

from manager.accounting.spent import Prices
from manager.journal.journal import Journal
from manager.report.journal_reader import read_report
from manager.run_dir import JOURNAL, RunFacts
from manager.trackers import reading, sinks
from manager.trackers.process import HANGS, Watching, reader_of
from manager.trackers.reading import HappeningsReader
from manager.trackers.sinks import check_trackers, numbers_of
from manager.trackers.supervisor import Watchers, environment_of
from morph.cli.main import app
from morph.contract.cluster import Notify
from morph.contract.errors import ConfigError, WaitTimeout
from morph.contract.happenings import (
    CheckpointDone,
    EvaluationDone,
    Happening,
    RunEnded,
    ShapeChanged,
    StepDone,
    Trouble,
)
from morph.file_lock import locked
from tests.waiting import BOUND_S

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
PRICES = Prices(paid_usd_per_h=3.6, for_all=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that lost all of its workers, and so repeated some steps."""
    path = tmp_path_factory.mktemp("run")
    faults = Faults(deaths_after_s=((8.0, 20),), joins_after_s=(9.0, 9.1, 9.2, 9.3), quiet_after_s=24.0)
    cluster = JournalledCluster(0, path, faults, expected_nodes=6)
    assert cluster.run(6).outcome == "finished"
    cluster.journal.close()
    assert read_report(path).steps_redone
    return path


@pytest.fixture(scope="module")
def happenings(run: Path) -> list[Happening]:
    reader = HappeningsReader("mem://checkpoints", PRICES)
    with Journal.open(run / JOURNAL, read_only=True) as journal:
        return [happening for _, told in reader.new(journal) for happening in told]


def test_each_event_is_reported_once_and_in_order(run: Path, happenings: list[Happening]) -> None:
    report = read_report(run)
    steps = [one for one in happenings if isinstance(one, StepDone)]
    assert [one.step for one in steps] == list(range(1, report.version + 1))
    assert {one.step - 1: one.loss for one in steps} == report.losses
    assert [one.step for one in happenings if isinstance(one, EvaluationDone)] == [4, 8]
    saved = [one.step for one in happenings if isinstance(one, CheckpointDone)]
    assert saved == sorted(set(saved))
    assert saved[-1] == report.version
    changes = [one for one in happenings if isinstance(one, ShapeChanged)]
    assert changes[0].pause_s is None
    assert [one.pause_s for one in changes[1:]] == [pytest.approx((m.pause_ms or 0) / 1e3) for m in report.morphs]
    assert sum(one.pause_s for one in steps) == pytest.approx(sum((m.pause_ms or 0) / 1e3 for m in report.morphs))
    assert isinstance(happenings[-1], RunEnded)
    assert happenings[-1].outcome == "finished"
    dollars = [one.dollars for one in steps]
    assert None not in dollars
    assert dollars == sorted(dollars, key=float)  # type: ignore[arg-type]
    assert steps[0].examples_per_s == pytest.approx(report.shapes[0].batch_size / steps[0].seconds)


def test_incomplete_checkpoints_are_reported_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SHORTEST_S", 0.0)
    with Journal.open(run / JOURNAL, read_only=True) as journal:
        entries = journal.read()
    for saved, missed_saves in ((True, 4), (False, 4), (False, 10_000)):
        notify = Notify(command=("true",), missed_saves=missed_saves)
        reader = reader_of(watching("notify", run, notify=notify))
        left = [entry for entry in entries if saved or '"kind":"manifest_written"' not in entry.payload_json]
        told = [one for entry in left for one in reader.take(entry) if isinstance(one, Trouble)]
        assert [one.kind for one in told] == ([] if saved or missed_saves > 4 else ["not_saved"])
        assert all("(there is none), but one is due every" in one.sentence for one in told)


def watching(kind: str, run_dir: Path, **fields: object) -> Watching:
    return Watching.model_validate(
        {
            "kind": kind,
            "run_dir": run_dir,
            "journal": run_dir / JOURNAL,
            "checkpoint_url": "mem://checkpoints",
            "job": "tiny",
            "prices": PRICES,
            "limit_s": 60.0,
            **fields,
        }
    )


def watch(*watched: Watching, end_s: float = BOUND_S) -> list[str]:
    """Send the journal to some trackers; return the messages about them."""
    said: list[str] = []
    with Watchers(watched, said.append, end_s):
        pass
    return said


def cut_off(journal: Path, copy: Path, share: float) -> None:
    with sqlite3.connect(journal) as whole, sqlite3.connect(copy) as part:
        whole.backup(part)
    (most,) = part.execute("SELECT MAX(sequence) FROM entries").fetchone()
    part.execute("DELETE FROM entries WHERE sequence > ?", (int(share * most),))
    part.commit()
    part.close()


def read_tensorboard(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    assert "run/shape/text_summary" in found.Tags()["tensors"]
    scalars = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    tensors = [tag for tag in found.Tags()["tensors"] if not tag.startswith("run/shape")]
    return scalars | {tag: [(e.step, e.tensor_proto.float_val[0]) for e in found.Tensors(tag)] for tag in tensors}


def wandb_records(path: Path) -> Iterator[bytes]:
    """Read a file of W&B's, a log as in LevelDB: blocks of 32 KiB with whole or split records."""
    data, at, pieces = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = -at % 32768
        if 0 < left < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        pieces += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield pieces
            pieces = b""


def read_wandb(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, list[tuple[int, float]]] = {}
    ids = set()
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for record in map(Record.FromString, wandb_records(path)):
            if record.run.run_id:
                ids.add(record.run.run_id)
            items = record.history.item
            told = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items}
            for name in told if "step" in told else ():
                found.setdefault(name, []).append((told["step"], told[name]))
    assert len(ids) == 1
    return found


def read_mlflow(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient((run_dir / "mlflow").absolute().as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert run.info.status == "FINISHED"
    return {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


@pytest.mark.parametrize(
    ("kind", "read"), [("tensorboard", read_tensorboard), ("wandb", read_wandb), ("mlflow", read_mlflow)]
)
def test_a_resumed_run_continues_the_curve_without_repeated_steps(
    kind: str,
    read: Callable[[Path], dict[str, list[tuple[int, float]]]],
    run: Path,
    happenings: list[Happening],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if importlib.util.find_spec(sinks.LIBRARIES[kind]) is None:  # large, so that it is not installed for every test run
        pytest.skip(f"{kind} is not installed: make test-trackers")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for share in (0.4, 0.4, 1.0):
        cut_off(run / JOURNAL, tmp_path / JOURNAL, share)
        assert watch(watching(kind, tmp_path)) == []
    require_all(read(tmp_path), happenings)


def test_a_report_writes_the_same_curve_for_tensorboard_after_the_fact(
    run: Path, happenings: list[Happening], tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    copy = tmp_path / "tensorboard"
    shutil.copytree(run, copy)
    facts = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=6)
    (copy / "run.json").write_text(facts.model_dump_json())
    for again in (False, True):
        done = CliRunner().invoke(app, ["report", str(copy), "--price", "3.6", "--tensorboard", str(tmp_path / "logs")])
        assert done.exit_code == 0, done.output
        assert (": 0 events" in done.output) is again
    require_all(read_tensorboard(tmp_path / "logs"), happenings)


def require_all(found: dict[str, list[tuple[int, float]]], happenings: list[Happening]) -> None:
    expected: dict[str, list[tuple[int, float]]] = {}
    for happening in happenings:
        for name, value in numbers_of(happening).items():
            expected.setdefault(name, []).append((happening.step, value))
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points]), name
    assert {"train/loss", "eval/loss", "run/dollars", "run/stages", "speed/examples_per_s"} <= found.keys()


CALLBACKS = """
import json, os, pathlib, threading

class Recorder:
    def __init__(self):
        self.file = open(pathlib.Path(__file__).parent / "told.jsonl", "a")
        print("a library that talks")

    def _note(self, name, step):
        self.file.write(json.dumps([name, step, os.getpid()]) + "\\n")
        self.file.flush()

    def on_step(self, done):
        self._note("step", done.step)
        if done.step in (3, 6):
            threading.Event().wait()

    def on_evaluation(self, done):
        raise ValueError(f"no room for {done.loss:.2f}")

    def on_end(self, done):
        self._note(done.outcome, done.step)

class Stubborn:
    def on_end(self, done):
        threading.Event().wait()

class Dead:
    def on_step(self, done):
        os._exit(1)

nothing = object()
"""


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    cut_off(run / JOURNAL, tmp_path / JOURNAL, 1.0)
    (tmp_path / "callbacks.py").write_text(CALLBACKS, encoding="utf-8")
    return tmp_path


def callback(folder: Path, name: str, **fields: object) -> Watching:
    return watching("callback", folder, target=f"{folder / 'callbacks.py'}:{name}", **fields)


def test_a_callback_that_hangs_or_fails_is_reported_once_and_skipped(run: Path, folder: Path) -> None:
    said = watch(callback(folder, "Recorder", limit_s=2.0))
    name = f"note: callback {folder / 'callbacks.py'}:Recorder"
    goes_on = "training continues"
    gave_up = "took more than 2 s, and was given up"
    assert said == [
        f"{name}: StepDone of step 3 {gave_up}; {goes_on}",
        f"{name}: on_evaluation failed at step 4: ValueError: no room for 0.50; {goes_on}",
        f"{name}: StepDone of step 6 {gave_up}; {goes_on}",
        f"{name}: on_evaluation failed at step 8: ValueError: no room for 0.25; {goes_on}",
    ]
    lines = [json.loads(line) for line in (folder / "told.jsonl").read_text(encoding="utf-8").splitlines()]
    version = read_report(run).version
    assert [(name, step) for name, step, _ in lines] == [
        *(("step", step) for step in range(1, version + 1)),
        ("finished", version),
    ]
    assert len({process for _, _, process in lines}) == 3
    assert "a library that talks" in (folder / "trackers" / "callback-0.log").read_text(encoding="utf-8")
    assert watch(callback(folder, "Recorder")) == [], "what was begun is not begun again"


def test_a_callback_that_hangs_or_keeps_dying_is_left_out(folder: Path) -> None:
    said = watch(
        callback(folder, "Dead", number=1), callback(folder, "nothing", number=2), callback(folder, "missing", number=3)
    )
    log = folder / "trackers" / "callback"
    names = [f"note: callback {folder / 'callbacks.py'}:{name}" for name in ("Dead", "nothing", "missing")]
    for number, name in enumerate(names, 1):
        assert f"{name} ended 5 times and is left out; see {log}-{number}.log" in said
    assert any("has none of the methods on_step, on_evaluation" in sentence for sentence in said)
    assert any("has no attribute 'missing'" in sentence for sentence in said)
    stubborn = watch(callback(folder, "Stubborn", number=4), end_s=8.0)
    assert stubborn == [
        f"note: callback {folder / 'callbacks.py'}:Stubborn did not end in time and is killed; "
        "the run itself is not affected"
    ]


def test_a_tracker_gets_its_own_credentials_and_callbacks_and_alerts_none() -> None:
    environment = {"PATH": "p", "WANDB_API_KEY": "w", "MLFLOW_TRACKING_TOKEN": "m", "AZURE_CLIENT_SECRET": "a"}
    assert environment_of("wandb", environment) == {"PATH": "p", "WANDB_API_KEY": "w"}
    assert environment_of("mlflow", environment) == {"PATH": "p", "MLFLOW_TRACKING_TOKEN": "m"}
    for kind in ("tensorboard", "callback", "notify"):
        assert environment_of(kind, environment) == {"PATH": "p"}


def test_missing_trackers_are_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sinks.LIBRARIES, "wandb", "no_such_library")  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        check_trackers(("wandb",), (), "run.yaml", tmp_path)
    assert str(caught.value) == (
        "run.yaml: trackers: needs more packages: pip install -e '.[wandb]' in the clone of Morph (got 'wandb')"
    )
    for target in ("missing.py:Name", "Name", "missing.py:"):
        with pytest.raises(ConfigError, match=r"callbacks: names no callback .*allowed: file.py:name, of a file below"):
            check_trackers((), (target,), "run.yaml", tmp_path)


HANGING = {
    "sleeps": "time.sleep(600)",
    "never lets another thread run": "ctypes.PyDLL(None).sleep(600)",
}
BY_ITSELF = """
import ctypes, os, sys, time
import manager.trackers.process as process
process.GRACE_S = 0.5
with process._Watchdog(1.0).bounds("StepDone of step 1"):
    {hang}
"""


@pytest.mark.parametrize("hang", HANGING.values(), ids=HANGING)
@pytest.mark.parametrize("manager", ["is dead", "does not read"])
def test_a_call_that_hangs_ends_whether_its_manager_listens_or_not(hang: str, manager: str) -> None:
    reading, writing = os.pipe()
    if manager == "is dead":
        os.close(reading)
    else:
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(writing, b"x" * 65536):
                pass
        os.set_blocking(writing, True)
    try:
        done = subprocess.run(
            [sys.executable, "-c", BY_ITSELF.format(hang=hang)],
            stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=BOUND_S, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
        if manager != "is dead":
            os.close(reading)
    assert done.returncode != 0
    sentence = "Timeout" if "PyDLL" in hang else "StepDone of step 1 took more than 1 s, and was given up"
    assert sentence in done.stderr


def test_the_rest_after_a_managers_end_has_a_limit(run: Path, folder: Path) -> None:
    """Each call is fast enough; all together are not."""
    slow = "import time\nclass Slow:\n    def on_step(self, step):\n        time.sleep(0.5)\n"
    (folder / "slow.py").write_text(slow, encoding="utf-8")
    (folder / "trackers").mkdir()
    code = "import sys\nimport manager.trackers.process as p\np.REST_S = 1.0\nsys.exit(p.main())"
    watched = watching("callback", folder, target=f"{folder / 'slow.py'}:Slow")
    done = subprocess.run(
        [sys.executable, "-c", code], input=watched.model_dump_json() + "\n",
        capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert done.returncode == HANGS
    assert "reporting the rest took more than 1 s, and was given up" in done.stdout


def test_a_wait_for_a_lock_has_a_limit_and_names_its_holder(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "a.lock"
    holder = f"process {os.getpid()} of {socket.gethostname()}"
    with locked(path, 1.0):
        limit = pytest.raises(WaitTimeout, match=f"{holder} holds {path} for more than 0.2 s")
        with limit, locked(path, 0.2, told.append):
            pass
        assert told == [f"waits for at most 0.2 s for {holder}, which holds {path}"]
    with locked(path, 0.0):
        pass

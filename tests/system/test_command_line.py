"""A user's path through the commands: calibrate, plan, simulate, run along a trace, status."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manager.controller.state.events import NodeAppeared, NodeFacts
from manager.journal.journal import Journal
from manager.journal.records import VM_KILLED, Fact
from manager.journal.replay import replay
from manager.report.journal_reader import lives_in
from manager.report.lives import Ending
from manager.report.summary import summarise
from manager.report.values import RunReport
from manager.run_dir import JOURNAL
from morph.contract.plan import Plan, load_plan
from morph.contract.profile import load_profile
from tests.system.commands import ROOT, RunningMorph, morph
from tests.system.harness import JOB
from tests.system.held import BEAT_S, ORDER_S, HeldJob
from tests.system.traced import check_walks
from tests.waiting import START_S

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STEPS, HELD_AFTER = 24, 8
PNG = b"\x89PNG"
TRACE = """time_s,event,node_id
0,add,vm0
0,add,vm1
0.1,add,vm2
0.5,remove,vm1
"""


def test_calibrate_plan_simulate_run_and_status_work_one_after_the_other(
    calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = load_profile(calibrated)
    assert (profile.job.name, profile.job.batch_size, profile.micro_batch_sizes) == ("tiny-gpt", 12, (2,))

    answer = json.loads(morph("plan", calibrated, "--gpus", 2, "--json", "-o", tmp_path / "plan.json"))
    best = Plan.model_validate(answer["best"])
    assert best == load_plan(tmp_path / "plan.json")
    assert best.fingerprint == profile.job.fingerprint

    shown = morph("simulate", calibrated, "-P", 2, "-D", 1, "--png", tmp_path / "timeline.png")
    assert "2 x 1" in shown
    assert (tmp_path / "timeline.png").read_bytes().startswith(PNG)

    monkeypatch.setenv("MORPH_DATA_DIR", str(tmp_path / "data"))
    run_dir = tmp_path / "run"
    _run_along_the_trace(calibrated, tmp_path, run_dir)
    assert not list(run_dir.glob("*.png"))
    check_walks(json.loads((tmp_path / "walks.json").read_text(encoding="utf-8")))

    report = RunReport.model_validate_json(morph("status", run_dir, "--json"))
    assert (report.outcome, report.version, report.checkpoint_version) == ("finished", STEPS, STEPS)
    assert report.losses[STEPS - 1] < report.losses[0]
    plain = morph("status", run_dir, "--png", tmp_path / "status.png")
    assert plain == summarise(report) + "\n"
    assert f"steps: {STEPS} of {STEPS} done" in plain
    assert (tmp_path / "status.png").read_bytes().startswith(PNG)

    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        assert replay(journal).version == report.version
        entries, lives = journal.read(), {life.vm: life for life in lives_in(journal)}
    facts = [Fact.model_validate_json(entry.payload_json) for entry in entries if entry.kind == "fact"]
    assert [fact.worker for fact in facts if fact.name == VM_KILLED] == ["vm1"]
    appeared = NodeAppeared(node="vm2", facts=NodeFacts(provider="local")).model_dump_json()
    assert any(entry.kind == "event" and entry.payload_json == appeared for entry in entries)
    events = morph("events", run_dir, "--verbose")
    assert any("vm1" in found.lost_workers for found in report.morphs), events

    (kind,) = json.loads(morph("history", "--json"))
    assert kind["facts"] == {"provider": "local", "size": "", "region": "", "zone": "", "node_type": ""}
    assert (kind["seen"]["num_vms"], kind["seen"]["num_lost"], kind["estimate"]["num_preparations"]) == (3, 1, 0)
    assert {vm: life.ending for vm, life in lives.items()} == {
        "vm0": Ending.RUN_OVER,
        "vm1": Ending.REVOKED,
        "vm2": Ending.RUN_OVER,
    }
    assert all(life.preparation_s is not None and life.hours > 0 for life in lives.values())
    assert kind["seen"]["hours"] == pytest.approx(sum(life.hours for life in lives.values()))


def _run_along_the_trace(profile: Path, folder: Path, run_dir: Path) -> None:
    """Start two VMs, of which one is killed, and let another come: the run continues with the present ones."""
    job = HeldJob(folder / "code", folder / "gate", HELD_AFTER)
    cluster, trace = folder / "cluster.yaml", folder / "trace.csv"
    cluster.write_text(
        f"policy: {{checkpoint_every_steps: 10, start_patience_s: {START_S}, heartbeat_timeout_s: {BEAT_S}, "
        f"order_timeout_s: {ORDER_S}}}\n",
        encoding="utf-8",
    )
    trace.write_text(TRACE, encoding="utf-8")
    with RunningMorph(
        *("run", job.path, "--profile", profile, "--cluster", cluster, "--trace", trace),
        *("--steps", STEPS, "--run-dir", run_dir, "--verbose", "-P", 2),  # whatever was measured, vm1 is no spare
        walks_path=folder / "walks.json",
    ) as command:
        command.wait_for_line("vm1 was lost")
        job.allow(HELD_AFTER + 4)  # a step that is given up must end
        command.wait_for_lines("vm2 appeared", "vm2 is ready")  # it may take longer to boot than vm1 lives
        job.let_go()
        command.wait_for_line(": finished")
        assert command.wait_for_end() == 0, command.output
    assert f"to draw this run: morph status {run_dir} --png {run_dir / 'run.png'}" in command.output


class StandIn:
    """What the recipe uses of Ray Tune, which is installed in a separate environment: one trial after another."""

    grid_search = list
    TuneConfig = SimpleNamespace

    def __init__(self) -> None:
        self.told: dict[str, float] = {}
        self.config: dict[str, Any] = {}

    def get_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_trial_name=lambda: f"trial_{len(self.told)}")

    def with_resources(self, trial: Any, resources: dict[str, float]) -> Any:
        assert resources == {"cpu": 2}
        return trial

    def report(self, metrics: dict[str, float]) -> None:
        self.told[repr(self.config)] = metrics["loss"]

    def Tuner(self, trial: Any, *, param_space: dict[str, list[Any]], tune_config: SimpleNamespace) -> Any:  # noqa: N802
        assert (tune_config.metric, tune_config.mode) == ("loss", "min")

        def fit() -> SimpleNamespace:
            best: list[tuple[float, dict[str, Any]]] = []
            for values in product(*param_space.values()):
                self.config = dict(zip(param_space, values, strict=True))
                trial(self.config)
                best.append((self.told[repr(self.config)], self.config))
            return SimpleNamespace(get_best_result=lambda: SimpleNamespace(config=min(best, key=lambda b: b[0])[1]))

        return SimpleNamespace(fit=fit)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_recipe_for_ray_tune_finds_the_rate_that_learns(
    calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = (ROOT / "configs/ray_tune.py").read_text()
    (tmp_path / "sweep.py").write_text(recipe.replace('"200"', '"6"').replace("1e-4, 1e-3", "1e-9, 1e-2"))
    shutil.copy(JOB.split(":")[0], tmp_path / "neighbour.py")
    (tmp_path / "mine.py").write_text(
        "import neighbour, torch\nfrom dataclasses import replace\n"
        "def job(lr):\n"
        "    return replace(neighbour.job, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=lr))\n"
    )
    shutil.copy(calibrated, tmp_path / "profile.json")
    (tmp_path / "cluster.yaml").write_text("vms: {num_vms: 1}\n")
    tune = StandIn()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(tune=tune))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    runpy.run_path(str(tmp_path / "sweep.py"))
    assert capsys.readouterr().out.splitlines()[-1] == "{'lr': 0.01}"
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"trial_0", "trial_1"}

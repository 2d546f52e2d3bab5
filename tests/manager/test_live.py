"""The live view of a run says what its journal says afterwards."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from controller_script import Script
from random_history import random_faults
from simulated_cluster import Faults, JournalledCluster, SimulatedCluster, played
from simulated_job import UNEQUAL, make_config
from typer.testing import CliRunner

from manager.commands.run_view import run_view
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import Event, NodeAppeared, NodesGranted, NodesStarted, Tick, WorkerAnswered
from manager.controller.state.state import ControllerState, Decision, Phase
from manager.dashboard.snapshot import snapshot
from manager.engine.loop.driver import Observed, Observer
from manager.journal.journal import Journal
from manager.report.events import Told, morph_line
from manager.report.fold import Fold
from manager.report.journal_reader import read_report
from manager.report.live import MOST_POINTS, LiveRun, Series
from manager.report.summary import summarise
from manager.run_dir import JOURNAL, RunFacts
from manager.trackers.reading import HappeningsReader
from morph.cli.main import app
from morph.contract.happenings import Trouble
from morph.contract.messages import Failed, WorkerReady


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 8, 13])
def test_the_live_account_and_changes_of_shape_are_the_journals(tmp_path: Path, seed: int) -> None:
    faults, num_nodes, _ = random_faults(seed)
    # so that one manager sees everything
    faults = replace(faults, restarts_after_s=(), fresh_starts_after_s=(), dies_before="")
    run, lines = LiveRun("job", 12, 8), list[str]()

    def observe(_cluster: SimulatedCluster, _before: ControllerState, event: Event, decision: Decision) -> None:
        facts, cluster.facts = cluster.facts, []
        told = run.take(cluster.clock_s(), event, decision, facts)
        lines.extend(one.sentence for one in told if one.code == "morph")

    cluster = JournalledCluster(seed, tmp_path, faults, expected_nodes=num_nodes)
    cluster.observers = (*cluster.observers, observe)
    cluster.run(num_nodes)
    cluster.journal.close()
    report = read_report(tmp_path)
    assert run.fold.ledger.account() == report.account
    assert run.version == report.version
    assert lines == [morph_line(morph) for morph in report.morphs if morph.pause_ms is not None]
    assert (run.loss is None) == (not report.steps)


def test_the_grid_has_a_node_in_every_place_while_a_shape_trains() -> None:
    run = played(stop_at=6)
    grid = snapshot(run)["grid"]
    assert [len(row) for row in grid] == [2, 2]
    assert all(cell["worker"] and cell["state"] == "ready" for row in grid for cell in row)
    assert [worker["state"] for worker in snapshot(run)["others"]] == ["ready"], "five live, four have a place"
    assert run.headline.startswith("training  2x2  6/12 steps")
    assert re.fullmatch(r"\w+  0/12 steps", LiveRun("job", 12, 8).headline), "no step is named before its loss is known"
    assert "on demand" in run.headline


def test_vms_in_a_queue_are_shown_waiting_and_leaving_it() -> None:
    run, script = LiveRun("job", 12, 8), Script(target_nodes=3)
    granted = NodesGranted(request="job-1", nodes=("a", "b", "c"), waiting=("b", "c"))
    told: list[tuple[str, str]] = []
    for event in (Tick(), granted, NodesStarted(request="job-1", nodes=("c",))):
        script.tell(event)
        assert script.last is not None
        told += [(each.code, each.sentence) for each in run.take(script.now_s, event, script.last) if not each.inner]
    assert told == [
        ("requested", "3 more VMs requested from the provider"),
        ("queued", "b, c wait in the queue"),
        ("nodes_started", "c left the queue and boots"),
    ]


def test_a_series_keeps_its_newest_point_and_stays_small() -> None:
    series = Series()
    for number in range(100_000):
        series.add(float(number), float(-number))
        assert len(series.points) <= MOST_POINTS
        assert series.points[-1] == (number, -number)
    times = [time_s for time_s, _ in series.points]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0
    assert len(set(gaps[:-1])) == 1
    assert gaps[0] <= 2 * 100_000 / (MOST_POINTS / 2)


def run_observed(observer: Observer, config: ControllerConfig, faults: Faults) -> None:
    """Run a simulated job to its end, and let the observer see each decision."""

    def observe(cluster: SimulatedCluster, _before: ControllerState, event: Event, decision: Decision) -> None:
        observer(Observed(cluster.now_s, event, decision, lambda _reason: None))

    assert SimulatedCluster(0, config, faults, observers=(observe,)).run(config.expected_nodes).outcome == "finished"


def test_every_decided_step_and_every_change_is_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    with run_view(LiveRun("job", 12, 8), plain=False, as_json=True) as observer:
        run_observed(observer, make_config(expected_nodes=6), Faults(deaths_after_s=((6.0, 1),)))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["version"] for line in lines} == set(range(13))
    assert [line["loss"] for line in lines if line["version"] == 12][-1] == pytest.approx(1 / 12)
    assert {line["shape"] for line in lines} >= {"3x2", "2x2"}
    assert lines[-1]["code"] == "finished"
    assert any(line["examples_per_s"] for line in lines)
    assert (lines[-1]["metrics"], lines[-1]["saved_version"]) == ({"right": 0.25}, 12)
    assert lines[-1]["learning_rates"] == [0.001 / 12, 0.001]


def played_lines(
    capsys: pytest.CaptureFixture[str], *, verbose: bool, num_steps: int = 12, write_failure: float = 0.0
) -> list[str]:
    with run_view(LiveRun("job", num_steps, 8), plain=True, verbose=verbose) as observer:
        config = make_config(expected_nodes=6, num_steps=num_steps)
        run_observed(observer, config, Faults(write_failure=write_failure))
    return [line.split(" s  ", 1)[1] for line in capsys.readouterr().out.splitlines()]


def test_plain_lines_are_of_steps_shapes_losses_evaluations_and_saves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = played_lines(capsys, verbose=False)
    saves = [line for line in lines[:-1] if "checkpoint" in line]
    assert saves == []
    assert any(re.search(r"training +3x2 +\d+/12 steps .* loss 0\.\d+ .*saved after \d+ steps", line) for line in lines)
    assert "evaluation at version 4: loss 0.5000, right 0.5" in lines
    assert "evaluation at version 8: loss 0.2500, right 0.5" in lines
    assert [line for line in played_lines(capsys, verbose=True)[:-1] if "the checkpoint of version" in line] != []


def test_a_save_after_refused_ones_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    lines = played_lines(capsys, verbose=False, num_steps=40, write_failure=0.2)
    saves = [line for line in lines if re.search("checkpoint|saved$", line)]
    assert saves[0].endswith("could not write its part of a checkpoint: disk full")
    assert saves[1] == "the checkpoint of version 6 is complete, after 1 that storage refused"
    assert saves[-1] == "all 40 steps are done and saved"


FACTS = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=6)
PROTOCOL = ("generation", "answered", "abort", "order", "dissolved", "prepared", "appeared", "is ready")
ONE_LOST = Faults(deaths_after_s=((6.0, 1),))
ALL_LOST = Faults(deaths_after_s=((7.0, 5),), quiet_after_s=9.0)
TWO_JOIN = Faults(joins_after_s=(5.0, 5.0))
HIT_AGAIN = Faults(deaths_in=((Phase.TRAINING, 0, 1), (Phase.RESHAPING, 1, 1)))


def live_lines(
    capsys: pytest.CaptureFixture[str], faults: Faults, num_nodes: int, *, verbose: bool = False
) -> list[str]:
    """Return what ``morph run --plain`` prints, without its times."""
    with run_view(LiveRun("job", 12, 8), plain=True, verbose=verbose) as observer:
        run_observed(observer, make_config(expected_nodes=num_nodes), faults)
    return [line.partition(" s  ")[2] for line in capsys.readouterr().out.splitlines()]


def events_of(run_dir: Path, faults: Faults, num_nodes: int, *options: str) -> list[str]:
    """Return what ``morph events`` prints, without times, steps and codes."""
    if not (run_dir / "run.json").exists():
        cluster = JournalledCluster(0, run_dir, faults, expected_nodes=num_nodes)
        assert cluster.run(num_nodes).outcome == "finished"
        cluster.journal.close()
        (run_dir / "run.json").write_text(FACTS.model_dump_json())
    done = CliRunner().invoke(app, ["events", str(run_dir), *options])
    assert done.exit_code == 0, done.output
    return [re.split(r"  +", line, maxsplit=3)[3] for line in done.output.splitlines()]


@pytest.mark.parametrize(
    ("faults", "num_nodes", "told"),
    [
        (ONE_LOST, 6, [r"3x2 on 6 workers, from step 0", r"n3 lost; 3x2 -> 2x2 in [\d.]+ s, no step lost"]),
        (TWO_JOIN, 4, [r"2x2 on 4 workers, from step 0", r"n5, n6 joined; 2x2 -> 3x2 in [\d.]+ s, no step lost"]),
        (HIT_AGAIN, 6, [r"3x2 on 6 workers, from step 0", r"n2, n6 lost; 3x2 -> 2x2 in [\d.]+ s, no step lost"]),
        (
            ALL_LOST,
            5,
            [
                r"2x2 on 4 workers, from step 0",
                r"training waits until 2 workers are ready",
                r"5 VMs lost; 2x2 -> 2x2 in [\d.]+ s, 2 steps run again",
            ],
        ),
    ],
)
def test_a_change_of_shape_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], faults: Faults, num_nodes: int, told: list[str]
) -> None:
    live = [
        line for line in live_lines(capsys, faults, num_nodes) if not re.match(r"[\w ]+?  (\dx\d  )?\d+/12 steps", line)
    ]
    for lines in (live, events_of(tmp_path, faults, num_nodes)):
        assert not [line for line in lines if any(word in line for word in PROTOCOL)]
        others = ("checkpoint", "manager", "evaluation at version", "all 12 steps are done and saved")
        found = [line for line in lines if not any(words in line for words in others)]
        assert len(found) == len(told)
        assert all(re.fullmatch(pattern, line) for pattern, line in zip(told, found, strict=True)), found


def test_the_protocol_is_printed_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert any("generation 1 is dissolved" in line for line in live_lines(capsys, ONE_LOST, 6, verbose=True))
    verbose, every = (events_of(tmp_path, ONE_LOST, 6, *options) for options in (["--verbose"], ["--all"]))
    assert any("generation 1 is dissolved" in line for line in verbose)
    assert len(events_of(tmp_path, ONE_LOST, 6)) < len(verbose) < len(every)


def test_nothing_is_said_twice_while_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = live_lines(capsys, ALL_LOST, 5)
    assert len([line for line in lines if line.startswith("starting")]) <= 1
    assert len(lines) == len(set(lines))


def test_a_spare_that_is_lost_changes_no_shape(capsys: pytest.CaptureFixture[str]) -> None:
    def spare(cluster: SimulatedCluster, _before: ControllerState, event: Event, decision: Decision) -> None:
        observer(Observed(cluster.now_s, event, decision, lambda _reason: None))
        used = {slot.worker for slot in decision.state.slots}
        if decision.state.version == 3 and decision.state.phase is Phase.TRAINING:
            for name in set(decision.state.workers) - used:
                cluster.kill(name)

    with run_view(LiveRun("job", 12, 8), plain=True) as observer:
        cluster = SimulatedCluster(0, make_config(expected_nodes=5), Faults(), observers=(spare,))
        assert cluster.run(5).outcome == "finished"
    lines = capsys.readouterr().out
    assert re.search(r"n\d lost; 2x2 goes on", lines)
    assert "->" not in lines


def test_setups_that_fail_are_the_first_line_wherever_a_run_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, run, journal = Script(target_nodes=4), LiveRun("job", 12, 8), Journal.open(tmp_path / JOURNAL)
    journal.append_config(0.0, script.state.config)

    def tell(event: Event) -> None:
        script.tell(event)
        assert script.last is not None
        journal.append_decision(script.now_s, event, script.last)
        happened.extend(run.take(script.now_s, event, script.last))

    happened: list[Told] = []
    tell(Tick())
    error = "CUDA error: no kernel image"
    tell(NodeAppeared(node="n1", request="job-1"))
    tell(WorkerAnswered(worker="n1", answer=Failed(worker="n1", generation=0, error=error, cause="device")))
    sentence = f"n1 could not be set up: {error}"
    assert run.headline.startswith(f"starting: {sentence}  ")
    assert snapshot(run)["trouble"] == sentence
    assert [one.sentence for one in happened if not one.inner and one.code == "setup_failed"] != []
    assert summarise(read_report(tmp_path)).startswith(f"job: running ({sentence}")
    events = [one.record for one in Fold().steps(journal.read()) if isinstance(one.record, Told)]
    assert any(told.code == "setup_failed" and not told.inner for told in events)
    told_of = HappeningsReader("mem://checkpoints")
    (trouble,) = [one for entry in journal.read() for one in told_of.take(entry) if isinstance(one, Trouble)]
    assert trouble.kind == "setup_failed"
    assert trouble.sentence.startswith(sentence)
    assert not any(one.code == "lost" for one in happened), "it had no part in training"
    tell(NodeAppeared(node="n2", request="job-1"))
    tell(WorkerAnswered(worker="n2", answer=WorkerReady(worker="n2", pid=1, setup_s=1)))
    assert sentence not in run.headline
    assert sentence not in summarise(read_report(tmp_path))
    journal.close()


def test_the_grid_of_unequal_pipelines_has_rows_of_their_depths() -> None:
    run = LiveRun("job", 12, 8)
    cluster = SimulatedCluster(0, make_config(plans=UNEQUAL, expected_nodes=5))
    cluster.observers = (lambda at, _before, event, decision: run.take(at.now_s, event, decision),)
    cluster.schedule(5)
    while run.version < 3:
        cluster.next()
    assert run.shape == "3x1 + 2x1"
    assert [len(row) for row in snapshot(run)["grid"]] == [3, 2]
    assert sorted(map(run.role, run.workers))[-1] == "stage 2, replica 0"

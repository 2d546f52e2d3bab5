"""What a user is told of a run: steps and shapes, in one line each; the protocol only on request."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from simulated_cluster import Faults, JournalledCluster, SimulatedCluster
from simulated_job import make_config
from typer.testing import CliRunner

from manager.controller.state.events import Event
from manager.controller.state.state import ControllerState, Decision, Phase
from manager.engine.loop.driver import Observed
from manager.report.live import LiveRun
from manager.run_dir import RunFacts
from morph.cli.main import app
from morph.cli.views.run_view import run_view

FACTS = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=6)
PROTOCOL = ("generation", "answered", "abort", "order", "dissolved", "prepared", "appeared", "is ready")
ONE_LOST = Faults(deaths_after_s=((6.0, 1),))
ALL_LOST = Faults(deaths_after_s=((7.0, 5),), quiet_after_s=9.0)
TWO_JOIN = Faults(joins_after_s=(5.0, 5.0))
HIT_AGAIN = Faults(deaths_in=((Phase.TRAINING, 0, 1), (Phase.RESHAPING, 1, 1)))


def live_lines(
    capsys: pytest.CaptureFixture[str], faults: Faults, num_nodes: int, *, verbose: bool = False
) -> list[str]:
    """What ``morph run --plain`` prints, without its times."""
    with run_view(LiveRun("job", 12, 8), plain=True, verbose=verbose) as observer:

        def observe(cluster: SimulatedCluster, _before: ControllerState, event: Event, decision: Decision) -> None:
            observer(Observed(cluster.now_s, event, decision, lambda _reason: None))

        cluster = SimulatedCluster(0, make_config(expected_nodes=num_nodes), faults, observers=(observe,))
        assert cluster.run(num_nodes).outcome == "finished"
    return [line.partition(" s  ")[2] for line in capsys.readouterr().out.splitlines()]


def events_of(run_dir: Path, faults: Faults, num_nodes: int, *options: str) -> list[str]:
    """What ``morph events`` prints, without times, steps and codes."""
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
    live = [line for line in live_lines(capsys, faults, num_nodes) if not re.match(r"\w+  (\dx\d  )?step \d", line)]
    for lines in (live, events_of(tmp_path, faults, num_nodes)):
        assert not [line for line in lines if any(word in line for word in PROTOCOL)]
        others = ("checkpoint", "manager", "evaluation at version", "all 12 steps are committed and saved")
        found = [line for line in lines if not any(words in line for words in others)]
        assert len(found) == len(told)
        assert all(re.fullmatch(pattern, line) for pattern, line in zip(told, found, strict=True)), found


def test_the_protocol_is_told_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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

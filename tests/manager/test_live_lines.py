"""A run told as JSON lines while it goes on."""

from __future__ import annotations

import json
import re

import pytest
from simulated_cluster import Faults, SimulatedCluster
from simulated_job import make_config

from manager.controller.state.events import Event
from manager.controller.state.state import ControllerState, Decision
from manager.engine.loop.driver import Observed
from manager.report.live import LiveRun
from morph.cli.views.run_view import run_view


def test_every_decided_step_and_every_change_is_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    with run_view(LiveRun("job", 12, 8), plain=False, as_json=True) as observer:

        def observe(cluster: SimulatedCluster, _before: ControllerState, event: Event, decision: Decision) -> None:
            observer(Observed(cluster.now_s, event, decision, lambda _reason: None))

        cluster = SimulatedCluster(
            0, make_config(expected_nodes=6), Faults(deaths_after_s=((6.0, 1),)), observers=(observe,)
        )
        assert cluster.run(6).outcome == "finished"
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

        def observe(cluster: SimulatedCluster, _before: ControllerState, event: Event, decision: Decision) -> None:
            observer(Observed(cluster.now_s, event, decision, lambda _reason: None))

        config, faults = make_config(expected_nodes=6, num_steps=num_steps), Faults(write_failure=write_failure)
        cluster = SimulatedCluster(0, config, faults, observers=(observe,))
        assert cluster.run(6).outcome == "finished"
    return [line.split(" s  ", 1)[1] for line in capsys.readouterr().out.splitlines()]


def test_plain_lines_are_of_steps_shapes_losses_and_evaluations_and_saves_are_told_in_passing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = played_lines(capsys, verbose=False)
    saves = [line for line in lines[:-1] if "checkpoint" in line]
    assert saves == []
    assert any(re.search(r"training +3x2 +step \d+/12 .* loss 0\.\d+ .*saved at \d+", line) for line in lines)
    assert "evaluation at version 4: loss 0.5000, right 0.5" in lines
    assert "evaluation at version 8: loss 0.2500, right 0.5" in lines
    assert [line for line in played_lines(capsys, verbose=True)[:-1] if "the checkpoint of version" in line] != []


def test_a_save_after_some_that_storage_refused_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    lines = played_lines(capsys, verbose=False, num_steps=40, write_failure=0.2)
    saves = [line for line in lines if re.search("checkpoint|saved$", line)]
    assert saves[0].endswith("could not write its part of a checkpoint: disk full")
    assert saves[1] == "the checkpoint of version 6 is complete, after 1 that storage did not take"
    assert saves[-1] == "all 40 steps are committed and saved"

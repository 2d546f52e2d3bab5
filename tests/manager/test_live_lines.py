"""A run told as JSON lines while it goes on."""

from __future__ import annotations

import json

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

"""``morph history``: a table, JSON, and forgetting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from manager.controller.state.events import NodeFacts
from manager.history.database import history_path, keep_lives, kept_lives
from manager.report.lives import Ending, Life
from morph.cli.main import app

H = 3600.0


@pytest.fixture(autouse=True)
def own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MORPH_DATA_DIR", str(tmp_path))
    return history_path()


def history(*options: str) -> Result:
    return CliRunner().invoke(app, ["history", *options])


def fill() -> None:
    azure = NodeFacts(provider="azure", size="Standard_NC24ads_A100_v4", region="westeurope", zone="2")
    taken = {"ending": Ending.REVOKED, "lost_with": 2, "lost_of": 4, "noticed_s": 90.0, "lead_s": 30.0}
    told = {"facts": azure, "usd_per_h": 0.97, "asked_s": 0.0, "begun_s": 40.0, "appeared_s": 100.0, "ready_s": 160.0}
    lives = [
        Life(vm="a", ended_s=40 + 5 * H, **told, **taken),
        Life(vm="b", ended_s=40 + 7 * H, **told, **{**taken, "noticed_s": None, "lead_s": None}),
        Life(vm="c", ended_s=40 + 8 * H, ending=Ending.RUN_OVER, **told),
        Life(vm="d", facts=NodeFacts(provider="local"), begun_s=0.0, ended_s=36.0, ending=Ending.RUN_OVER),
    ]
    keep_lives(history_path(), "run", lives)


def test_no_history_is_one_sentence(own_history: Path) -> None:
    shown = history()
    assert shown.exit_code == 0
    assert shown.stdout == f"no run has recorded its VMs yet ({own_history})\n"
    assert not own_history.exists()
    assert json.loads(history("--json").stdout) == []


def test_each_kind_is_a_row() -> None:
    fill()
    shown = history().stdout
    assert shown.splitlines()[-1].startswith("expected: losses that the next run assumes")
    assert "expected per VM-hour" in shown
    rows = [line.split() for line in shown.splitlines() if line.lstrip().startswith(("azure", "local"))]
    azure = "azure Standard_NC24ads_A100_v4 westeurope 2 3 20 2"
    assert rows[0][:7] == azure.split()
    # two VMs lost together count as one: (0.39 x 7.2 + 1) / (7.2 + 10)
    assert " ".join(rows[0][7:]) == "0.22 [0.073, 0.43] 10 h 50% 30 s 100% 100 s 60 s 0.97"
    assert rows[1][:4] == ["local", "1", "0.01", "0"]
    assert rows[1][-7:] == ["-"] * 7
    only = history("--provider", "local").stdout
    assert "azure" not in only
    assert history("--zone", "7").stdout == "no run has recorded such a VM\n"


def test_json_has_what_each_figure_rests_on() -> None:
    fill()
    azure, local = json.loads(history("--json").stdout)
    assert azure["facts"]["zone"] == "2"
    assert azure["seen"] == {
        **{"num_vms": 3, "hours": 20.0, "num_lost": 2, "num_noticed": 1, "together": 4},
        **{"num_bulk": 2, "num_bulk_events": 1.0, "bulk_fractions": 0.5},
    }
    assert (azure["estimate"]["num_allocations"], azure["allocation_s"]) == (0, 100.0)
    assert azure["estimate"]["expected"]["allocation_s"] == 132.0, "three are not enough"
    assert local["estimate"]["expected"]["per_vm_h"] == pytest.approx(0.39, abs=0.001)


def test_only_what_is_named_is_forgotten(own_history: Path) -> None:
    fill()
    refused = history("--forget")
    assert refused.exit_code == 2
    assert "--forget: needs an option that selects the VMs to forget; allowed: with --provider" in refused.stderr
    assert len(kept_lives(own_history, {})) == 4
    assert history("--forget", "--provider", "local").stdout == "1 VM is forgotten\n"
    assert {life.vm for life in kept_lives(own_history, {})} == {"a", "b", "c"}


def test_a_history_that_cannot_be_read_is_one_line(own_history: Path) -> None:
    own_history.write_text("no database" * 99)
    for options in ((), ("--json",), ("--forget", "--zone", "1")):
        shown = history(*options)
        assert shown.exit_code == 2
        assert shown.stderr.startswith(f"error: {own_history}: cannot be ")
        assert shown.stderr.count("\n") == 1

"""``morph trace``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from morph.cli.main import app
from morph.contract.trace import load_trace

RUNNER = CliRunner()


def run(*arguments: object, code: int = 0) -> str:
    done = RUNNER.invoke(app, ["trace", *map(str, arguments)])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return " ".join(done.output.split())


def test_a_trace_is_drawn_converted_described_fitted_and_pictured(tmp_path: Path) -> None:
    trace, model, again, png = (tmp_path / name for name in ("a.csv", "model.json", "b.csv", "a.png"))
    drawn = run("generate", "--vms", 12, "--hours", 12, "--set", "zones=3", "--set", "notice=30:0.5", "-o", trace)
    assert "12 VMs at most" in drawn
    told = json.loads(run("stats", trace, "--json"))
    assert list(told) == ["zone-a", "zone-b", "zone-c", "all"]
    whole = told["all"]
    assert whole["vms_lost"] == sum(event.event == "remove" for event in load_trace(trace).events)
    assert 0 < whole["noticed"] < whole["vms_lost"]
    assert "zone-c" in run("stats", trace)
    like = run("generate", "--like", trace, "--set", "zones=2", "--hours", 24, "-o", again, "--save-model", model)
    assert str(model) in like.replace(" ", "")
    once = load_trace(again)
    run("generate", "--model", model, "--hours", 24, "-o", again)
    assert load_trace(again) == once
    run("plot", trace, "--fit", "--png", png)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_other_formats_are_converted(tmp_path: Path) -> None:
    for zone in ("a", "b"):
        text = json.dumps({"metadata": {"gap_seconds": 600}, "data": [2, 2, 1, 2] * 6})
        (tmp_path / f"{zone}_v100.json").write_text(text, encoding="utf-8")
    files = sorted(tmp_path.glob("*.json"))
    out = tmp_path / "out.csv"
    assert "4 VMs at most" in run("convert", *files, "--from-h", 1, "--hours", 2, "-o", out)
    trace = load_trace(out)
    assert {event.zone for event in trace.events} == {"a", "b"}
    assert trace.duration_s == 7200
    beyond = run("convert", *files, "--from-h", 1, "--hours", 6, "-o", out)
    assert "note: the traces end after 4 h" in beyond
    assert load_trace(out).duration_s == 3 * 3600


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "-o", "out.csv"], "--vms: is missing; allowed: one of --vms, --like, --model"),
        (["generate", "--vms", "4", "--like", "a.csv", "-o", "out.csv"], "--vms and --like: cannot be combined"),
        (
            ["generate", "--like", "a.csv", "--set", "bulk_share=0.1", "-o", "out.csv"],
            "--set bulk_share: cannot be combined",
        ),
        (["generate", "--vms", "4", "--set", "zones=5", "-o", "out.csv"], "--set zones: is more than there are VMs"),
        (
            ["generate", "--vms", "4", "--set", "notice=soon", "-o", "out.csv"],
            "--set notice: is no notice (got 'soon')",
        ),
        (["generate", "--model", "absent.json", "-o", "out.csv"], "absent.json: cannot be read"),
        (["generate", "--vms", "4", "-o", "/nowhere/out.csv"], "/nowhere/out.csv"),
        (["stats", "absent.csv"], "absent.csv: cannot be read"),
        (["plot", "absent.csv", "--png", "/nowhere/a.png"], "/nowhere/a.png"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in run(*arguments, code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_model_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text('{"zones": [{"vms": 0, "losses_per_vm_h": 1, "replacement_s": 1}]}', encoding="utf-8")
    assert "zones.0.vms" in run("generate", "--model", model, "-o", tmp_path / "out.csv", code=2)

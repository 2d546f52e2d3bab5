"""``morph trace``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from manager.commands import replay_shown
from manager.simulation.replay import POLICIES, Replay, policies_of
from manager.simulation.spot.job import job_from_profile
from manager.simulation.spot.run_end import Until
from morph.cli.main import app
from morph.contract.profile import load_profile
from morph.contract.trace import load_trace, write_trace
from morph.pictures import picture
from simulator import PlanRequest, spot_model, synthetic_profile

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


def test_a_trace_that_counts_from_1970_is_described_and_drawn_as_one_that_begins_at_its_first_event(
    tmp_path: Path,
) -> None:
    lines = ["0,add,a,z", "0,add,b,z", "3600,remove,a,z", "5400,add,c,z", "9000,remove,b,z", "9000,remove,c,z"]
    told, drawn = [], []
    for start_s in (0, 1_690_000_000):
        moved = (line.partition(",") for line in lines)
        rows = [f"{start_s + int(time_s)},{rest}" for time_s, _, rest in moved]
        path, out = tmp_path / f"{start_s}.csv", tmp_path / "drawn.csv"
        path.write_text("\n".join(["time_s,event,node_id,zone", *rows, f"{start_s + 10800},end,,"]) + "\n")
        told.append(json.loads(run("stats", path, "--json")))
        run("generate", "--like", path, "--hours", 5, "-o", out)
        drawn.append(load_trace(out))
    assert told[0] == told[1]
    assert told[1]["z"]["hours"] == 3
    assert drawn[0] == drawn[1]


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
    after = run("convert", files[0], "--from-h", 9, "-o", out, code=2)
    assert f"{files[0]}: --from-h: holds no VM (got '9 h to 4 h')" in after


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
            "--set notice: is not a notice (got 'soon')",
        ),
        (["generate", "--model", "absent.json", "-o", "out.csv"], "absent.json: cannot be read"),
        (["generate", "--vms", "4", "-o", "/nowhere/out.csv"], "/nowhere/out.csv"),
        (["stats", "absent.csv"], "absent.csv: cannot be read"),
        (["plot", "absent.csv", "--png", "/nowhere/a.png"], "/nowhere/a.png"),
    ],
)
def test_errors_are_reported_in_one_sentence(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in run(*arguments, code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_model_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text('{"zones": [{"vms": 0, "losses_per_vm_h": 1, "replacement_s": 1}]}', encoding="utf-8")
    assert "zones.0.vms" in run("generate", "--model", model, "-o", tmp_path / "out.csv", code=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return a profile and a trace of two hours."""
    folder = tmp_path_factory.mktemp("replay")
    profile, trace = folder / "profile.json", folder / "trace.csv"
    profile.write_text(synthetic_profile(num_sections=6, forward_s=0.01, batch_size=256).model_dump_json())
    write_trace(spot_model(6, losses_per_vm_h=2.4, bulk_share=0.3, replacement_s=120).draw(1, 7200), trace)
    return str(profile), str(trace)


@pytest.mark.slow
def test_policies_are_compared_on_a_trace(
    files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []

    @contextmanager
    def kept(*args: Any, **panels: Any) -> Iterator[tuple[Any, Any]]:
        with picture(*args, **panels) as (figure, axes):
            drawn.extend(axes)
            yield figure, axes

    monkeypatch.setattr(replay_shown, "picture", kept)
    csv, png = tmp_path / "out.csv", tmp_path / "out.png"
    prices = ["--price", "1", "--on-demand-price", "3.5"]
    done = RUNNER.invoke(
        app, ["replay", files[0], "--trace", files[1], *prices, "--csv", str(csv), "--png", str(png), "--policy", "all"]
    )
    assert done.exit_code == 0, done.output
    assert "Take morph" in done.stdout
    table = pd.read_csv(csv)
    assert len(table) == len(POLICIES)
    assert table.set_index("policy").loc["ideal", "steps"] >= table["steps"].drop(table.index[-2]).max()
    assert png.read_bytes().startswith(b"\x89PNG")
    assert [label.get_text() for label in drawn[0].get_yticklabels()] == list(reversed(POLICIES))
    lines = drawn[2].get_lines()
    named = [name for line in lines for name in str(line.get_label()).split(",\n")]
    assert sorted(named) == sorted(POLICIES), "each policy once, those with one curve beside each other"
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines)
    assert len({tuple(line.get_ydata()) for line in lines}) == len(lines)
    assert [label.get_text() for label in drawn[0].get_xticklabels()][-1] == "100%"


def test_parquet_holds_the_rows_of_the_csv(files: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    csv, parquet = tmp_path / "out.csv", tmp_path / "out.parquet"
    options = ["--policy", "restart,ideal", "--csv", str(csv), "--parquet", str(parquet)]
    done = RUNNER.invoke(app, ["replay", files[0], "--trace", files[1], *options])
    assert done.exit_code == 0, done.output
    told = pd.read_parquet(parquet)
    assert list(told["policy"]) == ["restart", "ideal"]
    pd.testing.assert_frame_equal(told.replace("", math.nan), pd.read_csv(csv), check_dtype=False)


def test_parquet_without_pyarrow_names_the_extra_before_anything_is_simulated(
    files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    options = ["--trace", files[1], "--parquet", str(tmp_path / "out.parquet")]
    done = RUNNER.invoke(app, ["replay", files[0], *options])
    assert done.exit_code == 2, done.output
    told = " ".join(done.output.split())
    assert "--parquet: needs pyarrow" in told
    assert "pip install -e '.[parquet]'" in told


def test_drawn_traces_end_with_the_steps_that_were_asked_for(files: tuple[str, str]) -> None:
    options = ["--vms", "6", "--hours", "6", "--seeds", "3", "--until", "500", "--policy", "morph,ideal", "--json"]
    done = RUNNER.invoke(app, ["replay", files[0], *options])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["policy"] for row in rows] == ["morph"] * 3 + ["ideal"] * 3
    assert {row["steps"] for row in rows} == {500}
    assert all(row["finished"] and row["usd"] is None for row in rows)


@pytest.mark.slow
def test_morph_decides_by_the_policy_of_a_cluster_file(files: tuple[str, str], tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("policy: {redundancy: 'off'}")
    alone = ["replay", files[0], "--trace", files[1], "--json", "--policy"]
    given, off, on = (
        RUNNER.invoke(app, [*alone, *more]).stdout
        for more in (["morph", "--cluster", str(cluster)], ["morph-off"], ["morph"])
    )
    assert json.loads(given)[0] | {"policy": ""} == json.loads(off)[0] | {"policy": ""}
    assert json.loads(given) != json.loads(on)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vms", "same_as"),
    [
        ("keep: 4, usd_per_h: 2, on_demand_usd_per_h: 7", ["--vms", "4", "--price", "2", "--on-demand-price", "7"]),
        ("keep: 9, usd_per_h: 2, limits: {usd_per_h: 9}", ["--vms", "4", "--price", "2"]),
        ("keep: 4, usd_per_h: 2, limits: {budget_usd: 5}", ["--vms", "4", "--price", "2", "--until", "5usd"]),
    ],
)
def test_vms_prices_and_limits_are_those_of_a_cluster_file(
    files: tuple[str, str], tmp_path: Path, vms: str, same_as: list[str]
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"vms: {{{vms}}}")
    alone = ["replay", files[0], "--hours", "4", "--seeds", "1", "--seed", "3", "--policy", "morph,ideal", "--json"]
    by_file, by_options = (
        RUNNER.invoke(app, [*alone, *more]) for more in (["--vms", "4", "--cluster", str(cluster)], same_as)
    )
    assert (by_file.exit_code, by_options.exit_code) == (0, 0), by_file.output + by_options.output
    assert json.loads(by_file.stdout) == json.loads(by_options.stdout)


def test_limits_that_allow_no_vm_are_refused_by_file_and_field(files: tuple[str, str], tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("vms: {keep: 4, usd_per_h: 2, limits: {usd_per_h: 1}}")
    done = RUNNER.invoke(app, ["replay", files[0], "--cluster", str(cluster)])
    assert done.exit_code == 2, done.output
    assert "cluster.yaml: vms.limits.usd_per_h: allows no VM (got 1.0)" in "".join(done.output.split("\n"))


def test_a_recorded_trace_has_no_more_vms_than_a_cluster_file_keeps(files: tuple[str, str], tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("vms: {keep: 2}")
    command = ["replay", files[0], "--trace", files[1], "--policy", "ideal", "--json"]
    few, all_of_them = (
        json.loads(RUNNER.invoke(app, [*command, *more]).stdout)[0] for more in (["--cluster", str(cluster)], [])
    )
    assert few["vm_hours"] <= 4.01 < all_of_them["vm_hours"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--vms", "4", "--policy", "mix-100"], "--policy: is not a policy (got 'mix-100')"),
        (["--vms", "4", "--until", "soon"], "--until: is not a bound (got 'soon')"),
        (["--vms", "4", "--until", "2001-01-01"], "--until: is in the past (got '2001-01-01')"),
        (["--vms", "4", "--until", "50usd"], "--until: needs prices (got '50usd')"),
        (["--vms", "4", "--until", "5usd", "--price", "1", "--on-demand-price", "0"], "--on-demand-price above 0"),
        (["--vms", "4", "--hours", "2", "--until", "3h"], "--until: is after a trace's end (got '3h')"),
        ([], "--vms: is missing"),
        (["--trace", "endless.csv", "--until", "10"], "endless.csv: event: ends with its first events"),
        (["--trace", "endless.csv"], "or a last line such as 86400,end for the second at which the recording ended"),
        (["--trace", "few.csv"], "profile.json: --memory-gib: the job does not fit in the memory of 1 devices"),
        (
            ["--vms", "4", "--policy", "morph", "--node-types", "spot=t4"],
            "profile.json: --node-types: is not a type of",
        ),
        (["--like", "few.csv"], "few.csv: --like: cannot be fitted: no VM is lost in it"),
        (["--trace", "many.csv"], "--trace: has too many GPUs at once (got 2001); allowed: 1 to 2000 GPUs"),
        (["--trace", "absent.csv"], "absent.csv: cannot be read"),
        (["--vms", "4", "--csv", "/nowhere/out.csv"], "/nowhere"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_sentence(
    files: tuple[str, str], options: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, num_vms, end in (("endless", 2, ""), ("few", 1, "9,end,\n"), ("many", 2001, "9,end,\n")):
        vms = "".join(f"0,add,v{number}\n" for number in range(num_vms))
        (tmp_path / f"{name}.csv").write_text(f"time_s,event,node_id\n{vms}{end}", encoding="utf-8")
    options = [*options, "--memory-gib", "0.001"] if "few.csv" in options else options
    done = RUNNER.invoke(app, ["replay", files[0], *options])
    assert done.exit_code == 2, done.output
    assert told in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_files_and_a_number_of_vms_exclude_each_other(files: tuple[str, str]) -> None:
    done = RUNNER.invoke(app, ["replay", files[0], "--trace", files[1], "--vms", "4"])
    assert done.exit_code == 2
    assert "--trace: cannot be combined with --vms" in done.output


NUMBERS = {"name": "tiny", "step_s": [4.0, 5.0], "save_s": 2.5, "upload_s": 20, "preparation_s": [140, 166]}
ONE_VM = ["--vms", "1", "--set", "losses_per_vm_h=0.5", "--set", "replacement_s=130", "--hours", "20"]


def test_a_job_on_one_vm_is_described_by_bounded_durations(tmp_path: Path) -> None:
    numbers, csv = tmp_path / "numbers.yaml", tmp_path / "out.csv"
    numbers.write_text(json.dumps(NUMBERS))
    options = [*ONE_VM, "--seeds", "6", "--until", "5000", "--policy", "restart,restart-10,ideal", "--csv", str(csv)]
    done = RUNNER.invoke(app, ["replay", str(numbers), *options])
    assert done.exit_code == 0, done.output
    table = pd.read_csv(csv)
    ideal = table[table["policy"] == "ideal"].set_index("seed")
    assert (ideal["examples_per_s"] <= 1 / 4.0).all()
    assert (ideal["examples_per_s"] > 1 / 5.5).all()  # and VMs that are missing
    assert ideal["examples_per_s"].std() > 0.002  # each trace has its own figures
    for policy in ("restart", "restart-10"):
        assert (table[table["policy"] == policy].set_index("seed")["hours"] >= ideal["hours"]).all()
    saving = table.groupby("policy")["share_checkpoint"].mean()
    assert saving["restart-10"] > 2 * saving["restart"] > 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"step_s": 0}, "step_s: must be above 0 (got 0)"),
        ({"save_s": [3, 2]}, "save_s: the first of the two numbers is above the second"),
        ({"upload_s": "fast"}, "upload_s: is neither a number of seconds nor a list of two bounds"),
        ({"upload_s": [1, 2, 3]}, "upload_s: is neither a number of seconds nor a list of two bounds"),
        ({"backup_s": 1}, "backup_s: unknown key"),
    ],
)
def test_numbers_of_a_job_that_cannot_be_are_named(change: dict[str, object], told: str, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.yaml"
    numbers.write_text(json.dumps(NUMBERS | change))
    done = RUNNER.invoke(app, ["replay", str(numbers), *ONE_VM])
    assert done.exit_code == 2, done.output
    assert f"{numbers}: {told}" in " ".join(done.output.split())


def test_the_advice_goes_by_what_is_wanted(files: tuple[str, str]) -> None:
    prices = ["--price", "1", "--on-demand-price", "100"]
    command = ["replay", files[0], "--trace", files[1], "--policy", "restart,on-demand", *prices]
    dollars = RUNNER.invoke(app, command)
    examples = RUNNER.invoke(app, [*command, "--objective", "examples"])
    assert "Take restart" in dollars.stdout, dollars.output
    assert "Take on-demand" in examples.stdout, examples.output
    unpriced = RUNNER.invoke(app, ["replay", files[0], "--trace", files[1], "--objective", "dollars"])
    assert unpriced.exit_code == 2
    assert "--objective: needs prices" in " ".join(unpriced.output.split())


# ---- how long simulations take ----


def test_progress_grows_within_a_trace_and_outcomes_stay_in_order(files: tuple[str, str]) -> None:
    traces = tuple((name, seed, load_trace(Path(files[1]))) for name, seed in (("a", 0), ("b", 1)))
    job = job_from_profile(load_profile(Path(files[0])), traces[0][2].max_nodes, PlanRequest())
    replay = Replay(job, ("restart", "morph"), traces, Until(kind="hours", amount=2.0), None)
    shares: list[float] = []
    outcomes = replay.run(1, shares.append)
    assert [(one.policy, one.trace) for one in outcomes] == [
        (policy, trace) for policy in ("restart", "morph") for trace in ("a", "b")
    ]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert sum(0.05 < share < 0.45 for share in shares) > 3, "one trace goes on for long"


def test_by_default_the_variants_of_morph_are_left_out() -> None:
    assert set(POLICIES) - set(policies_of("compared")) == {"morph-salvage", "morph-state", "morph-off"}
    assert policies_of("all") == tuple(POLICIES)

import json
import re
from pathlib import Path

import pandas
import pytest
import typer
from typer.testing import CliRunner

from morph.contract.errors import InputError, PlanError, ProfileError
from morph.contract.plan import Plan, load_plan
from morph.words import count_text, time_text
from simulator import plan, plan_table, simulate, synthetic_profile
from simulator.commands.plan import plan_command
from simulator.commands.simulate import simulate_command
from simulator.inputs.synthetic import with_type

app = typer.Typer()
app.command("plan")(plan_command)
app.command("simulate")(simulate_command)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(synthetic_profile(tied=True).model_dump_json())
    return path


def _run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_plan_prints_the_best_shape_and_runners_up_and_writes_the_plan(profile: Path, tmp_path: Path) -> None:
    output = _run("plan", profile, "--gpus", 6, "-o", tmp_path / "plan.json")
    best = plan(synthetic_profile(tied=True), num_gpus=6).best
    assert f"{best.pipeline_depth} x {best.num_replicas}" in output
    assert "2 x 3" in output
    assert re.search(r"no plan trains more than \d+\.\d% faster", output)
    assert load_plan(tmp_path / "plan.json") == best
    assert list(tmp_path.glob("*.partial")) == []


def test_plan_and_simulate_say_where_the_stages_of_a_pipeline_over_two_types_are(tmp_path: Path) -> None:
    path, file = tmp_path / "profile.json", tmp_path / "plan.json"
    large = synthetic_profile(num_sections=6, parameter_bytes=40_000_000, batch_size=16, micro_batch_size=1)
    environment = large.environment.model_copy(update={"device_memory_bytes": 2**30})
    large = with_type(large.model_copy(update={"environment": environment}), "slow", 2.0, 2**30)
    path.write_text(large.model_dump_json())
    planned = _run("plan", path, "--pool", "synthetic=2,slow=4", "-o", file)
    drawn = _run("simulate", path, "--plan", file, "--png", tmp_path / "timeline.png")
    told = ["4 on slow, then 2 on synthetic", "2 on synthetic, then 4 on slow"]
    if load_plan(file).stages[0].node_type == "synthetic":
        told.reverse()
    for output in (planned, drawn):
        assert f"1 pipeline of 6 stages ({told[0]}): 16 micro-batches each" in output
    refused = CliRunner().invoke(app, ["plan", str(path), "--pool", "synthetic=1,slow=1"])
    assert isinstance(refused.exception, PlanError)
    assert "allowed: slow=6, or synthetic=6, or slow=" in str(refused.exception)


def test_plan_prints_json_for_programs(profile: Path) -> None:
    answer = json.loads(_run("plan", profile, "--gpus", 6, "--json"))
    choice = plan(synthetic_profile(tied=True), num_gpus=6)
    assert (Plan.model_validate(answer["best"]), answer["gap"]) == (choice.best, choice.gap)
    assert len(answer["runners_up"]) == 5


def test_simulate_prints_one_shape_and_draws_its_timeline(profile: Path, tmp_path: Path) -> None:
    output = _run("simulate", profile, "-P", 3, "-D", 2, "--png", tmp_path / "timeline.png")
    assert all(words in output for words in ("3 x 2", "filling and draining", "wait for all workers"))
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_simulate_prints_the_same_with_the_reference_engine_within_its_limits(profile: Path, tmp_path: Path) -> None:
    arguments = ("simulate", profile, "-P", 3, "-D", 2, "--gpus-per-node", 2, "--json")
    assert _run(*arguments, "--engine", "reference") == _run(*arguments)
    large = tmp_path / "large.json"
    large.write_text(synthetic_profile(batch_size=50_000, micro_batch_size=1).model_dump_json())
    with pytest.raises(PlanError, match=r"--engine: would play 300000 tasks.*the compiled engine"):
        _run("simulate", large, "-P", 2, "--engine", "reference")


def test_simulate_prints_json_for_programs(profile: Path) -> None:
    answer = json.loads(_run("simulate", profile, "-P", 3, "-D", 2, "--schedule", "gpipe", "--json"))
    assert Plan.model_validate(answer["plan"]).schedule == "gpipe"
    assert sum(answer["breakdown_s"].values()) == pytest.approx(answer["plan"]["expected"]["mini_batch_s"])


def test_simulate_answers_for_a_plan_file_as_plan_did(tmp_path: Path) -> None:
    path, file = tmp_path / "typed.json", tmp_path / "plan.json"
    path.write_text(with_type(synthetic_profile(tied=True), "slow", 2.0).model_dump_json())
    told = _run("plan", path, "--pool", "synthetic=3,slow=2", "-o", file)
    plan = load_plan(file)
    assert len(plan.pipeline_kinds) == 2
    assert set(plan.pool.types) == {"synthetic", "slow"}
    shown = _run("simulate", path, "--plan", file, "--png", tmp_path / "timeline.png")
    for line in told.splitlines()[:5]:
        assert line in shown
    assert (tmp_path / "timeline.png").is_file()
    answer = json.loads(_run("simulate", path, "--plan", file, "--json"))
    assert Plan.model_validate(answer["plan"]) == plan
    slowed = json.loads(_run("simulate", path, "--plan", file, "--slow", f"{len(plan.stages) - 1}:3", "--json"))
    assert slowed["plan"]["expected"]["mini_batch_s"] > 1.5 * plan.expected.mini_batch_s


def test_plan_says_what_goes_between_zones_and_simulate_knows_their_links(profile: Path, tmp_path: Path) -> None:
    file, pool = tmp_path / "plan.json", ("--pool", "@a=2,@b=2", "--price", "0.9")
    links = ("--set", "zone_gbit_per_s=1", "--set", "zone_latency_ms=5")
    told = _run("plan", profile, *pool, *links, "--set", "zone_usd_per_gb=0.02", "-o", file)
    assert "GB of each mini-batch go from one zone to another, $" in told
    shown = json.loads(_run("simulate", profile, "--plan", file, *links, "--json"))
    assert Plan.model_validate(shown["plan"]) == load_plan(file)
    warned = CliRunner().invoke(app, ["plan", str(profile), *pool])
    assert "warning: links between zones were not measured" in warned.stderr
    with pytest.raises(PlanError, match=r"--set zone_gbit_per_s: is out of range \(got -1.0\)"):
        _run("plan", profile, *pool, "--set", "zone_gbit_per_s=-1")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "-P: is missing; allowed: stages of a pipeline, or --plan FILE"),
        (("--plan", "plan.json", "-D", 2), "--plan: cannot be combined with -D: the plan has its own"),
        (("--plan", "plan.json", "--slow", "9:2"), "--slow: the plan has no such worker (got 9)"),
        (("--plan", "plan.json", "--slow", "0/7:2"), "replicas 0 to 2 of this one"),
        (("--plan", "other.json"), "other.json: fingerprint: is of another model (got 'synthetic-5')"),
        (("--plan", "small.json"), "small.json: num_micro_batches: is of another batch (got 8); allowed: 16, for"),
        (("--plan", "typed.json"), "typed.json: stages.node_type: is not a type of this profile (got 'slow')"),
    ],
)
def test_a_plan_that_the_profile_does_not_fit_is_one_line(
    tmp_path: Path, profile: Path, arguments: tuple[object, ...], part: str
) -> None:
    known = synthetic_profile(tied=True)
    for name, found in {
        "plan": simulate(known, num_stages=2, num_replicas=3).plan,
        "other": simulate(synthetic_profile(num_sections=5, tied=True), num_stages=2).plan,
        "small": simulate(synthetic_profile(tied=True, batch_size=32), num_stages=2, micro_batch_size=4).plan,
        "typed": plan(with_type(known, "slow", 2.0), pool={"slow": 2}).best,
    }.items():
        (tmp_path / f"{name}.json").write_text(found.model_dump_json())
    given = [tmp_path / str(one) if str(one).endswith(".json") else one for one in arguments]
    with pytest.raises(PlanError) as caught:
        _run("simulate", profile, *given)
    assert part in str(caught.value)


def test_a_range_is_answered_as_table_csv_and_picture(profile: Path, tmp_path: Path) -> None:
    csv, png = tmp_path / "plans.csv", tmp_path / "plans.png"
    output = _run("plan", profile, "--gpus", "2..5", "--price", 0.9, "--csv", csv, "--png", png)
    table = pandas.read_csv(csv)
    assert table["num_gpus"].tolist() == [2, 3, 4, 5]
    plans = plan_table(synthetic_profile(tied=True), 5, unequal=True)
    assert table["examples_per_s"].tolist() == pytest.approx(
        [plans[gpus].expected.examples_per_s for gpus in range(2, 6)]
    )
    paid = 0.9 * table["num_gpus"] / 3600 / table["examples_per_s"] * 1000
    assert table["usd_per_1000_examples"].tolist() == pytest.approx(paid.tolist())
    assert png.read_bytes().startswith(b"\x89PNG")
    assert f"{plans[5].pipeline_depth} x {plans[5].num_replicas}" in output
    output = " ".join(output.split())
    assert f"all with micro-batches of {plans[5].micro_batch_size}, the same for a whole run" in output
    assert [row["num_gpus"] for row in json.loads(_run("plan", profile, "--gpus", "2..3", "--json"))] == [2, 3]


def test_numbers_of_a_range_that_are_too_few_are_named(profile: Path) -> None:
    assert not re.search(r"\b1 (GPU|worker|node|cut|shape)s\b", _run("plan", profile, "--gpus", 1))
    whole = simulate(synthetic_profile(tied=True), num_stages=1).expected.peak_memory_bytes
    output = _run("plan", profile, "--gpus", "1..4", "--memory-gib", whole / 2 / 2**30)
    assert re.search("1 to [123] GPUs are too few", output)


def test_nodes_are_distinguished_and_leftovers_named(profile: Path, tmp_path: Path) -> None:
    output = _run("plan", profile, "--nodes", "3x1,2x4", "-o", tmp_path / "plan.json")
    best = load_plan(tmp_path / "plan.json")
    assert best.node_sizes == (1, 1, 1, 4, 4)
    assert len(best.placement) == best.num_replicas
    idle = 11 - best.num_workers
    assert (f"{idle} GPU" in output and "idle" in output) if idle else "all 11 GPUs at work" in output
    assert "cross between nodes" in output


def test_what_is_bought_of_nodes_is_shown_with_its_price(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = with_type(synthetic_profile(num_sections=6, batch_size=24, micro_batch_size=1), "t4", 2.0)
    path.write_text(profile.model_dump_json())
    shown = _run("plan", path, "--nodes", "2x4,2x1", "--price", "1:1.2,4:0.9", "--budget", 5)
    assert "1 node of 4 GPUs and 1 node of 1 GPU for $4.8 an hour" in shown
    assert "5 on nodes that are not bought" in shown
    pool = ("--pool", "synthetic=8,t4=3", "--gpus-per-node", "synthetic=4,t4=1", "--price", "synthetic=1,t4=0.2")
    bought = json.loads(_run("plan", path, *pool, "--budget", 4.7, "--json"))
    assert (bought["usd_per_h"], bought["best"]["node_sizes"]) == (pytest.approx(4.6), [4, 1, 1, 1])


def test_other_objectives_show_their_value(profile: Path) -> None:
    cheap = json.loads(_run("plan", profile, "--gpus", 6, "--objective", "dollars", "--price", 0.9, "--json"))
    best = Plan.model_validate(cheap["best"])
    dollars = best.num_workers * 0.9 / 3600 / best.expected.examples_per_s
    assert cheap["value"] == pytest.approx(dollars)
    arguments = (
        "--objective",
        "progress",
        "--set",
        "revocations_per_hour=2",
        "--set",
        "pause_s=5",
        "--set",
        "replacement_s=60",
    )
    steady = json.loads(_run("plan", profile, "--gpus", 6, *arguments, "--json"))
    assert 0 < steady["value"] < Plan.model_validate(steady["best"]).expected.examples_per_s
    assert "progress/s" in _run("plan", profile, "--gpus", 6, *arguments)
    together = json.loads(_run("plan", profile, "--gpus", 6, *arguments, "--set", "revoked_together=3", "--json"))
    assert together["value"] != steady["value"]


def test_simulate_takes_nodes_slow_workers_and_a_late_all_reduce(profile: Path) -> None:
    def seconds(*arguments: object) -> float:
        answer = json.loads(_run("simulate", profile, "-P", 3, "-D", 2, *arguments, "--json"))
        return float(answer["plan"]["expected"]["mini_batch_s"])

    usual = seconds()
    assert seconds("--gpus-per-node", 3) < usual
    assert seconds("--slow", "1/0:2", "--slow", "2:1.2") > 1.2 * usual
    assert seconds("--set", "all_reduce=late") > usual
    assert seconds("--set", "overlap=none") > usual
    assert seconds("--set", "share_links=false") <= usual


@pytest.mark.slow
def test_jitter_is_drawn_from_the_spread_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "jittery.json"
    path.write_text(synthetic_profile(jitter=0.3).model_dump_json())
    answer = json.loads(_run("simulate", path, "-P", 2, "--jitter-seed", 3, "--set", "num_draws=4", "--json"))
    assert len(answer["jitter"]["draws_s"]) == 4
    assert answer["plan"]["expected"]["mini_batch_s"] == pytest.approx(answer["jitter"]["mean_s"])
    assert "4 mini-batches drawn" in _run("simulate", path, "-P", 2, "--jitter-seed", 3, "--set", "num_draws=4")
    assert "20 mini-batches drawn" in _run("plan", path, "--gpus", 2, "--jitter-seed", 3)


def test_simulate_says_what_redundant_computation_pauses_for(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(synthetic_profile().model_dump_json())
    eager, lazy, mixed = (
        ("simulate", path, "-P", 3, "--set", f"redundant_computation={mode}") for mode in ("efeb", "lflb", "eflb")
    )
    answer, slower = json.loads(_run(*eager, "--json")), json.loads(_run(*lazy, "--json"))
    assert 0 < answer["mean_pause_s"] < slower["mean_pause_s"]
    assert answer["plan"]["expected"]["parts_s"]["redundant"] > 0
    assert "a lost worker pauses training for" in _run(*mixed)
    assert "computing for the next stage too" in _run(*mixed)
    assert "pauses" not in _run("simulate", path, "-P", 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan",), "--gpus: is missing"),
        (("plan", "--gpus", "some"), "--gpus: is not a number of GPUs (got 'some')"),
        (("plan", "--gpus", "5..2"), "--gpus: is not a range of GPUs (got '5..2')"),
        (("plan", "--gpus", "0..2"), "--gpus: is not a range of GPUs"),
        (("plan", "--gpus", 4, "--nodes", "4x1"), "--nodes: cannot be combined with --gpus"),
        (("plan", "--nodes", "4x1", "--gpus-per-node", 2), "--nodes: cannot be combined with --gpus-per-node"),
        (("plan", "--nodes", "4"), "--nodes: is not a list of nodes (got '4')"),
        (("plan", "--nodes", "0x4"), "--nodes: is not a list of nodes"),
        (("plan", "--gpus", 4, "--gpus-per-node", 0), "--gpus-per-node: is out of range (got 0)"),
        (("plan", "--gpus", 4, "--gpus-per-node", "two"), "--gpus-per-node: is not a number of GPUs (got 'two')"),
        (("plan", "--gpus", 4, "--gpus-per-node", "t4=2,4"), "--gpus-per-node: is not a number of GPUs"),
        (("plan", "--gpus", 4, "--gpus-per-node", "t4=2"), "numbers by type need a pool"),
        (("plan", "--pool", 4, "--gpus-per-node", "t4=2"), "--gpus-per-node: is not possible for this pool"),
        (("plan", "--gpus", 4, "--budget", 2, "--objective", "progress", "--price", 1), "--budget: cannot be combined"),
        (("plan", "--nodes", "2x2", "--budget", 0.5, "--price", 1), "--budget: is too small for this job (got 0.5)"),
        (
            ("plan", "--gpus", 4, "--gpus-per-node", 2, "--set", "compute_slots=2"),
            "--set compute_slots: cannot be combined with",
        ),
        (("plan", "--gpus", "2..4", "-o", "plan.json"), "--gpus A..B: cannot be combined with -o"),
        (
            ("plan", "--gpus", "2..4", "--objective", "dollars", "--price", 1),
            "cannot be combined with --objective dollars",
        ),
        (("plan", "--gpus", 4, "--csv", "plans.csv"), "--csv: needs --gpus A..B"),
        (("plan", "--gpus", 4, "--png", "plans.png"), "--png: needs --gpus A..B"),
        (("plan", "--gpus", 4, "--set", "num_draws=3"), "--set num_draws: needs --jitter-seed"),
        (("plan", "--gpus", 4, "--set", "pause_s=3"), "--set pause_s: needs --objective progress"),
        (("plan", "--gpus", 4, "--objective", "dollars"), "--price: is missing"),
        (("plan", "--gpus", 4, "--objective", "progress"), "--set revocations_per_hour: is missing"),
        (("plan", "--gpus", 4, "--objective", "dollars", "--price", "cheap"), "--price: is not a price (got 'cheap')"),
        (("plan", "--gpus", 4, "--objective", "dollars", "--price", "4:1"), "--price: does not give a price"),
        (
            ("plan", "--gpus", 4, "--objective", "progress", "--set", "revocations_per_hour=-1"),
            "--set revocations_per_hour: is out of range (got -1.0)",
        ),
        (("plan", "--gpus", 4, "--jitter-seed", 1), "--jitter-seed: the profile has no quantiles"),
        (("simulate", "-P", 2, "--slow", "x"), "--slow: is not a slow worker (got 'x')"),
        (("simulate", "-P", 2, "--slow", "0:0"), "--slow: is not a slow worker"),
        (("simulate", "-P", 2, "--slow", "7:2"), "--slow: the shape has no such worker (got 7)"),
        (("simulate", "-P", 2, "--slow", "0/3:2"), "--slow: the shape has no such worker (got (0, 3))"),
        (("simulate", "-P", 2, "--jitter-seed", 1), "--jitter-seed: the profile has no quantiles"),
        (("simulate", "-P", 2, "--set", "num_draws=3"), "--set num_draws: needs --jitter-seed"),
        (
            ("simulate", "-P", 2, "--schedule", "gpipe", "--set", "window_slope=2"),
            "window_slope: cannot be combined with",
        ),
        (
            ("simulate", "-P", 2, "--set", "compute_slots=2", "--gpus-per-node", 2),
            "--set compute_slots: cannot be combined with",
        ),
        (
            ("simulate", "-P", 2, "--set", "compute_slots=0"),
            "--set compute_slots: is out of range (got 0); allowed: a whole number from 1 to 100000",
        ),
        (("simulate", "-P", 9), "-P: the model cannot be cut so (got 9); allowed: 1 to 8"),
    ],
)
def test_options_that_cannot_be_or_contradict_each_other_are_one_clear_error(
    profile: Path, arguments: tuple[object, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as caught:
        _run(arguments[0], profile, *arguments[1:])
    assert says in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.json"]


def test_the_refusal_of_too_few_gpus_names_the_least_number(profile: Path) -> None:
    enough = simulate(synthetic_profile(tied=True), num_stages=4, window_slope=1, micro_batch_size=1)
    gib = enough.expected.peak_memory_bytes / 2**30
    with pytest.raises(PlanError, match=r"--memory-gib: the job does not fit .* at least 4 GPUs"):
        _run("plan", profile, "--gpus", 3, "--memory-gib", gib, "--m", 1)


@pytest.mark.parametrize("sections", [[], None])
def test_a_profile_without_sections_is_refused(profile: Path, sections: list[object] | None) -> None:
    content = json.loads(profile.read_text())
    content["sections"] = sections
    profile.write_text(json.dumps(content))
    for command in (("plan", "--gpus", 2), ("simulate", "-P", 1)):
        with pytest.raises(ProfileError, match="sections"):
            _run(command[0], profile, *command[1:])


def test_mistakes_are_typed_errors(profile: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--gpus"):
        _run("plan", profile, "--gpus", 0)
    with pytest.raises(ProfileError, match="missing"):
        _run("plan", tmp_path / "missing.json", "--gpus", 2)
    with pytest.raises(InputError, match="cannot be written"):
        _run("plan", profile, "--gpus", 2, "-o", tmp_path / "nowhere" / "plan.json")
    with pytest.raises(InputError, match="cannot be written"):
        _run("simulate", profile, "-P", 1, "--png", tmp_path / "nowhere" / "timeline.png")


def test_numbers_are_shown_with_fitting_units() -> None:
    assert [time_text(value) for value in (12.3456, 0.0123, 1.5e-5, 3e-9)] == ["12.3 s", "12.3 ms", "15 us", "3 ns"]
    assert [count_text(value) for value in (8.3e9, 1.25e6, 999)] == ["8.3 B", "1.25 M", "999"]

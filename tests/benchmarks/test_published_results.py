"""Results of papers, simulated with few seeds, are met about as closely as docs/benchmarks.md says."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.bamboo_redundancy import inferred_latency_s, overhead, simulated, waits
from benchmarks.bamboo_tables import ROWS
from benchmarks.bamboo_tables import job as bert
from benchmarks.bamboo_tables import play as play_row
from benchmarks.printed import pages, stale
from benchmarks.published import questions as published_questions
from benchmarks.published.bamboo import MODELS_OF_TABLE_4, STAGES, Published, bert_layers, resnet_layers
from benchmarks.published.questions import (
    TABLE_3,
    TABLE_7,
    Answer,
    mean_error,
    shipped,
    table_3,
    table_6,
    table_7,
    table_7_estimated,
)
from benchmarks.sailor import GROUPS, main
from benchmarks.spotify_tables import LIGHT, MTTP_S, STEPS, play
from morph.contract.trace import write_trace
from simulator import spot_model
from tests.grids import IS_LONG


def test_a_block_is_stale_if_its_command_prints_something_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = "<!-- printed: {} -->", "<!-- end -->"
    trace, other, absent = (tmp_path / f"{name}.csv" for name in ("trace", "other", "absent"))
    for seed, path in enumerate((trace, other)):
        write_trace(spot_model(4 + seed, losses_per_vm_h=2 + seed).draw(seed, 20_000), path)
    command = f"trace_statistics {trace} {other}"
    kept = f"{begin.format(f'trace_statistics {absent}')}\nas it was\n{end}\n"
    page.write_text(f"Before\n{begin.format(command)}\n{end}\nbetween\n{kept}", encoding="utf-8")
    assert stale(page) == [command]
    assert "VM" not in page.read_text(encoding="utf-8")
    assert stale(page, write=True) == [command]
    written = page.read_text(encoding="utf-8")
    assert written.startswith("Before\n<!-- printed")
    assert "VM" in written
    assert written.endswith(f"{end}\nbetween\n{kept}")
    assert stale(page) == []


@pytest.mark.slow
@pytest.mark.skipif(not IS_LONG, reason="of make test-long")
def test_no_page_has_a_stale_block() -> None:
    assert [command for page in pages() for command in stale(page)] == []


BERT, RESNET = MODELS_OF_TABLE_4


@pytest.mark.parametrize(
    ("layers", "parameters", "flops"),
    [(tuple(bert_layers()), 365e6, 87e9), (tuple(resnet_layers()), 60.2e6, 23.1e9)],
    ids=["BERT-large, its head not tied", "ResNet-152"],
)
def test_the_models_have_as_many_parameters_and_operations_as_are_known(
    layers: tuple, parameters: float, flops: float
) -> None:
    assert sum(layer.parameters for layer in layers) == pytest.approx(parameters, rel=0.01)
    assert sum(layer.flops for layer in layers) == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize(("model", "m", "eflb", "efeb"), [(BERT, 1, 0.119, 0.603), (RESNET, 8, 0.017, 0.526)])
def test_table_4_and_figure_13_are_met_within_some_points(model: Published, m: int, eflb: float, efeb: float) -> None:
    found = simulated(model, m, inferred_latency_s(model, m))
    assert found["off"].expected.examples_per_s == pytest.approx(model.samples_per_s, rel=0.002)
    assert overhead(found, "eflb") == pytest.approx(eflb, abs=0.03)
    assert overhead(found, "efeb") == pytest.approx(efeb, abs=0.09)
    assert found["eflb"].mean_pause_s / found["lflb"].mean_pause_s == pytest.approx(0.65, abs=0.02)


def test_the_first_stages_of_figure_14_wait_longer_than_a_forward_takes() -> None:
    shares = waits(simulated(BERT, 1, inferred_latency_s(BERT, 1))["off"])
    assert len(shares) == STAGES
    assert min(shares[:3]) > 1 > max(shares[3:-1])


@pytest.mark.slow
def test_the_thesis_totals_are_met() -> None:
    for policy, (hours, _) in LIGHT.published.items():
        found = statistics.fmean(one.hours for one in play(LIGHT, policy, STEPS, MTTP_S, 6))
        assert found == pytest.approx(hours, rel=0.02), policy


@pytest.mark.slow
def test_fewer_nodes_and_more_losses_slow_bamboo_down_as_published() -> None:
    job = bert(11.4)
    first, tenth = (
        statistics.fmean(one.examples_per_s for one in play_row(job, row, "bamboo", 2)) for row in (ROWS[0], ROWS[2])
    )
    assert tenth / first == pytest.approx(ROWS[2].throughput / ROWS[0].throughput, rel=0.06)


DOCUMENT = Path(__file__).parents[2] / "docs/reference/published-profiles.md"


@pytest.fixture(scope="module")
def answers() -> tuple[Answer, ...]:
    return table_3(shipped("gpt2-2.5b"))


@pytest.mark.slow
def test_every_published_row_is_answered(answers: tuple[Answer, ...]) -> None:
    assert [(answer.shape, answer.published) for answer in answers] == list(TABLE_3.items())
    assert all(0.3 < answer.ratio < 3 for answer in answers)


def test_no_anchor_is_a_question_and_each_is_a_published_row(answers: tuple[Answer, ...]) -> None:
    assert not any(answer.is_anchor for answer in answers)
    rows = table_7()
    assert [(answer.question[:10], answer.shape) for answer in rows if answer.is_anchor] == [
        ("GPT-2 8.3B", (18, 4)),
        ("GPT-2 2.5B", (9, 7)),
    ]
    assert len(rows) == sum(map(len, TABLE_7.values()))


def test_the_deep_pipeline_loses_as_published(answers: tuple[Answer, ...]) -> None:
    rate = {answer.shape: answer.answered for answer in answers}
    assert rate[18, 2] < 0.9 * min(rate[6, 6], rate[9, 4])
    assert rate[18, 5] < 0.9 * min(rate[6, 16], rate[9, 11])


def test_a_message_longer_than_a_forward_sets_gpipe_back_as_published() -> None:
    first, *predicted = published_questions.table_5_inferred()
    assert (first.is_anchor, first.ratio) == (True, pytest.approx(1.0, abs=0.001))
    assert 1.0 < published_questions.inferred_slowness() < published_questions.MUCH_SLOWER[-1]
    for answer in predicted:
        assert not answer.is_anchor
        assert answer.ratio == pytest.approx(1.0, abs=0.03)


def test_vms_of_four_gpus_reduce_over_shared_links() -> None:
    one, four = published_questions.vm_sizes(shipped("gpt2-2.5b"))
    assert (one.published, four.published) == (1.77, 1.81)
    assert four.answered < one.answered


def test_the_document_has_the_figures_that_are_computed() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for answers in (table_7_estimated(), table_7()):
        mean, worst = mean_error(answers)
        assert f"{mean * 100:.1f} % in the mean and {worst * 100:.1f} % at worst" in text
    rows = table_6()
    for varuna, other in zip(rows[::3], rows[1::3], strict=True):
        figures = (varuna.published, varuna.answered, varuna.ratio, other.published, other.answered, other.ratio)
        cells = " | ".join(f"{value:g}" if at % 3 == 0 else f"{value:.2f}" for at, value in enumerate(figures))
        assert f"| {varuna.question.split(':')[0]}, {varuna.shape[0]}x{varuna.shape[1]} | {cells} |" in text


def made_up_artifact(root: Path) -> None:
    """Make a small checkout of Sailor's artifact: each group has a run of 1F1B over a fast and a slow node."""
    planner, zone = root / "sailor/Planner", "zone"
    link = {"1": {zone: {kind: {"1": [[0.0, 0.0, 0.5], 5e8]} for kind in ("A", "B")}}}  # 0.5 GB/s whatever the size
    sizes = {str(layer): {"act_output_floats": 2.5e6, "params_floats": 1.25e7} for layer in range(2)}
    plan = {
        "zone": zone,
        "pipeline_list": [
            {
                "num_stages": 2,
                "layers_per_stage": [[0], [1]],
                "tmp_per_stage": [[[[["A", 1, zone]], 1], [[["A", 1, zone]], 1]], [[[["B", 1, zone]], 1]] * 2],
                "dp": [2, 2],
            }
        ],
        **{"mbs": 2, "gbs": 40, "real": 2.0, "red_grads": 0.1},
    }
    times = {"A": {"0": [0.01, 0.02, 0.0]}, "B": {"1": [0.03, 0.06, 0.0]}}
    files: dict[str, object] = {
        "sailor/providers/multizone_bandwidths_het.json": {zone: {"A": link, "B": link}},
        "sailor/Planner/llm_info.json": {"M": {"1": sizes}},
        "sailor/Planner/simulations/profiles_tmp.json": {
            "M": {kind: {"2": {"1": layers}} for kind, layers in times.items()}
        },
    }
    for folder, training in GROUPS.values():
        files |= {
            f"sailor/Planner/simulations/configs/training_config_{training}.json": {"model": "M", "num_all_layers": 2},
            f"sailor/Planner/simulations/validation/{folder}/N4/plan_config_N4_D2.json": plan,
            f"sailor/Planner/simulations/validation/{folder}/N8/plan_config_N8_D2.json": plan,
        }
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(value), encoding="utf-8")
    (planner / "simulations/runtime_simulator.py").write_text(
        "class Simulator:\n    def __init__(self, *given): pass\n"
        "    def simulate_iteration_time(self, plan): return 3.0, 0\n",
        encoding="utf-8",
    )


def test_runs_of_sailor_are_simulated_with_the_times_of_each_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_artifact(tmp_path)
    main(tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| N")]
    # ten micro-batches of 0.09 s, two messages of 0.04 s behind the first forward and before the last backward, and a
    # ring of two with 50 MB of each stage, which is two messages of 25 MB
    expected_s = 0.01 + 0.04 + 10 * (0.09 + 2 * 0.04) + 0.04 + 0.02 + 2 * 0.025 / 0.5
    cells = [cell.strip() for cell in lines[0].split("|")]
    assert cells[2:6] == ["2x2, 2, 40", "2.000", "+50.0 %", f"{100 * (expected_s / 2 - 1):+.1f} %"]
    assert len(lines) == 2 * len(GROUPS)
    assert "the same times as N4 D2" in lines[1]
    main(tmp_path, summary=True)
    *_, last = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in last.split("|")][2:5] == ["1", "50.0 %, +50.0 %", f"{cells[5][1:]}, {cells[5]}"]

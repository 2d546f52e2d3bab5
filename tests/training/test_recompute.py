"""Plans without recompute: planned, simulated, and with the same bytes when run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from morph.cli.main import app
from morph.contract.errors import PlanError
from simulator import plan, simulate, synthetic_profile
from tests.training.shapes import ShapesCrew, make_plan

PROFILE = synthetic_profile(num_sections=8, batch_size=64, micro_batch_sizes=(1, 2, 4))


@pytest.mark.parametrize("schedule", ["varuna", "gpipe", "1f1b"])
def test_no_stage_recomputes_when_it_is_not_wanted(schedule: str) -> None:
    found = simulate(PROFILE, num_stages=4, num_replicas=2, micro_batch_size=2, schedule=schedule, recompute=False)  # type: ignore[arg-type]
    assert not any(stage.recompute for stage in found.plan.stages)
    assert not any("R" in order for orders in found.plan.orders.values() for order in orders)
    assert found.expected.parts_s["recompute"] == 0
    usual = simulate(PROFILE, num_stages=4, num_replicas=2, micro_batch_size=2, schedule=schedule)  # type: ignore[arg-type]
    assert any(stage.recompute for stage in usual.plan.stages)
    assert found.expected.mini_batch_s < usual.expected.mini_batch_s
    assert found.expected.lower_bound_s <= found.expected.mini_batch_s


def test_without_recompute_a_stage_holds_the_activations_of_its_whole_window() -> None:
    held = {"parameter_bytes": 0, "optimizer_bytes": 0, "gradient_bytes": 0, "activation_bytes_per_sample": 1000}
    section = PROFILE.sections[0].model_copy(update={**held, "input_bytes_per_sample": 10})
    sections = tuple(section.model_copy(update={"index": index}) for index in range(8))
    profile = PROFILE.model_copy(update={"sections": sections, "units": ()})
    shape = {"num_stages": 4, "micro_batch_size": 2, "schedule": "1f1b", "window_slope": 1}
    with_it = simulate(profile, **shape).costs.memory_bytes  # type: ignore[arg-type]
    without = simulate(profile, **shape, recompute=False).costs.memory_bytes  # type: ignore[arg-type]
    windows = (4, 3, 2, 1)
    per_micro_batch = 2 * 2 * 1000
    batches = (2 * 10, 0, 0, 0)  # the first section's input
    expected = [(window - 1) * (per_micro_batch + batch) for window, batch in zip(windows, batches, strict=True)]
    assert list(without - with_it) == expected


def test_the_planner_takes_a_deeper_pipeline_or_says_what_memory_it_needs() -> None:
    large = tuple(section.model_copy(update={"activation_bytes_per_sample": 10**8}) for section in PROFILE.sections)
    profile = PROFILE.model_copy(update={"sections": large})
    roomy = plan(profile, num_gpus=8, micro_batch_size=2, recompute=False).best
    assert not any(stage.recompute for stage in roomy.stages)
    shape = {"num_gpus": 8, "micro_batch_size": 2, "schedule": "varuna"}
    needed = plan(profile, **shape, pipeline_depth=8, recompute=True).best.expected.peak_memory_bytes  # type: ignore[arg-type]
    assert plan(profile, **shape, memory_bytes=needed).best.stages[0].recompute  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="does not fit in the memory"):
        plan(profile, **shape, memory_bytes=needed, recompute=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("command", [("plan", "--gpus", "4"), ("simulate", "-P", "4")])
def test_the_commands_can_switch_it_off(command: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.model_dump_json(), encoding="utf-8")
    name, *rest = command
    result = CliRunner().invoke(app, [name, str(path), *rest, "--m", "2", "--json", "--no-recompute"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    found = answer["best"] if name == "plan" else answer["plan"]
    assert not any(stage["recompute"] for stage in found["stages"])


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", ["plain", "bf16"])
def test_recomputing_or_not_gives_the_same_bytes(job: str, crew: ShapesCrew, tmp_path: Path) -> None:
    digests = [
        crew.train(job, [(make_plan("4x1", "", recompute=recompute), 4)], tmp_path / str(recompute)).digests
        for recompute in (True, False)
    ]
    by_section = crew.train(job, [(make_plan("2x1", "", live_sections=1), 4)], tmp_path / "by section")
    assert digests[0] == digests[1] == by_section.digests
    assert any(stage.recompute for stage in make_plan("4x1", "").stages)

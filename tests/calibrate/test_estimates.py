"""Profiles made from data sheets: what is counted, what it takes, and that plans say that nobody measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

from calibrate.computing.optimizer import measure_units
from calibrate.computing.sections import measure_benches
from calibrate.computing.subject import load_subject
from calibrate.estimating.data_sheets import DATA_SHEETS, Reached, sheet_of
from calibrate.estimating.estimate import estimate_profile
from calibrate.estimating.roofline import Operation, counted, total_s
from calibrate.timing.clocks import CpuClock
from calibrate.timing.samples import Sampling
from morph.cli.main import app
from morph.contract.errors import ConfigError, JobError, PlanError
from morph.contract.profile import Profile, load_profile, write_profile

ROOT = Path(__file__).parents[2]
TINY = f"{ROOT / 'configs/jobs/tiny_gpt.py'}:job"
SHEET = replace(
    DATA_SHEETS["v100"], flops_per_s={"float32": 10e12, "float16": 100e12}, memory_bytes_per_s=1e12, device="a GPU"
)
ALL = Reached(compute=0.5, memory=0.8, links=1.0, network=1.0)


@pytest.fixture(scope="module")
def tiny() -> Profile:
    return estimate_profile(TINY, ["h100", "t4"], reached=ALL, gbit_per_s=8.0)


def test_an_operation_takes_as_long_as_the_slower_of_arithmetic_and_memory() -> None:
    for operation, seconds in (
        (Operation(num_bytes=8_000, num_flops=10**10, dtype="float16"), 200e-6),  # 1e10 / (0.5 * 100e12)
        (Operation(num_bytes=8_000, num_flops=10**10, dtype="float32"), 2e-3),
        (Operation(num_bytes=8_000, num_flops=10**10, dtype="tf32"), 2e-3),  # this device has none
        (Operation(num_bytes=8 * 10**8, num_flops=10**10, dtype="float16"), 1e-3),  # 8e8 / (0.8 * 1e12)
        (Operation(num_bytes=100), 5e-6),  # the launch
    ):
        assert operation.time_s(SHEET, ALL) == pytest.approx(seconds), operation
        assert total_s([operation] * 3, SHEET, ALL) == pytest.approx(3 * seconds)


def test_an_h100_uses_tf32_only_where_the_job_allows_it() -> None:
    work, peaks = Operation(0, 10**12, "tf32"), DATA_SHEETS["h100"].flops_per_s
    assert work.time_s(sheet_of("H100"), Reached(compute=1.0)) == pytest.approx(1e12 / 494.7e12)
    assert replace(work, dtype="float32").time_s(sheet_of("h100"), Reached(compute=1.0)) == pytest.approx(
        1e12 / 66.9e12
    )
    rows = torch.ones(4, 4)
    for setting, dtype in (("high", "tf32"), ("highest", "float32")):
        torch.set_float32_matmul_precision(setting)
        with counted() as operations:
            rows @ rows
        assert operations[0].dtype == dtype
    assert peaks["tf32"] > peaks["float32"]


def test_products_are_counted_as_arithmetic_and_all_else_as_bytes() -> None:
    rows, weight = torch.ones(6, 32, requires_grad=True), torch.ones(16, 32, requires_grad=True)
    with counted() as forward:
        result = functional.linear(rows, weight)
    assert [(op.num_flops, op.num_bytes) for op in forward] == [(2 * 6 * 16 * 32, 4 * (6 * 32 + 16 * 32 + 6 * 16))]
    with counted() as backward:
        torch.autograd.grad(result, [rows, weight], torch.ones_like(result))
    assert sum(op.num_flops for op in backward) == 2 * 2 * 6 * 16 * 32
    with counted() as views:
        result.detach().view(2, 3, 16).transpose(0, 1)[0]
    assert views == []
    with counted() as other:
        result.detach().relu()
        functional.embedding(torch.tensor([1, 2]), torch.ones(1000, 8))
        torch.ones(1).expand(1000).abs()
    # 96 numbers read and written; 2 rows of 8 read and written; one number read, and 1,000 written
    assert [op.num_bytes for op in other if op.num_bytes not in (4, 32_000)] == [2 * 4 * 96, 2 * 4 * 16, 4 * 1001]


def test_dropout_makes_no_matrix_of_attention() -> None:
    query = torch.ones(2, 4, 64, 8, requires_grad=True)
    with counted() as operations:
        made = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.1, is_causal=True)
    (kernel,) = (op for op in operations if op.num_flops)
    assert kernel.num_flops == 2 * 2 * (2 * 4 * 64 * 64 * 8)
    assert made.shape == query.shape
    assert all(op.num_bytes < 4 * 2 * 4 * 64 * 64 for op in operations)


def test_memory_and_sections_are_those_that_calibration_finds_on_a_cpu(tiny: Profile) -> None:
    subject = load_subject(TINY, torch.device("cpu"))
    model = subject.cut(2)
    sampling = Sampling(budget_s=0.0, most=5)
    kinds = measure_benches(subject.benches(model), 2, CpuClock(), sampling)
    units = measure_units(subject, model, sampling)
    assert tiny.job.fingerprint == model.fingerprint
    assert tiny.job.num_parameters == sum(p.numel() for p in subject.loaded.initial.values() if p.is_floating_point())
    for section, profiled in zip(model.sections, tiny.sections, strict=True):
        measured = kinds[section.signature]
        assert profiled.input_bytes_per_sample == measured.input_bytes_per_sample
        assert profiled.activation_bytes_per_sample == measured.activation_bytes_per_sample
        own = [units[unit.id] for unit in model.units if section.index in unit.sections]
        assert profiled.optimizer_bytes == sum(unit.optimizer_bytes for unit in own)
        assert profiled.reduced_bytes == sum(unit.reduced_bytes for unit in own)
        # on a CPU a gradient is converted before it is added to its sum
        assert 0.8 * measured.peak_bytes <= profiled.peak_bytes[2] <= measured.peak_bytes


def test_each_device_has_its_own_times_links_and_memory(tiny: Profile) -> None:
    (t4,) = tiny.node_types
    assert tiny.environment.device_memory_bytes == 81559 << 20
    assert t4.environment.device_memory_bytes == 15360 << 20
    assert tiny.intra_node.activation[1].time.median_s == pytest.approx(10e-6 + 2**30 / 450e9)
    assert t4.intra_node.activation[1].time.median_s == pytest.approx(10e-6 + 2**30 / 15.75e9)
    assert tiny.inter_node == t4.inter_node
    assert tiny.inter_node.gradient[1].time.median_s == pytest.approx(20e-6 + 2**30 / 1e9)
    slower = [
        there[2].median_s >= own.forward[2].median_s for there, own in zip(t4.forward, tiny.sections, strict=True)
    ]
    assert all(slower)


def test_a_device_without_the_jobs_precision_is_refused() -> None:
    with pytest.raises(JobError, match=r"T4.* has no matrix products in bfloat16 .*allowed: float32, float16"):
        estimate_profile(f"{Path(__file__).with_name('bf16_job.py')}:job", ["t4"])


def test_what_is_not_known_is_named_with_what_is() -> None:
    with pytest.raises(ConfigError, match=r"--device: has no data sheet \(got 'b900'\); allowed: a100, a100-40, gh200"):
        sheet_of("b900")
    assert Reached.parse("compute=0.5, memory=1") == Reached(compute=0.5, memory=1.0)
    for wrong in ("compute=0", "speed=0.5", "memory=high", "links=1.5", "compute", "network=1e-9"):
        with pytest.raises(ConfigError, match="--reach: is not a share that is reached"):
            Reached.parse(wrong)
    with pytest.raises(
        PlanError, match=r"--gbit-per-s: is out of range \(got 1e-09\); allowed: a number from 0\.01 to"
    ):
        estimate_profile(TINY, ["h100"], gbit_per_s=1e-9)


def test_whoever_shows_estimated_times_says_so(tiny: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(tiny, path)
    assert load_profile(path) == tiny
    for command, warned in (
        (("plan", path, "--gpus", "4"), ["this profile"]),
        (("plan", path, "--gpus", "2..4"), ["this profile"]),
        (("plan", path, "--pool", "h100=2,t4=2"), ["h100", "t4"]),
        (("plan", path, "--gpus", "2", "--node-type", "t4"), ["this profile"]),
        (("simulate", path, "-P", "2", "-D", "1"), ["this profile"]),
    ):
        answer = CliRunner().invoke(app, list(map(str, command)))
        assert answer.exit_code == 0, answer.output
        for name in warned:
            assert (
                f"warning: the times of {name} were not measured, but estimated: from the data sheet" in answer.stderr
            )
    shown = CliRunner().invoke(app, ["profile", "show", str(path)]).stdout
    assert "NOT MEASURED" in shown
    assert "(estimated)" in shown


def test_a_job_is_estimated_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    arguments = ["profile", "estimate", TINY, "--device", "v100", "--device", "t4", "-o", str(path)]
    made = CliRunner().invoke(app, [*arguments, "--reach", "compute=0.5"])
    assert made.exit_code == 0, made.output
    assert "the times of v100 were not measured, but estimated" in made.stdout
    assert "50% of its peak" in load_profile(path).environment.estimated
    refused = CliRunner().invoke(app, ["profile", "estimate", TINY, "--device", "cpu"])
    assert refused.exit_code == 2
    assert "--device: has no data sheet (got 'cpu')" in refused.stderr

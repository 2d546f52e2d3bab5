from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from morph.cli.main import app
from morph.cutting import cut, export_job
from morph.cutting.cuts.report import CutReport, report_cuts
from morph.jobs.job import load_job
from morph.words import kind_name, size_text

ROOT = Path(__file__).parents[2]
TINY_GPT = f"{ROOT}/configs/jobs/tiny_gpt.py:job"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["cut", *arguments], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def report() -> CutReport:
    exported = export_job(load_job(TINY_GPT))
    return report_cuts(exported, cut(exported, num_sections=6, micro_batch_size=2))


@pytest.mark.slow
def test_json_holds_everything_that_was_found() -> None:
    result = run(TINY_GPT, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert len(found["sections"]) == 6
    assert [entry["before_section"] for entry in found["cuts"]] == [1, 2, 3, 4, 5]
    assert found["tied_units"] == [["s0+s5", ["tokens.weight"]]]
    assert found["num_parameters"] == 39_712
    assert found["not_recorded"] is None


@pytest.mark.slow
def test_each_cut_names_its_module_and_line(report: CutReport) -> None:
    lines = (ROOT / "configs/jobs/tiny_gpt.py").read_text().splitlines()
    for entry in report.cuts:
        assert entry.module.startswith("blocks.")
        file, number = entry.source.rsplit(":", 1)
        assert file.endswith("configs/jobs/tiny_gpt.py")
        assert "norm" in lines[int(number) - 1]


def test_shares_add_up_and_bytes_are_for_one_sample(report: CutReport) -> None:
    assert sum(section.compute_share for section in report.sections) == pytest.approx(1.0)
    for entry in report.cuts:
        assert entry.share_before + entry.share_after == pytest.approx(1.0)
        assert entry.bytes_per_sample == 16 * 32 * 4
        assert [shape for _, shape, _ in entry.tensors] == [(2, 16, 32)]
    for before, after in itertools.pairwise(report.cuts):
        assert before.share_before < after.share_before


def test_equal_sections_are_of_one_kind_and_entries_are_named(report: CutReport) -> None:
    kinds = [section.kind for section in report.sections]
    assert kinds[1] == kinds[3]
    assert kinds[2] == kinds[4]
    assert len(set(kinds)) == 4
    assert [section.batch_keys for section in report.sections] == [("tokens",), (), (), (), (), ("targets",)]
    assert report.sections[0].num_replicated > 0


def test_each_chosen_cut_lies_on_the_curve(report: CutReport) -> None:
    for entry in report.cuts:
        assert any(
            share == pytest.approx(entry.share_before) and size == entry.bytes_per_sample
            for share, size in report.curve
        )


@pytest.mark.slow
def test_the_tables_say_where_and_what(tmp_path: Path) -> None:
    result = run(TINY_GPT, "-k", "3", "--m", "4", "--png", str(tmp_path / "cuts.png"))
    assert result.exit_code == 0
    assert "3 sections, 39,712 parameters" in result.stdout
    assert "tied weights: s0+s2 (tokens.weight)" in result.stdout
    assert "each worker creates only those of its own sections" in result.stdout
    assert (tmp_path / "cuts.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    result = run(str(tmp_path / "nothing.py:job"), "--png", str(tmp_path / "none" / "cuts.png"))
    assert result.exit_code == 2
    assert "folder does not exist" in result.stderr


def test_kinds_have_names_and_sizes_have_units() -> None:
    assert [kind_name(number) for number in (0, 25, 26, 53)] == ["A", "Z", "A1", "B2"]
    assert [size_text(number) for number in (5, 20_000, 3_000_000, 2.5e9)] == ["5 B", "20 kB", "3 MB", "2.5 GB"]

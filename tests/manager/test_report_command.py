"""``morph report`` and ``morph events`` on the journal of a run with losses."""

from __future__ import annotations

import errno
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from simulated_cluster import Faults, JournalledCluster
from typer.testing import CliRunner

from manager.accounting.account import Account, TimeUse
from manager.accounting.spent import NOTHING, Prices
from manager.dashboard.server import PageAddress
from manager.report.journal_reader import read_report
from manager.report.page import report_page
from manager.report.picture import comparison_figure, training_figure
from manager.report.steps import Steps
from manager.report.summary import summarise
from manager.run_dir import JOURNAL, PAGE, RunFacts
from morph.cli.main import app

FACTS = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=6)


class Page(HTMLParser):
    """Collects a page's text by table cell, and every address in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    cluster = JournalledCluster(0, directory, Faults(deaths_after_s=((6.0, 1),)), expected_nodes=6)
    assert cluster.run(6).outcome == "finished"
    cluster.journal.close()
    (directory / "run.json").write_text(FACTS.model_dump_json())
    assert (directory / JOURNAL).exists()
    return directory


def test_the_page_needs_nothing_from_outside_and_its_parts_add_up(run_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(run_dir), "-o", str(output), "--price", "3.6"])
    assert done.exit_code == 0, done.output
    text = output.read_text()
    page = Page(text)
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.search(r"https?://", text)
    assert "<script" not in text
    rows = {row[1]: row for row in page.rows if len(row) == 6}
    assert {*(part.words for part in TimeUse), "all"} <= set(rows)
    seconds = [float(rows[part.words][3]) for part in TimeUse]
    assert sum(seconds) == pytest.approx(float(rows["all"][3]), abs=0.5)
    assert float(rows["all"][5]) == pytest.approx(read_report(run_dir).account.total_s / 1000, rel=1e-3)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_the_page_shows_metrics_learning_rate_and_evaluations(run_dir: Path, tmp_path: Path) -> None:
    report = read_report(run_dir)
    text = report_page(report)
    page = Page(text)
    facts = {row[0]: row[1] for row in page.rows if len(row) == 2}
    assert facts["right"] == "0.25 at step 0, 0.25 at step 11"
    assert facts["learning rate"] == "0.001 at step 0, 8.333e-05 to 0.001 at step 11"
    assert facts["newest evaluation"] == "loss 0.2500, right 0.5 at version 8"
    assert ["version", "loss", "right"] in page.rows
    assert ["4", "0.5000", "0.5000"] in page.rows
    assert ["8", "0.2500", "0.5000"] in page.rows
    assert len(page.addresses) == 2  # the charts of the run, and of learning rate and metrics
    figure = training_figure(report)
    assert figure is not None
    by_time, by_step = figure.axes[::2], figure.axes[1::2]
    assert [panel.get_title(loc="left") for panel in by_time] == ["loss", "learning rate", "right"]
    losses, rates, metric = ([list(line.get_ydata()) for line in panel.get_lines()] for panel in by_time)
    assert losses == [[1 / (1 + step) for step in range(12)], [0.5, 0.25]]
    assert rates == [[0.001 / (1 + step) for step in range(12)], [0.001] * 12]
    assert metric == [[0.25] * 12, [0.5, 0.5]]
    assert [list(line.get_xdata()) for line in by_step[2].get_lines()] == [list(range(12)), [4, 8]]
    best = training_figure(report.model_copy(update={"best_version": 8}))
    assert best is not None
    marked = best.axes[-1].get_lines()[-1]
    assert (marked.get_label(), list(marked.get_xdata()), marked.get_clip_on()) == ("best version", [8], False)
    legend = best.axes[-1].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "of each step",
        "evaluation",
        "best version",
        "VMs were lost",
    ]
    (loss,) = report.morphs
    assert [[span.get_x() for span in panel.patches] for panel in best.axes[:2]] == [
        [loss.began_s - report.start_s],
        [loss.version],
    ]
    drawn = FigureCanvasAgg(best).get_renderer()
    best.draw(drawn)
    for panel in best.axes:
        known = panel.get_legend()
        if known is not None:
            assert known.get_window_extent(drawn).y0 >= panel.get_window_extent(drawn).y1 - 5, "it hides no point"
    bare = report.model_copy(
        update={
            "evaluations": (),
            "steps": Steps(),
        }
    )
    assert training_figure(bare) is None
    assert "learning rate" not in report_page(bare).lower()


def test_without_a_price_each_vm_costs_what_its_grant_said(tmp_path: Path) -> None:
    cluster = JournalledCluster(3, tmp_path, Faults(deaths_after_s=((6.0, 1),)), expected_nodes=5, target_nodes=5)
    assert cluster.run(1).outcome == "finished"
    cluster.journal.close()
    (tmp_path / "run.json").write_text(FACTS.model_dump_json())
    output = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(output), "--on-demand-price", "3"])
    assert done.exit_code == 0, done.output
    report = read_report(tmp_path)
    bill = report.account.bill()
    assert bill is not None
    assert sum(bill.parts.values()) == bill.total > 0
    named = {*(part.words for part in TimeUse), "all"}
    rows = {row[1]: row for row in Page(output.read_text()).rows if len(row) == 6 and row[1] in named}
    told = {name: float(row[5]) for name, row in rows.items()}
    assert told.pop("all") == pytest.approx(bill.total_usd, abs=1e-4)
    assert told == {part.words: pytest.approx(bill.part_usd(part), abs=1e-4) for part in TimeUse}
    assert f"dollars: {bill.total_usd:.4f}: " in summarise(report)


def test_names_from_the_job_are_text_and_never_markup(run_dir: Path) -> None:
    report = read_report(run_dir).model_copy(update={"job": "<script>alert(1)</script>"})
    page = report_page(report, Prices(paid_usd_per_h=0.9, on_demand_usd_per_h=3.0))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "3.33 times as much" in page


def test_several_runs_are_shown_side_by_side(run_dir: Path, tmp_path: Path) -> None:
    other, output = tmp_path / "other", tmp_path / "page.html"
    shutil.copytree(run_dir, other)
    done = CliRunner().invoke(app, ["report", str(run_dir), str(other), "-o", str(output), "--price", "3.6"])
    assert done.exit_code == 0, done.output
    page, report = Page(output.read_text()), read_report(run_dir)
    names, first, second = page.rows[:3]
    assert [first[0], second[0]] == [run_dir.name, "other"]
    told = dict(zip(names, first, strict=True))
    assert (told["steps"], told["loss"]) == ("12 of 12", f"{report.last_loss[1]:.4f}" if report.last_loss else "")
    assert float(told["dollars"]) == pytest.approx(report.account.total_s / 1000, abs=1e-3)
    figure = comparison_figure({"a": report, "b": report}, Prices(paid_usd_per_h=3.6, for_all=True))
    by_step, _, by_dollars = figure.axes[:3]
    for line in by_step.get_lines():
        assert list(line.get_xdata()) == list(range(1, 13))
        assert list(line.get_ydata()) == [1 / (1 + step) for step in range(12)]
    assert [mark.get_offsets().tolist()[0][0] for mark in by_step.collections] == [report.morphs[0].version + 1] * 2
    spent = list(by_dollars.get_lines()[0].get_xdata())
    assert spent == sorted(spent)
    assert 0 < spent[-1] <= float(told["dollars"]) + 1e-3
    assert len(comparison_figure({"a": report}).axes) == 4, "no dollars are drawn without a price"


def test_events_for_tensorboard_without_tensorboard_name_the_extra(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    done = CliRunner().invoke(app, ["report", str(run_dir), "--tensorboard", str(tmp_path / "logs")])
    assert done.exit_code == 2
    assert "--tensorboard" in done.output
    assert "pip install -e '.[tensorboard]'" in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_did_nothing_yet_has_a_page(run_dir: Path) -> None:
    empty = Account(parts=dict.fromkeys(TimeUse, NOTHING), total=NOTHING)
    report = read_report(run_dir).model_copy(
        update={"account": empty, "shapes": (), "morphs": (), "steps": Steps(), "vms": ()}
    )
    assert "0.0" in report_page(report, Prices(paid_usd_per_h=0.9))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--on-demand-price", "3"], "--price: is not given"),
        (["--price", "nan"], "--price: must be"),
        (["-o", "/nowhere/page.html"], "/nowhere"),
    ],
)
def test_errors_are_reported_in_one_line(run_dir: Path, options: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["report", str(run_dir), *options])
    assert done.exit_code == 2
    assert told in done.output
    assert len(done.output.splitlines()) == 1


def test_events_are_printed_with_their_reasons_oldest_first(run_dir: Path) -> None:
    done = CliRunner().invoke(app, ["events", str(run_dir), "--json", "--verbose"])
    assert done.exit_code == 0, done.output
    told = [json.loads(line) for line in done.output.splitlines()]
    assert [entry["sequence"] for entry in told] == sorted(entry["sequence"] for entry in told)
    codes = [entry["code"] for entry in told]
    assert codes[0] == "session"
    assert codes[-1] == "finished"
    assert "vm_killed" in codes
    assert "step_started" not in codes
    assert codes.count("formed") >= 2
    every = CliRunner().invoke(app, ["events", str(run_dir), "--all", "--json"]).output.splitlines()
    assert len(every) > len(told)
    few = CliRunner().invoke(app, ["events", str(run_dir), "--last", "3", "--json", "--verbose"]).output.splitlines()
    assert few == done.output.splitlines()[-3:]


def test_following_a_run_without_a_manager_ends(run_dir: Path) -> None:
    followed = CliRunner().invoke(app, ["events", str(run_dir), "--follow"])
    assert followed.exit_code == 0
    assert followed.output == CliRunner().invoke(app, ["events", str(run_dir)]).output


def test_a_report_without_room_is_refused_and_leaves_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(_path: Path, _target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)  # when all of it is written beside its final place
    result = CliRunner().invoke(app, ["report", str(run_dir), "-o", str(tmp_path / "report.html")])
    assert result.exit_code == 2
    assert result.stderr == f"error: {tmp_path / 'report.html'}: cannot be written: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


def test_every_decided_step_is_written_as_a_table(run_dir: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["status", str(run_dir), "--csv", str(tmp_path / "steps.csv")])
    assert (done.exit_code, done.stderr) == (0, f"written: {tmp_path / 'steps.csv'}\n")
    table, steps = pd.read_csv(tmp_path / "steps.csv"), read_report(run_dir).steps
    assert table["step"].tolist() == [record.step for record in steps]
    assert table["loss"].tolist() == [record.loss for record in steps]
    assert not table["redone"].any()


@pytest.mark.parametrize(
    ("shortened", "how"),
    [
        (False, "finished (all 12 steps are done and saved)"),
        (True, "unmanaged (no process manages it; the last entry"),
    ],
)
def test_the_page_of_a_run_without_a_manager_says_how_it_ended_and_names_the_report(
    run_dir: Path, tmp_path: Path, shortened: bool, how: str
) -> None:
    directory = run_dir
    if shortened:  # as a killed manager leaves it, with the address of its page
        directory = tmp_path / "killed"
        directory.mkdir()
        (directory / "run.json").write_text(FACTS.model_dump_json())
        (directory / PAGE).write_text(PageAddress(url="http://127.0.0.1:1/", token="t").model_dump_json())
        cluster = JournalledCluster(0, directory, Faults(), expected_nodes=6)
        cluster.journal.close()
    done = CliRunner().invoke(app, ["page", str(directory)])
    assert done.exit_code != 0
    said = " ".join(done.output.split())
    assert how in said
    assert f"morph report {directory}" in said
    assert "http" not in said

"""A run's report as one self-contained HTML page."""

from __future__ import annotations

import base64
from datetime import timedelta
from itertools import cycle
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from manager.accounting.spent import Prices
from manager.report.picture import PARTS, RUNS, comparison_figure, png_of, run_figure, training_figure
from manager.report.summary import CAME_FROM
from manager.report.values import RunReport, rates_text
from morph.words import counted, duration_text, moment_text

MOST_EVALUATIONS = 100


def report_page(report: RunReport, prices: Prices | None = None) -> str:
    """Return the page."""
    training = training_figure(report)
    return _template("report.html.j2").render(
        report=report,
        account=report.account,
        bill=report.account.bill(prices),
        left=report.remaining(prices),
        on_demand=report.account.on_demand_usd(prices),
        parts=PARTS,
        began=moment_text(report.start_s),
        ended=moment_text(report.end_s),
        duration=str(timedelta(seconds=round(report.end_s - report.start_s))),
        picture=_png(run_figure(report)),
        training=None if training is None else _png(training),
        first=report.first_step,
        last=report.last_step,
        evaluations=report.evaluations[-MOST_EVALUATIONS:],
        rates_text=rates_text,
        came_from=CAME_FROM,
        counted=counted,
    )


def comparison_page(reports: dict[str, RunReport], prices: Prices | None = None) -> str:
    """Return one page with several runs by name, side by side."""
    names = ("state", "steps", "loss", "examples/s", "time", "changes of shape", "longest pause", "dollars")
    rows = []
    for (name, report), colour in zip(reports.items(), cycle(RUNS), strict=False):
        spans = [span for span in report.shapes if span.num_steps]
        seconds = sum((span.measured_mini_batch_s or 0.0) * span.num_steps for span in spans)
        examples = sum(span.batch_size * span.num_steps for span in spans)
        pauses = [morph.pause_ms for morph in report.morphs if morph.pause_ms is not None]
        bill = report.account.bill(prices)
        values = (
            report.outcome,
            f"{report.version} of {report.num_steps}",
            "-" if report.last_loss is None else f"{report.last_loss[1]:.4f}",
            f"{examples / seconds:.1f}" if seconds else "-",
            duration_text(report.end_s - report.start_s),
            str(len(report.morphs)),
            f"{max(pauses) / 1e3:.1f} s" if pauses else "-",
            "-" if bill is None else f"{bill.total_usd:.4f}",
        )
        rows.append((name, colour, values))
    picture = _png(comparison_figure(reports, prices))
    return _template("runs.html.j2").render(names=names, rows=rows, picture=picture)


def _template(name: str) -> Template:
    pages = Environment(loader=PackageLoader("manager.report", "pages"), autoescape=True, undefined=StrictUndefined)
    return pages.get_template(name)


def _png(figure: Any) -> str:
    return base64.b64encode(png_of(figure)).decode("ascii")

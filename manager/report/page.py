"""A run's report as one self-contained HTML page."""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from manager.accounting.spent import Prices
from manager.report.picture import PARTS, png_of, run_figure, training_figure
from manager.report.summary import CAME_FROM
from manager.report.values import RunReport, rates_text
from morph.words import moment_text

MOST_EVALUATIONS = 100


def report_page(report: RunReport, prices: Prices | None = None) -> str:
    """Return the page."""
    training = training_figure(report)
    pages = Environment(loader=PackageLoader("manager.report", "pages"), autoescape=True, undefined=StrictUndefined)
    return pages.get_template("report.html.j2").render(
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
    )


def _png(figure: Any) -> str:
    return base64.b64encode(png_of(figure)).decode("ascii")

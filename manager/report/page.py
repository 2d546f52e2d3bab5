"""A run's report as one HTML page that needs nothing from outside."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from manager.accounting.account import Part
from manager.accounting.spent import Prices
from manager.report.picture import png_of, run_figure, training_figure
from manager.report.values import RunReport, rates_text

MOST_EVALUATIONS = 100
PARTS = {
    Part.COMPUTE: ("#2f6db3", "forward, recompute and backward of steps that count"),
    Part.BUBBLE: ("#9cc3e6", "the rest of those steps: messages, reductions, the manager's round"),
    Part.LOST: ("#c8372d", "steps given up or lost, attempts that overflowed"),
    Part.MORPH: ("#e08a1e", "forming another shape"),
    Part.CHECKPOINT: ("#6a4c9c", "the last commit and its files"),
    Part.WAITING: ("#cfd6dd", "ready while no shape is formed"),
    Part.WARMING: ("#b2df8a", "until the worker is ready"),
    Part.SPARE: ("#7a828c", "ready without a place"),
    Part.UNMANAGED: ("#4d3b2f", "after their manager was killed"),
}
"""Colour and meaning."""


def report_page(report: RunReport, prices: Prices | None = None) -> str:
    """Return the page."""
    training = training_figure(report)
    pages = Environment(loader=PackageLoader("manager.report", "pages"), autoescape=True, undefined=StrictUndefined)
    return pages.get_template("report.html.j2").render(
        report=report,
        account=report.account,
        bill=report.account.bill(prices),
        on_demand=report.account.on_demand_usd(prices),
        parts=PARTS,
        began=_clock(report.start_s),
        ended=_clock(report.end_s),
        duration=str(timedelta(seconds=round(report.end_s - report.start_s))),
        picture=_png(run_figure(report)),
        training=None if training is None else _png(training),
        steps=[record for record in report.steps if not record.redone_later],
        evaluations=report.evaluations[-MOST_EVALUATIONS:],
        rates_text=rates_text,
    )


def _png(figure: Any) -> str:
    return base64.b64encode(png_of(figure)).decode("ascii")


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")

"""A run's report as one HTML page that needs nothing from outside."""

from __future__ import annotations

import base64
import io
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from manager.report.account import Part

if TYPE_CHECKING:
    from manager.report.account import Account, Bill
    from manager.report.prices import Prices
    from manager.report.values import MorphRecord, RunReport, ShapeSpan

COLOURS = {
    Part.COMPUTE: "#2f6db3",
    Part.BUBBLE: "#9cc3e6",
    Part.LOST: "#c8372d",
    Part.MORPH: "#e08a1e",
    Part.CHECKPOINT: "#6a4c9c",
    Part.WAITING: "#cfd6dd",
    Part.WARMING: "#b2df8a",
    Part.SPARE: "#7a828c",
    Part.UNMANAGED: "#4d3b2f",
}
MEANINGS = {
    Part.COMPUTE: "forward, recompute and backward of steps that count",
    Part.BUBBLE: "the rest of those steps: messages, reductions, the manager's round",
    Part.LOST: "steps given up or lost, attempts that overflowed",
    Part.MORPH: "forming another shape",
    Part.CHECKPOINT: "the last commit and its files",
    Part.WAITING: "ready while no shape is formed",
    Part.WARMING: "until the worker is ready",
    Part.SPARE: "ready without a place",
    Part.UNMANAGED: "after their manager was killed",
}


def report_page(report: RunReport, prices: Prices | None = None) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    bill = report.account.bill(prices)
    pages = Environment(loader=PackageLoader("morph.cli", "pages"), autoescape=True, undefined=StrictUndefined)
    return pages.get_template("report.html.j2").render(
        report=report,
        began=_clock(report.start_s),
        ended=_clock(report.end_s),
        duration=str(timedelta(seconds=round(report.end_s - report.start_s))),
        facts=_facts(report),
        picture=_picture(report),
        parts=[_part(report.account, part, bill) for part in Part],
        total_s=report.account.total_s,
        costs=_costs(report.account, bill, prices) if bill else None,
        shapes=[_shape(span, report.start_s) for span in report.shapes if span.num_steps],
        morphs=[_morph(morph, report.start_s) for morph in report.morphs],
    )


def _facts(report: RunReport) -> list[tuple[str, str]]:
    saved = "none" if report.checkpoint_version is None else f"version {report.checkpoint_version}"
    facts = [
        ("steps", f"{report.version} of {report.num_steps} decided, {report.steps_redone} redone"),
        ("newest checkpoint", saved),
        (
            "changes of shape",
            f"{len(report.morphs)}, {sum(not morph.planned for morph in report.morphs)} of them forced",
        ),
        ("most VMs at once", str(max((count.num_vms for count in report.vms), default=0))),
    ]
    if report.losses:
        first, last = min(report.losses), max(report.losses)
        facts.append(("loss", f"{report.losses[first]:.4f} at step {first}, {report.losses[last]:.4f} at step {last}"))
    if report.evaluations:
        newest = report.evaluations[-1]
        loss = "not a number" if newest.loss is None else f"{newest.loss:.4f}"
        facts.append(("evaluation", f"{loss} at version {newest.version}"))
    return facts


def _part(account: Account, part: Part, bill: Bill | None) -> dict[str, Any]:
    return {
        "name": part.value,
        "meaning": MEANINGS[part],
        "colour": COLOURS[part],
        "seconds": account.part_s(part),
        "percent": account.share(part) * 100,
        "dollars": bill.part_usd(part) if bill else 0.0,
    }


def _costs(account: Account, bill: Bill, prices: Prices | None) -> dict[str, float | None]:
    spent, on_demand = bill.total_usd, account.on_demand_usd(prices)
    return {"spent": spent, "on_demand": on_demand, "ratio": on_demand / spent if on_demand and spent else None}


def _shape(span: ShapeSpan, start_s: float) -> dict[str, Any]:
    return {
        "name": span.shape,
        "from_s": span.start_s - start_s,
        "steps": span.num_steps,
        "expected_ms": span.expected_mini_batch_s * 1e3,
        "measured_ms": None if span.measured_mini_batch_s is None else span.measured_mini_batch_s * 1e3,
        "speed": span.examples_per_s,
    }


def _morph(morph: MorphRecord, start_s: float) -> dict[str, Any]:
    return {
        "planned": morph.planned,
        "at_s": morph.detected_at_s - start_s,
        "before": morph.from_shape,
        "after": morph.to_shape or "none",
        "pause_ms": morph.pause_ms,
        "redone": morph.steps_redone,
        "sources": ", ".join(f"{total.count} {kind}" for kind, total in morph.sources.items()) or "nothing moved",
        "cause": morph.cause,
    }


def _picture(report: RunReport) -> str:
    from morph.cli.run_picture import run_figure

    held = io.BytesIO()
    run_figure(report).savefig(held, format="png")
    return base64.b64encode(held.getvalue()).decode("ascii")


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")

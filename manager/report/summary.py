"""Summarises a report in a few lines of text."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path

from manager.accounting.account import Account, TimeUse
from manager.report.events import morph_line
from manager.report.values import RunReport, numbers_text, rates_text
from manager.run_dir import GOES_ON, SILENT_S, GoesOn, holder_of, of_manager, resuming
from morph.contract.base import read_json
from morph.contract.errors import RunDirError
from morph.contract.pool import several_types
from morph.words import counted, moment_text

CAME_FROM = {
    "keep": "kept",
    "peer": "from peers",
    "ahead": "copied before the change",
    "checkpoint": "from the checkpoint",
    "initial": "as at the start",
}


def with_its_manager(report: RunReport, run_dir: Path) -> RunReport:
    """Return the report with the present state of the run's manager; RunDirError if the run's lock cannot be read."""
    now_s = time.time()
    waits = read_json(run_dir / GOES_ON, GoesOn, RunDirError) if (run_dir / GOES_ON).is_file() else None
    if waits is not None and waits.again_s + SILENT_S >= now_s and holder_of(run_dir) is None:
        sentence = f"{waits.sentence}; it continues at {moment_text(waits.again_s)} UTC (--forever)"
        return report.model_copy(update={"outcome": "unmanaged", "sentence": sentence, "next_save": None})
    if report.outcome != "running":
        return report
    wrong = of_manager(run_dir, now_s)
    if not wrong:
        return report
    last = f"the last entry of its journal is of {moment_text(report.end_s)} UTC"
    then = "" if holder_of(run_dir) is not None else f"; to go on: {resuming(run_dir)}"
    sentence = f"{wrong}; {last}{then}"
    return report.model_copy(update={"outcome": "unmanaged", "sentence": sentence, "next_save": None})


def summarise(report: RunReport, *, verbose: bool = False) -> str:
    """Return the text of ``morph status``; ``verbose`` adds each morph's cause and the origin of its state."""
    when = "now" if report.outcome == "running" else "at the end"
    lines = [
        f"{report.job}: {report.outcome} ({report.sentence})",
        f"steps: {report.version} of {report.num_steps} done, {report.steps_redone} run again; "
        f"checkpoint: {_saved(report)}",
        f"time: {report.end_s - report.start_s:.1f} s; VMs {when}: {report.vms[-1].num_vms if report.vms else 0}",
    ]
    left = report.remaining()
    lines += [] if left is None else ["to the end: " + "; ".join(filter(None, (left.text, left.dollars_text)))]
    if report.first_loss is not None and report.last_loss is not None:
        first, last = (f"{loss:.4f} at step {step}" for step, loss in (report.first_loss, report.last_loss))
        lines.append(f"loss: {first}, {last}")
    lines += _training_lines(report)
    if report.account.total_ns:
        lines += _account_lines(report.account)
    for shape in report.shapes:
        if shape.num_steps:
            of = f" on {shape.pool}" if shape.pool else ""
            measured = f"{(shape.measured_mini_batch_s or 0) * 1e3:.0f} ms a step"
            if shape.expected_here_s is not None:
                measured += f" ({shape.expected_here_s * 1e3:.0f} ms expected)"
            since_s = shape.start_s - report.start_s
            lines.append(
                f"shape {shape.shape}{of} from {since_s:.1f} s: {counted(shape.num_steps, 'step')}, {measured}"
            )
    lines += filter(None, [report.no_forecast])
    types = {name for shape in report.shapes if shape.num_steps and shape.pool for name in shape.pool.types}
    if sentence := several_types(types):
        lines.append(sentence)
    if report.correction is not None:
        lines.append(f"{report.correction.sentence} (`morph profile refine` keeps these times for other runs)")
    pauses = [morph.pause_ms for morph in report.morphs if morph.pause_ms is not None]
    if report.morphs:
        pause = f"; pause median {statistics.median(pauses):.0f} ms, worst {max(pauses):.0f} ms" if pauses else ""
        lines.append(f"changes of shape: {report.changes_text}{pause}")
    for morph in report.morphs:
        lines.append(f"  {morph.detected_at_s - report.start_s:7.1f} s  {morph_line(morph)}")
        if verbose:
            came_from = ", ".join(f"{total.count} {CAME_FROM[kind]}" for kind, total in morph.sources.items())
            lines.append(f"             sections and tied weights: {came_from or 'none moved'}; cause: {morph.cause}")
    return "\n".join(lines)


def _saved(report: RunReport) -> str:
    """Return the newest checkpoint, the best one, and when the next one is due, as far as these are known."""
    saved = "none" if report.checkpoint_version is None else f"after {counted(report.checkpoint_version, 'step')}"
    if report.best_version is not None:
        saved += f", the best after {counted(report.best_version, 'step')}"
    if report.next_save is not None:
        saved += f", the next in {max(0.0, report.next_save.due_s - report.end_s):.0f} s ({report.next_save.why})"
    return saved


def _account_lines(account: Account) -> list[str]:
    shares = ", ".join(f"{part.words} {account.share(part):.1%}" for part in TimeUse if account.share(part) >= 0.0005)
    lines = [f"time of VMs: {account.total_s:.1f} s: {shares}"]
    bill = account.bill()
    if bill is not None:
        parts = ", ".join(
            f"{part.words} {bill.part_usd(part):.4f}" for part in TimeUse if account.share(part) >= 0.0005
        )
        lines.append(f"dollars: {bill.total_usd:.4f}: {parts}")
    return lines


def _training_lines(report: RunReport) -> list[str]:
    """Return the last step's metrics, norm and learning rate, skipped steps, and the last evaluation, if any."""
    lines = []
    last = report.last_step
    if last is not None:
        numbers = dict(last.metrics)
        if last.gradient_norm is not None:
            numbers["gradient norm"] = last.gradient_norm
        parts = [numbers_text(numbers)] if numbers else []
        if last.learning_rates is not None:
            parts.append(f"learning rate {rates_text(last.learning_rates)}")
        if parts:
            lines.append(f"at step {last.step}: {', '.join(parts)}")
        if last.loss_scale is not None:
            lines.append(f"loss scale: 2**{math.frexp(last.loss_scale)[1] - 1}; steps skipped: {report.num_skipped}")
    if report.evaluations:
        newest = report.evaluations[-1]
        lines.append(f"evaluation at version {newest.version}: {newest.text}")
    return lines

"""Answers from a run's journal: its report, its account, and the lives of its VMs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from manager.accounting.ledger import Ledger
from manager.controller.state.profile_correction import Correction
from manager.journal.journal import Journal
from manager.journal.records import lines
from manager.report.figures import Figures
from manager.report.fold import Fold, Noted, noted_in
from manager.report.lives import Life, together
from manager.report.steps import Condensed, SetBack, Step, Steps
from manager.report.values import EvaluationRecord, MorphRecord, RunReport, ShapeLeft, ShapeSpan, VmCount
from manager.run_dir import JOURNAL
from morph.contract.errors import RunDirError
from morph.words import counted

_OF_REPORT = ("shape", "left", "morph", "evaluation", "vms", "set_back")


def read_report(run_dir: Path) -> RunReport:
    """Read the journal of a run, while it runs or later; RunDirError if there is none, or an empty one."""
    return report_in(run_dir / JOURNAL, source=str(run_dir))


def report_in(path: Path, source: str) -> RunReport:
    """Read a journal, which must exist while the report's steps are read; RunDirError if it is missing or empty."""
    with Journal.open(path, read_only=True) as journal:
        tail = journal.tail(0, _OF_REPORT)
        fold = Fold.at(journal, tail.head)
        steps = Condensed(path, fold.figures.num_decided)
        noted = [*noted_in(tail.records), *fold.steps(tail.entries)]
    return _report(fold, noted, steps, source)


def read_ledger(run_dir: Path) -> Ledger:
    """Return the account of a run's sessions so far (empty: not begun); RunDirError if the journal is unreadable."""
    if not (run_dir / JOURNAL).is_file():
        return Ledger()
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        tail = journal.tail()
        fold = Fold.at(journal, tail.head)
        for line in lines(tail.entries):
            fold.step(line)
    return fold.ledger


def ledger_now(run_dir: Path, now_s: float, *, lives_on: bool) -> Ledger:
    """Return the account of all sessions until ``now_s`` on the run's clock, up to which nodes that still live
    (``lives_on``) are booked; errors and empty account: ``read_ledger``.
    """
    ledger = read_ledger(run_dir)
    if lives_on:
        ledger.unmanaged(now_s)
    else:
        ledger.begin_session(now_s)
    return ledger


def lives_in(journal: Journal) -> tuple[Life, ...]:
    """Return the lives of all VMs, in order of their ends; open ones end with the last line. RunDirError: unreadable"""
    tail = journal.tail(0, ("life",))
    fold = Fold.at(journal, tail.head)
    noted = [*noted_in(tail.records), *fold.steps(tail.entries)]
    return lives_of(fold, noted)


def lives_of(fold: Fold, noted: Sequence[Noted]) -> tuple[Life, ...]:
    """Return the lives of all VMs: those that ended, of ``noted``, and the open ones, of ``fold``, which is spent."""
    fold.lives.end_all(fold.lives.last_s)
    return together([*(item.record for item in noted if isinstance(item.record, Life)), *fold.lives.over])


def _report(fold: Fold, noted: Sequence[Noted], condensed: Condensed, source: str) -> RunReport:
    config, figures = fold.config, fold.figures
    if config is None:
        raise RunDirError("its journal holds no run", source=source)
    records = [item.record for item in noted]
    newer = [record for record in records if isinstance(record, Step)]
    steps = Steps(condensed, newer, [record for record in records if isinstance(record, SetBack)])
    evaluations = {record.version: record for record in records if isinstance(record, EvaluationRecord)}
    finish = figures.finish
    return RunReport(
        job=config.job,
        num_steps=config.num_steps,
        start_s=figures.start_s,
        end_s=figures.end_s,
        version=fold.version,
        checkpoint_version=figures.checkpoint_version,
        best_version=figures.best_version,
        outcome=finish.outcome if finish else "running",
        sentence=finish.sentence if finish else figures.trouble or f"{counted(fold.version, 'step')} done",
        num_sessions=figures.num_sessions,
        shapes=_shapes(
            figures,
            [record for record in records if isinstance(record, ShapeSpan)],
            [record for record in records if isinstance(record, ShapeLeft)],
            steps,
        ),
        morphs=(*(record for record in records if isinstance(record, MorphRecord)), *fold.morphs.all()),
        steps=steps,
        steps_redone=figures.num_redone,
        first_loss=figures.first_loss,
        last_loss=figures.last_loss,
        evaluations=tuple(evaluations[version] for version in sorted(evaluations)),
        account=fold.ledger.account(),
        vms=tuple(record for record in records if isinstance(record, VmCount)),
        correction=None if config.shares_cores else _of_type(figures.correction, config.node_type),
        next_save=None if finish else figures.next_save,
    )


def _shapes(
    figures: Figures, formed: Sequence[ShapeSpan], left: Sequence[ShapeLeft], steps: Steps
) -> tuple[ShapeSpan, ...]:
    """Return every shape with the median of its steps; the shapes divide the list of all steps in order."""
    is_open = figures.shape is not None and figures.shape.end_s is None
    if is_open:
        left = [*left, ShapeLeft(end_s=figures.end_s, num_steps=figures.num_in_shape)]
    durations_s, at = steps.column("duration_s"), 0
    spans = []
    for number, (span, end) in enumerate(zip(formed, left, strict=True), 1):
        own_s, at = durations_s[at : at + end.num_steps], at + end.num_steps
        goes_on = is_open and number == len(formed) and figures.finish is None
        update = {
            "end_s": None if goes_on else end.end_s,
            "num_steps": end.num_steps,
            "measured_mini_batch_s": float(np.median(own_s)) if len(own_s) else None,
        }
        spans.append(span.model_copy(update=update))
    return tuple(spans)


def _of_type(correction: Correction | None, node_type: str) -> Correction | None:
    """Return the correction; if all GPUs were of one named type, return it as the correction of that type alone."""
    if correction is None or not node_type:
        return correction
    return correction.model_copy(update={"types": {node_type: correction}})

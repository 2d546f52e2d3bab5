"""The data on a run for the page and the metrics endpoint."""

from __future__ import annotations

from typing import Any

from manager.accounting.account import TimeUse
from manager.report.live import LiveRun

MOST_EVALUATIONS = 20


def snapshot(run: LiveRun) -> dict[str, Any]:
    """Return a run as plain JSON values. Times are seconds since the epoch; ``grid``: by replica, then by stage."""
    with run.lock:
        account = run.fold.ledger.account()
        bill, left, next_save = account.bill(run.prices), run.remaining, run.fold.figures.next_save
        return {
            "job": run.job,
            "phase": run.phase.value,
            "doing": run.doing,
            "trouble": run.trouble,
            "shape": run.shape,
            "generation": run.generation,
            "version": run.version,
            "num_steps": run.num_steps,
            "saved_version": run.saved_version,
            "loss": run.loss,
            "metrics": dict(run.metrics),
            "learning_rates": run.learning_rates,
            "evaluations": [evaluation.model_dump() for evaluation in run.fold.evaluations.all()[-MOST_EVALUATIONS:]],
            "examples_per_s": run.examples_per_s,
            "start_s": run.start_s,
            "time_s": run.time_s,
            "grid": _grid(run),
            "others": [
                {"worker": worker, "state": state} for worker, state in run.workers.items() if worker not in run.places
            ],
            "shapes": [list(entry) for entry in run.shapes],
            "counts": [list(point) for point in run.counts.points],
            "losses": [list(point) for point in run.losses.points],
            "speeds": [list(point) for point in run.speeds.points],
            "rates": [list(point) for point in run.rates.points],
            "metric_points": {name: [list(p) for p in series.points] for name, series in run.metric_series.items()},
            "events": [{"time_s": e.time_s, "code": e.code, "sentence": e.sentence} for e in run.recent],
            "next_save": None if next_save is None else next_save.model_dump(),
            "worker_seconds": {part.value: account.part_s(part) for part in TimeUse},
            "dollars": None if bill is None else bill.total_usd,
            "part_dollars": None if bill is None else {part.value: bill.part_usd(part) for part in TimeUse},
            "remaining": None if left is None else {"text": left.text, **left.model_dump()},
            "dollars_on_demand": account.on_demand_usd(run.prices),
        }


def _grid(run: LiveRun) -> list[list[dict[str, str]]]:
    if not run.places:
        return []
    cells = {place: {"worker": name, "state": run.workers.get(name, "gone")} for name, place in run.places.items()}
    num_replicas = max(replica for _, replica in cells) + 1
    depths = [max(stage for stage, of in cells if of == replica) + 1 for replica in range(num_replicas)]
    return [[cells[stage, replica] for stage in range(depth)] for replica, depth in enumerate(depths)]

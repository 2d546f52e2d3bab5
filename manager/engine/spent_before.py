"""What a run cost before, out of its journal."""

from __future__ import annotations

from pathlib import Path

from manager.engine.spending import Before
from manager.report.reading import ledger_now
from manager.report.spent import NS_PER_S, SHARES, UNITS_PER_USD
from morph.contract.vm_names import vm_of


def before_now(run_dir: Path, now_s: float, *, lives_on: bool) -> Before:
    """Add up what all sessions of a run have cost by now.

    Args:
        run_dir: The run's directory.
        now_s: By the run's clock.
        lives_on: The nodes of the last session live.

    Raises:
        RunDirError: the journal cannot be read.
    """
    ledger = ledger_now(run_dir, now_s, lives_on=lives_on)
    total = ledger.account().total
    return Before(
        usd=total.cost / UNITS_PER_USD,
        unpriced_h=total.unpriced_ns / (SHARES * NS_PER_S * 3600),
        vms=frozenset(map(vm_of, ledger.since_ns)) if lives_on else (),
    )

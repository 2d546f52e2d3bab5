"""Compares a run's journal with Azure's bill for each VM: they must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manager.accounting.spent import NS_PER_S
from manager.controller.state.actions import RequestNodes
from manager.controller.state.events import EVENT, ManifestWritten, WorkerLost
from manager.journal.journal import Journal
from manager.journal.records import DecisionRecord, Fact, lines
from manager.report.fold import Fold
from manager.run_dir import JOURNAL
from tests.cloud.region import Life

HEARD_S = 6.5
"""The longest time that a silent worker goes unnoticed (docs/how-it-works/manager.md)."""
BEGIN_S = 4.0
"""Seconds by which the start of billing may differ: from the date in Azure's answer to the time of reading it."""
CLOCK_S = 4.0
"""Seconds by which the end of a VM, or its detection, may be late on a busy machine."""


@dataclass
class Booked:
    """The interval in which Morph counts a VM as billed, in seconds since 1970; None: it was never granted."""

    since_s: float | None = None
    gone_s: float | None = None


@dataclass(frozen=True)
class Split:
    """The seconds that Azure bills for a VM: before Morph counts it, while Morph counts it, and after Morph lost it.

    ``late_s``: how much later than Azure Morph may learn of the end; it learns of an eviction as of any lost worker.
    ``granted``: whether the VM was ever granted.
    """

    vm: str
    before_s: float
    booked_s: float
    after_s: float
    late_s: float
    granted: bool

    @property
    def fits(self) -> bool:
        """Whether Morph counts a granted VM from the start of its bill and no longer than it is billed."""
        begins = abs(self.before_s) < BEGIN_S if self.granted else self.booked_s == 0.0
        return begins and self.booked_s >= 0.0 and self.after_s > -CLOCK_S - self.late_s


@dataclass(frozen=True)
class Asked:
    """The numbers of requested VMs, each request counted once, and of granted VMs."""

    asked: int
    granted: int


def booked(run_dir: Path) -> dict[str, Booked]:
    """Return each VM's life as the run's ledger counts it."""
    lives: dict[str, Booked] = {}
    fold, last_s = Fold(), 0.0
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        for line in lines(journal.read()):
            fold.step(line)
            known, last_s = fold.ledger.since_ns, max(last_s, line.time_s)
            for vm in known.keys() - set(lives):
                lives[vm] = Booked(known[vm] / NS_PER_S)
            for vm, life in lives.items():
                if vm not in known and life.gone_s is None:
                    life.gone_s = line.time_s
    for life in lives.values():
        life.gone_s = last_s if life.gone_s is None else life.gone_s
    return lives


def splits(bill: Sequence[Life], run_dir: Path) -> list[Split]:
    """Return the bill of each VM in three parts."""
    lives, found = booked(run_dir), []
    for life in bill:
        assert life.until_s is not None, f"{life.name} is still there"
        mine = lives.get(life.name, Booked())
        since_s = life.until_s if mine.since_s is None else mine.since_s
        gone_s = life.until_s if mine.gone_s is None else mine.gone_s
        late_s = HEARD_S if life.end.startswith("evicted") else 0.0
        parts = (since_s - life.since_s, gone_s - since_s, life.until_s - gone_s)
        found.append(Split(life.name, *parts, late_s, granted=mine.since_s is not None))
    return found


def facts(run_dir: Path, name: str) -> list[str]:
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        told = [Fact.model_validate_json(entry.payload_json) for entry in journal.read() if entry.kind == "fact"]
    return [fact.detail for fact in told if fact.name == name]


def saved_before_loss(run_dir: Path, vm: str) -> int:
    """Return the newest version that was complete on storage when the loss of a VM was reported."""
    saved = 0
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        for event in [EVENT.validate_json(one.payload_json) for one in journal.read() if one.kind == "event"]:
            for each in getattr(event, "events", (event,)):
                if isinstance(each, ManifestWritten):
                    saved = max(saved, each.version)
                elif isinstance(each, WorkerLost) and vm in each.workers:
                    return saved
    raise AssertionError(f"{vm} was not lost")


def requests(run_dir: Path) -> Asked:
    asked: dict[str, int] = {}
    granted: set[str] = set()
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        for entry in journal.read():
            if entry.kind == "decision":
                actions = DecisionRecord.model_validate_json(entry.payload_json).actions
                asked |= {action.request: action.count for action in actions if isinstance(action, RequestNodes)}
            elif entry.kind == "fact":
                fact = Fact.model_validate_json(entry.payload_json)
                if fact.name == "vm_granted" and fact.worker is not None:
                    granted.add(fact.worker)
    return Asked(sum(asked.values()), len(granted))

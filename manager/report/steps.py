"""The decided steps of a run in columns, so that two million steps are read in a second."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from manager.accounting.ledger import Ledger
from manager.accounting.spent import NS_PER_S, SHARES, UNITS_PER_USD, Prices
from manager.journal.condensed import SEQUENCE, WHOLE, Column, absent
from manager.journal.journal import Journal
from morph.contract.base import Value

if TYPE_CHECKING:
    import pandas as pd

METRIC = "metric:"
AT_ONCE = 16_384
_PLAIN = ("step", "generation", "decided_at_s", "duration_s", "compute_s", "num_attempts", "skipped")
_KNOWN_OR_NOT = ("loss", "weight", "gradient_norm", "loss_scale")
_RATES = ("lowest_rate", "highest_rate")


class StepRecord(Value):
    """One decided step. ``redone_later``: its state was lost afterwards, and the step was run again."""

    step: int
    generation: int
    decided_at_s: float
    duration_s: float = Field(description="order to decision, overflow attempts included")
    compute_s: float = Field(description="longest step_s that a member reported")
    loss: float | None = Field(description="mean over micro-batches, in their order; None: not a number")
    metrics: dict[str, float] = Field(default_factory=dict, description="means, likewise; only those that are numbers")
    weight: float | None = Field(default=None, description="sum of its losses' weights; None: losses are means")
    learning_rates: tuple[float, float] | None = Field(default=None, description="lowest and highest; None: unknown")
    gradient_norm: float | None = Field(default=None, description="before clipping; None: not requested by the job")
    skipped: bool = Field(default=False, description="a gradient was not finite, or nothing counted: no update")
    loss_scale: float | None = Field(default=None, description="used in this step; None: the job has none")
    num_attempts: int
    redone_later: bool = False


class SetBack(Value):
    """A record: after this number of decided steps, the run went back to this version."""

    num_decided: int
    version: int


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of all VMs of a run until a step was decided.

    ``vm_h``: hours of VMs; ``unpriced_h``: hours of VMs whose price is not known; ``usd``: the cost of the other hours;
    ``dearest_usd_per_h``: the highest price of a granted VM, NaN if none had a price.
    """

    vm_h: float
    unpriced_h: float
    usd: float
    dearest_usd_per_h: float

    @classmethod
    def of(cls, ledger: Ledger) -> Cost:
        """Return the cost that the ledger has booked so far."""
        total, share_h = ledger.total(), SHARES * NS_PER_S * 3600
        dearest = np.nan if ledger.dearest is None else ledger.dearest / NS_PER_S
        return cls(total.vm_ns / share_h, total.unpriced_ns / share_h, total.cost / UNITS_PER_USD, dearest)

    def dollars(self, prices: Prices | None) -> float | None:
        """Return the cost in dollars, computed as in ``Account.bill``; None if no price is known."""
        given = None if prices is None else prices.paid_usd_per_h
        if given is not None and prices is not None and prices.for_all:
            return self.vm_h * given
        price = self.dearest_usd_per_h if given is None else given
        return None if np.isnan(price) else self.usd + self.unpriced_h * price


_COSTS = tuple(Cost.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Step:
    """A decided step, with the line that decided it."""

    sequence: int
    record: StepRecord
    cost: Cost


def columns_of(steps: Sequence[Step]) -> dict[str, Column]:
    """Return steps as columns."""
    names = dict.fromkeys(name for step in steps for name in step.record.metrics)
    records = [step.record for step in steps]
    columns: dict[str, list[Any]] = {SEQUENCE: [step.sequence for step in steps]}
    columns |= {name: [getattr(record, name) for record in records] for name in (*_PLAIN, *_KNOWN_OR_NOT)}
    rates = [record.learning_rates or (None, None) for record in records]
    columns |= {name: [both[place] for both in rates] for place, name in enumerate(_RATES)}
    columns |= {METRIC + name: [record.metrics.get(name) for record in records] for name in names}
    columns |= {name: [getattr(step.cost, name) for step in steps] for name in _COSTS}
    return {name: np.array(values, dtype=np.int64 if name in WHOLE else np.float64) for name, values in columns.items()}


def steps_of(columns: Mapping[str, Column]) -> Iterator[Step]:
    """Return columns as steps."""
    metrics = [name for name in columns if name.startswith(METRIC)]
    num = len(columns[SEQUENCE])
    lists = {name: column.tolist() for name, column in columns.items()}
    lacking = [name for name in (*_KNOWN_OR_NOT, *_RATES, *_COSTS) if name not in lists]
    lists |= {name: absent(name, num).tolist() for name in lacking}
    for row in range(num):
        fields: dict[str, Any] = {name: lists[name][row] for name in _PLAIN}
        fields |= {name: _known(lists[name][row]) for name in _KNOWN_OR_NOT} | {"skipped": bool(fields["skipped"])}
        low, high = (_known(lists[name][row]) for name in _RATES)
        numbers = {name.removeprefix(METRIC): lists[name][row] for name in metrics}
        record = StepRecord.model_construct(
            **fields,
            learning_rates=None if low is None or high is None else (low, high),
            metrics={name: value for name, value in numbers.items() if value == value},
        )
        yield Step(lists[SEQUENCE][row], record, Cost(*(lists[name][row] for name in _COSTS)))


def steps_in(journal: Journal, rows: range) -> Iterator[Step]:
    """Read condensed steps, some at a time."""
    names = journal.column_names() if rows else ()
    for first in range(rows.start, rows.stop, AT_ONCE):
        some = range(first, min(first + AT_ONCE, rows.stop))
        yield from steps_of({name: journal.column(name, some) for name in names})


def _known(value: float) -> float | None:
    return value if value == value else None


@dataclass(frozen=True)
class Condensed:
    """The condensed steps of a journal: the first ``num`` of its rows, read column by column."""

    path: Path | None = None
    num: int = 0

    def column(self, name: str, rows: range) -> Column:
        """Return one column of some rows."""
        rows = range(rows.start, min(rows.stop, self.num))
        if self.path is None or not rows:
            return absent(name, 0)
        with Journal.open(self.path, read_only=True) as journal:
            return journal.column(name, rows)

    def names(self) -> list[str]:
        """Return the names of the columns."""
        if self.path is None or not self.num:
            return []
        with Journal.open(self.path, read_only=True) as journal:
            return journal.column_names()


class Steps(Sequence[StepRecord]):
    """Every decided step, in the order of decision, including those that were run again later.

    ``condensed``, then ``newer`` ones; ``set_backs``: the times that the run went back to an earlier version.
    """

    def __init__(
        self, condensed: Condensed | None = None, newer: Sequence[Step] = (), set_backs: Sequence[SetBack] = ()
    ) -> None:
        self._condensed, self._set_backs = condensed or Condensed(), set_backs
        self._newer, self._num_newer = columns_of(newer) if newer else {}, len(newer)

    @property
    def names(self) -> list[str]:
        """The columns' names: the fields of ``StepRecord``, and metrics with ``metric:`` before the name."""
        return list(dict.fromkeys((*self._condensed.names(), *self._newer)))

    def column(self, name: str, rows: range | None = None) -> Column:
        """Return one number of every step, or of the steps of some rows; NaN where a step has none."""
        rows, num = range(len(self)) if rows is None else rows, self._condensed.num
        newer = self._newer.get(name)
        newer = absent(name, self._num_newer) if newer is None else newer
        newer = newer[max(0, rows.start - num) : max(0, rows.stop - num)]
        older = self._condensed.column(name, rows)
        return np.concatenate((older, newer)) if len(older) else newer

    def cost(self, row: int) -> Cost:
        """Return the cost of all VMs until this step was decided; NaN in a report that was written as JSON."""
        return Cost(*(float(self.column(name, range(row, row + 1))[0]) for name in _COSTS))

    @property
    def redone(self) -> Column:
        """Whether a step was lost and run again later."""
        return self._redone(range(len(self)))

    def _redone(self, rows: range) -> Column:
        if not self._set_backs:
            return np.zeros(len(rows), dtype=np.bool_)
        backs = sorted(self._set_backs, key=lambda back: back.num_decided)
        after = np.searchsorted([back.num_decided for back in backs], np.arange(rows.start, rows.stop), side="right")
        versions = [*(back.version for back in backs), np.iinfo(np.int64).max]
        lowest = np.minimum.accumulate(np.array(versions)[::-1])[::-1]
        redone: Column = self.column("step", rows) >= lowest[after]
        return redone

    def rows(self, rows: Column) -> list[StepRecord]:
        """Return the steps of these rows, in ascending order."""
        if not len(rows):
            return []
        some = range(int(rows[0]), int(rows[-1]) + 1)
        at = rows - some.start
        columns = {name: self.column(name, some)[at] for name in self.names}
        return [
            step.record.model_copy(update={"redone_later": True}) if redone else step.record
            for step, redone in zip(steps_of(columns), self._redone(some)[at].tolist(), strict=True)
        ]

    def thinned(self, most: int) -> list[StepRecord]:
        """Return at most this number of steps, evenly chosen, including the first and the last."""
        num = len(self)
        return self.rows(np.unique(np.linspace(0, num - 1, min(num, most)).round().astype(np.int64)))

    def decided_at_s(self, versions: Collection[int]) -> dict[int, float]:
        """Return when each of these versions was last decided."""
        steps = self.column("step")
        rows = np.flatnonzero(np.isin(steps, [version - 1 for version in versions]))
        return dict(zip((steps[rows] + 1).tolist(), self.column("decided_at_s")[rows].tolist(), strict=True))

    def frame(self) -> pd.DataFrame:
        """Return a pandas table; ``redone``: run again later. A metric named like a column has ``metric:`` in front."""
        import pandas as pd

        first = ("step", "loss", *_PLAIN, *_KNOWN_OR_NOT, *_RATES)
        names = dict.fromkeys((*(name for name in first if name in self.names), *self.names))
        own = {"redone", *(name for name in names if not name.startswith(METRIC))}
        shown = {name: plain if (plain := name.removeprefix(METRIC)) not in own else name for name in names}
        table = {shown[name]: self.column(name) for name in names if name != SEQUENCE}
        return pd.DataFrame({**table, "redone": self.redone})

    def __len__(self) -> int:
        return self._condensed.num + self._num_newer

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        records = self.rows(np.atleast_1d(np.arange(len(self))[index]))
        return records if isinstance(index, slice) else records[0]

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.rows(np.arange(len(self))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(len(self))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        written: Callable[[Steps], list[StepRecord]] = list
        records = handler.generate_schema(list[StepRecord])
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_after_validator_function(cls.of_records, records),
            python_schema=core_schema.is_instance_schema(cls),
            serialization=core_schema.plain_serializer_function_ser_schema(written, return_schema=records),
        )

    @classmethod
    def of_records(cls, records: Sequence[StepRecord]) -> Steps:
        """Return the steps of a report that was written as JSON, which does not have the cost of each step."""
        backs = [
            SetBack(num_decided=place, version=record.step)
            for place, (before, record) in enumerate(pairwise(records), start=1)
            if record.step <= before.step
        ]
        lost = [record.step for record in records[backs[-1].num_decided if backs else 0 :] if record.redone_later]
        if lost:  # the step was not run again yet
            backs.append(SetBack(num_decided=len(records), version=min(lost)))
        unknown = Cost(np.nan, np.nan, np.nan, np.nan)
        return cls(newer=[Step(0, record, unknown) for record in records], set_backs=backs)

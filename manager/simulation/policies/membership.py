"""The VMs of a trace over time, and the booking of each of their seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from manager.accounting.account import TimeUse
from manager.simulation.spot.job import SpotJob
from manager.simulation.spot.run_end import Moment, PolicyOutcome, SpotPrices, Until
from morph.contract.lives import recorded
from morph.contract.plan import Plan
from morph.contract.trace import Trace, TraceEvent
from morph.contract.vm_names import vm_of, workers_of

ON_DEMAND = "on-demand"
"""The source of VMs that are not spot VMs."""


@dataclass(frozen=True)
class Change:
    """A moment at which VMs come, become ready for work, get a notice (``noticed``: seconds left), or are lost; the
    total price grows by ``usd_per_h`` from then on.
    """

    time_s: float
    came: int = 0
    ready: tuple[str, ...] = ()
    noticed: tuple[tuple[str, float], ...] = ()
    lost: tuple[str, ...] = ()
    usd_per_h: float = 0.0


def changes_of(trace: Trace, setup_s: float, prices: SpotPrices | None = None, gpus_per_vm: int = 1) -> list[Change]:
    """Return when VMs come, are ready (``setup_s`` later, unless lost by then) and are lost; once for each GPU."""

    def workers(kind: str, entries: Iterable[tuple[float, str, str]]) -> tuple[str, ...]:
        return tuple(worker for _, this, vm in entries if this == kind for worker in workers_of(vm, gpus_per_vm))

    all_entries: list[tuple[float, str, str]] = []
    living: dict[str, str] = {}
    usd: dict[str, float] = {}
    leads: dict[str, float] = {}
    for number, change in enumerate(recorded(trace)):
        event = change.event
        if change.kind == "came":
            living[event.node_id] = vm = f"{event.node_id}#{number}"
            usd[vm] = usd_of(event, trace, prices) or 0.0
            all_entries.append((event.time_s + setup_s, "ready", vm))
        vm = living[event.node_id]
        leads[vm] = event.notice_s or 0.0
        all_entries.append((change.time_s, change.kind, vm))
    lost_s = {vm: time_s for time_s, kind, vm in all_entries if kind == "taken"}
    real = [entry for entry in all_entries if entry[1] != "ready" or entry[0] < lost_s.get(entry[2], float("inf"))]
    changes = []
    for time_s, together in groupby(sorted(real, key=lambda entry: entry[0]), key=lambda entry: entry[0]):
        entries = list(together)
        changes.append(
            Change(
                time_s,
                gpus_per_vm * sum(kind == "came" for _, kind, _ in entries),
                workers("ready", entries),
                tuple((worker, leads[vm_of(worker)]) for worker in workers("warned", entries)),
                workers("taken", entries),
                sum(usd[vm] * {"came": 1, "taken": -1}.get(kind, 0) for _, kind, vm in entries),
            )
        )
    return changes


@dataclass
class Books:
    """The uses of all VMs' time, by GPU, booked until ``now_s``. ``ready``: VMs ready for work, in order of appearance.

    ``usd``: paid so far; None: the price of VMs is not known. ``usd_per_h``: the price of all present VMs.
    """

    job: SpotJob
    usd: float | None
    usd_per_h: float = 0.0
    now_s: float = 0.0
    num_vms: int = 0
    ready: dict[str, None] = field(default_factory=dict)
    parts_s: dict[TimeUse, float] = field(default_factory=lambda: dict.fromkeys(TimeUse, 0.0))
    vm_s: float = 0.0
    num_losses: int = 0
    moments: list[Moment] = field(default_factory=list)

    def take(self, change: Change) -> None:
        """Apply a change of VMs at ``now_s``."""
        self.ready |= dict.fromkeys(change.ready)
        for vm in change.lost:
            self.ready.pop(vm, None)
        self.num_vms += change.came - len(change.lost)
        self.num_losses += len(change.lost)
        self.usd_per_h += change.usd_per_h

    def spend(self, until_s: float, part: TimeUse, members: int) -> None:
        """Book time from ``now_s`` on: ``members`` VMs get this part, other ready ones are spare, the rest warm up."""
        for_s = max(0.0, until_s - self.now_s)
        num_ready = len(self.ready)
        self.parts_s[part] += members * for_s
        self.parts_s[TimeUse.SPARE if members else TimeUse.WAITING] += (num_ready - members) * for_s
        self.parts_s[TimeUse.WARMING] += (self.num_vms - num_ready) * for_s
        self.vm_s += self.num_vms * for_s
        if self.usd is not None:
            self.usd += self.usd_per_h * for_s / 3600
        self.now_s = max(self.now_s, until_s)

    def undo(self, seconds: float, members: int) -> None:
        """Book computing time of this length as lost."""
        self.parts_s[TimeUse.COMPUTE] -= seconds * members
        self.parts_s[TimeUse.LOST] += seconds * members

    def note(self, plan: Plan | None) -> None:
        """Record that this shape trains from now on."""
        self.note_shape(*(("", 0.0) if plan is None else (plan.shape, plan.expected.examples_per_s)))

    def note_shape(self, shape: str, examples_per_s: float) -> None:
        """Record that pipelines that do not form a plan train from now on."""
        moment = Moment(self.now_s, self.num_vms // self.job.gpus_per_vm, shape, examples_per_s)
        if not self.moments or self.moments[-1][1:] != moment[1:]:
            self.moments.append(moment)

    def is_spent(self, until: Until) -> bool:
        """Return whether the job's limit of dollars is spent."""
        return until.kind == "usd" and self.usd is not None and self.usd >= until.amount

    def outcome(self, policy: str, trace: str, seed: int, steps: int, **more: int) -> PolicyOutcome:
        """Return the sums, by VM."""
        num = self.job.gpus_per_vm
        return PolicyOutcome(
            policy=policy,
            trace=trace,
            seed=seed,
            hours=self.now_s / 3600,
            steps=steps,
            examples=steps * self.job.batch_size,
            lost_steps=more.get("lost_steps", 0),
            num_losses=self.num_losses // num,
            num_fatal=more.get("num_fatal", 0),
            num_changes=more.get("num_changes", 0),
            vm_s=self.vm_s / num,
            parts_s={part: spent_s / num for part, spent_s in self.parts_s.items()},
            usd=self.usd,
            finished=bool(more.get("finished", 0)),
            moments=tuple(self.moments),
        )


def twice_slower(micro_batches: float, depth: int) -> float:
    """Return the slowdown of a pipeline by a worker that computes two stages: twice a stage's time per micro-batch."""
    return (2 * micro_batches + depth - 1) / (micro_batches + depth - 1)


def usd_of(event: TraceEvent, trace: Trace, prices: SpotPrices | None) -> float | None:
    """Return the dollars an hour of a VM that comes: the given price, else the trace's; None: not known."""
    if event.source == ON_DEMAND:
        return None if prices is None else prices.on_demand_usd_per_h
    if prices is not None and prices.spot_usd_per_h is not None:
        return prices.spot_usd_per_h
    return trace.price_at(event.time_s, event.zone, event.instance_type)


def nothing_paid(trace: Trace, prices: SpotPrices | None) -> float | None:
    """Return the dollars at the start; None: spot VMs have no price."""
    return 0.0 if trace.prices or (prices is not None and prices.spot_usd_per_h is not None) else None


def end_of(until: Until, trace: Trace) -> float:
    """Return the latest end of the simulation: after the given hours, or with the trace's last event."""
    return trace.duration_s if until.end_s is None else until.end_s


def intervals(
    trace: Trace, setup_s: float, end_s: float, prices: SpotPrices | None = None, gpus_per_vm: int = 1
) -> Iterator[tuple[Change, float]]:
    """Yield each change with the time of the next one, or the end."""
    changes = [change for change in changes_of(trace, setup_s, prices, gpus_per_vm) if change.time_s < end_s]
    for number, change in enumerate(changes, 1):
        yield change, changes[number].time_s if number < len(changes) else end_s

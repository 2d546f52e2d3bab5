"""The specification of a rehearsal, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from morph.contract import ranges
from morph.contract.errors import PlanError
from morph.contract.plan import Plan, Schedule
from morph.contract.profile import Profile
from morph.contract.trace import UNKNOWN, Trace
from simulator import PlanRequest
from simulator.inputs.node_types import of_pool_type

Network = Literal["loopback", "namespaces"]

MAX_WORKERS = 256
WARM_UP_STEPS = 1
_OF_ONE_SHAPE = (
    *("num_stages", "num_replicas", "boundaries", "plan", "window_slope"),
    *("slow", "jitter_seed", "workers_per_host", "network"),
)
_TIME_SCALE = ranges.Range(0, 1e4, above=True)
_SIZE_SCALE = ranges.Range(0, 1, above=True)


@dataclass(frozen=True, kw_only=True)
class RehearsalSpec(PlanRequest):
    """One rehearsal. Of a request's fields, it uses m, D, schedule, slow workers, jitter and memory.

    Either ``num_stages`` (P), or ``boundaries``: the first section of each stage; None: balanced. ``workers_per_host``
    share a host, neighbouring stages if possible. ``steps``: the counted mini-batches; one more runs before them.
    ``plan``: a plan to rehearse instead of a shape: its pipelines may be unequal, and on nodes of several types.
    ``trace``: a trace of VMs that come and are lost, instead of a shape, with one worker each. The manager chooses a
    plan whenever they change. If the profile has several types of node, a VM's instance type names its type.
    ``window_slope``: see ``simulator.simulate``. ``batch_size``: M in samples, instead of the job's; a multiple of the
    m that the job's own M gives. ``time_scale``: the factor for every time; None: the factor that this machine's cores
    need. ``message_scale``, ``state_scale``: the real size of messages and parameters over the profile's; None:
    messages as large as this machine can carry, a small state. ``forgiven_s``: see ``EmulatedDevice``; None: the
    default.
    """

    profile: Profile
    num_stages: int | None = None
    num_replicas: int = 1
    num_hosts: int
    workers_per_host: int = 1
    steps: int = 5
    schedule: Schedule = "varuna"
    boundaries: tuple[int, ...] | None = None
    plan: Plan | None = None
    trace: Trace | None = None
    window_slope: int | None = None
    batch_size: int | None = None
    time_scale: float | None = None
    message_scale: float | None = None
    state_scale: float | None = None
    network: Network = "loopback"
    forgiven_s: float | None = None

    @property
    def depth(self) -> int:
        """P of the deepest pipeline."""
        if self.plan is not None:
            return self.plan.pipeline_depth
        return len(self.boundaries) if self.boundaries is not None else self.num_stages or 0

    @property
    def num_workers(self) -> int:
        """P * D, the number of workers of the plan, or the largest number of VMs that the trace has at once."""
        if self.trace is not None:
            return self.trace.max_nodes
        if self.plan is not None:
            return self.plan.num_workers
        return self.depth * self.num_replicas

    @property
    def types(self) -> tuple[str, ...]:
        """Types of node in the trace; empty if all nodes are of the profile's own type."""
        named = {event.instance_type for event in self.trace.events} if self.trace is not None else set()
        return tuple(sorted(named)) if self.profile.node_types and named != {UNKNOWN} else ()

    def check(self) -> None:
        """PlanError for rehearsals that the simulator would not refuse: the option, its value and what is allowed."""
        if self.batch_size is not None:
            ranges.BATCH.check("batch_size", self.batch_size)
        room = self.num_hosts * self.workers_per_host
        for name in ("num_replicas", "num_hosts", "workers_per_host", "steps"):
            ranges.GPUS.check(name, getattr(self, name))
        if self.num_workers > room:
            needed = -(-self.num_workers // self.workers_per_host)
            shape = self.plan.shape if self.plan is not None else f"{self.depth} x {self.num_replicas}"
            shape = shape if self.trace is None else "the trace"
            raise PlanError(
                f"{shape} needs {self.num_workers} workers, and there is room for {room}",
                field="num_hosts",
                value=self.num_hosts,
                allowed=f"{needed} or more",
            )
        if self.num_workers > MAX_WORKERS:
            raise PlanError(
                "is more than one machine should be asked to carry",
                field="num_workers",
                value=self.num_workers,
                allowed=f"at most {MAX_WORKERS}",
            )
        for name, scale, possible in (
            ("time_scale", self.time_scale, _TIME_SCALE),
            ("message_scale", self.message_scale, _SIZE_SCALE),
            ("state_scale", self.state_scale, _SIZE_SCALE),
        ):
            if scale is not None:
                possible.check(name, scale)
        if self.trace is not None:
            self._check_trace()

    def _check_trace(self) -> None:
        default = {field.name: field.default for field in fields(RehearsalSpec)}
        for name in _OF_ONE_SHAPE:
            if (getattr(self, name) or None) != (default[name] or None):
                raise PlanError(
                    "is for one shape, and a trace leads to several", field=name, allowed="leave it out, or the trace"
                )
        for name in self.types:
            of_pool_type(self.profile, name)


def worker_name(index: int) -> str:
    """Return the name of a rehearsal's worker."""
    return f"vm{index}"

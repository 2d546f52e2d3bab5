"""Drives the controller of ``morph spot-run``: observes the script and the VM, and carries out the decisions."""

from __future__ import annotations

import json
import logging
import math
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from manager.controller.state.actions import ReleaseNodes, RequestNodes
from manager.controller.state.events import Event as VmEvent
from manager.controller.state.events import NodesGranted, NodesStarted, NoticeGiven, RequestRefused, WorkerLost
from manager.engine.loop.event_queue import EventQueue
from manager.engine.vms.budget import Spending
from manager.engine.vms.provisioning import Provisioner
from manager.host.signals import signals_blocked
from manager.journal.records import Fact
from manager.notices.agent import sources_of
from manager.notices.watch import Given, NoticeWatch, Told
from manager.providers.interface.provider import Misconfigured, Provider
from manager.spot.controller import (
    Action,
    Ask,
    Came,
    Denied,
    Ended,
    Event,
    Gone,
    Noticed,
    Refused,
    Release,
    Save,
    Saved,
    SpotState,
    Start,
    Stepped,
    Tick,
    Uploaded,
    decide,
)
from manager.spot.script_server import ScriptServer
from manager.spot.spec import SpotJob
from morph.contract.cluster import Limits
from morph.contract.lives import Lives
from morph.contract.vm_names import vm_of

log = logging.getLogger("morph.spot")

LOOK_EVERY_S = 0.05
LOOK_FOR_VMS_S = 5.0
CLOSE_TIMEOUT_S = 120.0
TOLD = ("provider_failed", "provider_retried", "provider_silent", "request_reduced", "vms_left", "notice_trouble")
"""The facts about VMs that the user sees."""
TAKEN_CODE = 75
"""The VM of this command is about to be taken; the same command resumes the script on the next VM."""
_EVENTS: dict[str, Callable[..., Event]] = {"step": Stepped, "saved": Saved, "uploaded": Uploaded, "refused": Refused}


@dataclass(frozen=True)
class VmSource:
    """The source of VMs for scripts. ``num_devices``: in a group of VMs; ``least_vms``: the fewest with them."""

    provider: Provider
    num_devices: int
    least_vms: int = 1
    spending: Spending = field(default_factory=lambda: Spending(Limits()))


@dataclass
class ScriptEnd:
    """The number of VMs, or groups of them, that ran the script, and the reasons for decisions, with their seconds."""

    code: int
    num_vms: int
    reasons: list[tuple[float, str]]


class Launcher:
    """Runs one job to its end; ``run`` closes ``machines``.

    ``lives``: determines when VMs are taken on purpose; each life begins at the script's start on the VM.
    ``vm_events``: what is known of VMs, also by ``machines``.
    """

    def __init__(
        self,
        job: SpotJob,
        command: Sequence[str],
        source: VmSource,
        machines: ScriptServer,
        lives: Lives | None,
        vm_events: EventQueue,
    ) -> None:
        self._job, self._command, self._machines, self._lives = job, command, machines, lives
        self._source, self._vm_events = source, vm_events
        self._provisioning = Provisioner(
            source.provider,
            self._vm_events,
            source.spending,
            look_every_s=LOOK_FOR_VMS_S,
            close_timeout_s=CLOSE_TIMEOUT_S,
            least_vms=source.least_vms,
        )
        self._state = SpotState()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._begin_s = time.monotonic()
        self._nodes: dict[str, tuple[str, ...]] = {}
        self._in_queue: dict[str, set[str]] = {}
        self._group = ""
        self._vms: tuple[str, ...] = ()
        self._gone: set[str] = set()
        self._half = b""
        self._num_groups = self._num_requested = 0
        self._started_s, self._looked_s = 0.0, -math.inf
        self._reasons: list[tuple[float, str]] = []

    def run(self) -> ScriptEnd:
        """Block until the script ends; no VM outlives this call.

        ProviderError: further requests are useless, or a VM could not be ended.
        """
        watches = [NoticeWatch(source, self._told) for source in sources_of(self._job.notices)]
        try:
            for watch in watches:
                watch.start()
            self._provisioning.begin((), ())
            while self._state.phase != "ended":
                for event in self._heard():
                    self._happened(event)
                if self._job.vms == "here" and self._num_groups and self._state.phase == "waiting":
                    return ScriptEnd(TAKEN_CODE, self._num_groups, self._reasons)
                time.sleep(LOOK_EVERY_S)
        finally:
            with signals_blocked():
                self._end(watches)
        code = self._state.code
        return ScriptEnd(1 if code is None or code < 0 else code, self._num_groups, self._reasons)

    def _end(self, watches: Sequence[NoticeWatch]) -> None:
        for watch in watches:
            watch.close()
        log.info("ending what is left of the run's VMs")  # deleting them takes minutes
        self._provisioning.close()
        self._machines.close()
        if (price := self._source.provider.price()) is not None:
            log.info("VMs cost about %.2f dollars", self._source.spending.spent_usd(price))
        if self._provisioning.left is not None:
            raise self._provisioning.left

    def _happened(self, event: Event) -> None:
        self._state, actions, reason = decide(self._state, event, time.monotonic() - self._begin_s)
        if reason:
            log.info("%s", reason)
            self._reasons.append((time.monotonic() - self._begin_s, reason))
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Ask() if self._job.vms == "here" and self._num_groups:
                pass  # the next VM is another machine
            case Ask():
                self._num_requested += 1
                name = f"{self._job.name}-{self._num_requested}"
                self._provisioning.request(RequestNodes(request=name, count=self._source.num_devices))
            case Start(group):
                self._group, self._vms, self._half = group, _vms_of(self._nodes[group]), b""
                self._num_groups += 1
                self._started_s, self._looked_s = time.monotonic(), -math.inf
                self._machines.start(self._vms, self._command, self._job.storage)
            case Save(number):
                self._machines.save(self._vms[0], number)
            case Release():
                self._take()

    def _take(self) -> None:
        """Give back the rest of the group; the next group does not wait until the provider has ended it."""
        vms, self._vms = self._vms, ()
        if vms:
            self._machines.end(vms)
            self._provisioning.release(ReleaseNodes(nodes=self._nodes[self._group]))
            self._events.put(Gone())

    def _of_vms(self, item: VmEvent | Fact) -> Iterator[Event]:
        """Return the controller's events for the provider's VMs; ProviderError if further requests are useless."""
        match item:
            case NodesGranted(request=name, nodes=nodes) if len(nodes) >= self._source.num_devices:
                self._nodes[name], self._in_queue[name] = nodes, set(item.waiting)
                yield from self._began(name, ())
            case NodesStarted(request=name, nodes=nodes) if name in self._in_queue:
                yield from self._began(name, nodes)
            case NodesGranted(short="input", detail=detail):
                raise Misconfigured(detail)
            case WorkerLost(worker=node, cause=cause, unfit=True):
                raise Misconfigured(f"{vm_of(node)} cannot be used: {cause}")
            case NoticeGiven(worker=node, lead_s=lead_s) if vm_of(node) in self._vms:
                yield Noticed(lead_s)
            case NodesGranted(nodes=nodes):
                self._provisioning.release(ReleaseNodes(nodes=nodes))
                yield Denied(f"there are VMs for {len(_vms_of(nodes))} of a group alone")
            case RequestRefused(cause=cause, detail=detail):
                if self._provisioning.failure is not None:
                    raise self._provisioning.failure
                if cause == "limit" and not self._vms:
                    raise Misconfigured(f"no VM may be requested: {detail}")
                yield Denied(detail)
            case WorkerLost(worker=node):
                self._gone.add(vm_of(node))
                for name in [name for name, waiting in self._in_queue.items() if node in waiting]:
                    del self._in_queue[name]
                    self._provisioning.release(ReleaseNodes(nodes=self._nodes[name]))
                    yield Denied(f"{vm_of(node)} left the queue and never began")
            case Fact(name=name, worker=node, detail=detail) if name in TOLD:
                log.info("%s%s", "" if node is None else f"{node}: ", detail)

    def _began(self, request: str, nodes: Sequence[str]) -> Iterator[Event]:
        """Record that nodes wait in no queue; a group has come once none of its nodes does."""
        self._in_queue[request].difference_update(nodes)
        if not self._in_queue[request]:
            del self._in_queue[request]
            yield Came(request)

    def _told(self, news: Told) -> None:
        if isinstance(news, Given) and news.certain and news.lead_s is not None:
            self._events.put(Noticed(news.lead_s))

    def _heard(self) -> Iterator[Event]:
        while not self._events.empty():
            yield self._events.get()
        while (stamped := self._vm_events.get(0.0)) is not None:
            yield from self._of_vms(stamped.item)
        if not self._vms:
            yield Tick()
            return
        codes = [self._machines.ended(vm) for vm in self._vms]  # before reading messages, so that none is missed
        yield from self._said()
        if not self._vms:
            return
        failed = next((code for code in codes if code), None)
        if failed is not None or None not in codes:
            yield Ended(failed or 0)
            return
        if self._gone.intersection(self._vms) or self._machines.are_silent(self._vms):
            self._take()
            return
        yield Tick()
        if self._lives is not None and self._vms:
            now_s = time.monotonic()
            changes = self._lives.between({self._vms[0]: self._started_s}, self._looked_s, now_s)
            self._looked_s = now_s
            for change in changes:
                if change.kind == "warned":
                    yield Noticed(max(0.0, change.taken_s - now_s))
                elif self._vms:
                    self._take()

    def _said(self) -> Iterator[Event]:
        """Return the script's new messages from the first VM of the group."""
        data = self._half + self._machines.said(self._vms[0])
        *lines, self._half = data.split(b"\n")
        for line in lines:
            fields = json.loads(line)
            yield _EVENTS[fields.pop("kind")](**fields)


def _vms_of(nodes: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(vm_of, nodes)))

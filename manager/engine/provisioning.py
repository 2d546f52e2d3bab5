"""Carries out what the controller asks of a provider: one call at a time, in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from manager.controller.actions import ReleaseNodes, RequestId, RequestNodes
from manager.controller.events import NodesGranted, Paid, RequestRefused, WorkerLost
from manager.engine.inbox import Inbox
from manager.engine.spending import Spending
from manager.journal.records import Fact
from manager.providers.provider import (
    CapacityShort,
    Provider,
    ProviderError,
    QuotaExceeded,
    Throttled,
    Transient,
    Vm,
    vm_name,
)
from manager.providers.reconcile import reconcile
from morph.contract.vm_names import vm_of

log = logging.getLogger(__name__)

TRIES = 5
WAIT_S = 2.0
WAIT_MAX_S = 120.0
CLOSE_TIMEOUT_S = 10.0
LEAVE_PATIENCE_S = 300.0
"""How long ending the VMs of a run is tried again where the provider fails."""


class Provisioning:
    """Asks a provider for VMs and gives them back; answers come through the inbox.

    The controller's nodes are workers, one for each device of a VM. A request that comes again under its name while it
    is under way, or was answered, makes no further call: its answer is given again. A VM is ended once the controller
    gave up all of its workers.

    Args:
        provider: Asked from this object's thread alone.
        inbox: Where ``NodesGranted`` and ``RequestRefused`` go, and facts.
        spending: What the user allows.
        pause: Waits some seconds; returns True when everything is over.
        nodes: Nodes that the controller knows from another manager, whose VMs the provider lists.
        look_every_s: How often the provider is asked which VMs there are, for one may be taken while it boots; None:
            never.
        close_timeout_s: How long ``close`` waits for a call that is under way.
    """

    def __init__(
        self,
        provider: Provider,
        inbox: Inbox,
        spending: Spending,
        pause: Callable[[float], bool] | None = None,
        *,
        nodes: Collection[str] = (),
        look_every_s: float | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self._provider = provider
        self._inbox = inbox
        self._spending = spending
        self._over = threading.Event()
        self._pause = pause or self._over.wait
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[RequestId, NodesGranted | RequestRefused] = {}
        self._look_every_s, self._close_timeout_s = look_every_s, close_timeout_s
        self._under_way: dict[RequestId, int] = {}
        self._granted: dict[str, RequestId] = {}
        self._wanted: dict[str, set[str]] = {}
        self._missed: frozenset[str] = frozenset()
        self._inherited: tuple[frozenset[str], frozenset[RequestId]] | None = None
        self._nodes = frozenset(nodes)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="morph-provisioning", daemon=True)
        self._thread.start()
        if nodes:
            self._tasks.put(self._count)  # they cost from now on

    def request(self, action: RequestNodes) -> None:
        """Ask for VMs; returns at once."""
        with self._lock:
            answer = self._answers.get(action.request)
            if answer is None and action.request in self._under_way:
                return
            self._under_way[action.request] = action.count
        if answer is not None:
            self._inbox.put(answer)
        else:
            self._tasks.put(lambda: self._ask(action))

    def release(self, action: ReleaseNodes) -> None:
        """Give VMs back of which all workers are given up by now; returns at once."""
        self._give_up(action.nodes)

    def begin(self, nodes: Collection[str], requests: Collection[RequestId]) -> None:
        """Before anything else: go on with the VMs of these nodes and requests, end any other; returns at once.

        Others are what a manager left that was killed, and of which this one knows nothing.
        """
        self._inherited = (frozenset(nodes), frozenset(requests))
        self._tasks.put(self._adopt)

    def request_of(self, node: str) -> RequestId | None:
        """Return the request that a VM answers, granted or under way; None: it is none of ours, or was given back."""
        vm = vm_of(node)
        with self._lock:
            if vm in self._granted:
                return self._granted[vm]
            for request, count in self._under_way.items():
                if vm in {vm_name(request, index) for index in range(count)}:
                    return request
        return None

    def know(self, nodes: Collection[str]) -> None:
        """End the VMs of which the controller knows no node any more; returns at once.

        Called before what was decided is carried out: a lost VM makes room for the one that replaces it.
        """
        if len(nodes) == len(self._nodes):  # no event takes one node away and brings another
            return
        known = frozenset(nodes)
        gone, self._nodes = tuple(sorted(self._nodes - known)), known
        if gone:
            self._give_up(gone)

    def close(self) -> None:
        """Ask for nothing any more, and end every VM of the run; blocks while a call is under way, for a bounded time.

        What cannot be ended in time is told as a fact, and to the user; ``reconcile`` finds it.
        """
        self._over.set()
        self._provider.stop()
        self._tasks.put(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            sentence = f"a call to the provider did not end within {self._close_timeout_s:g} s"
            self._fact("provider_busy", sentence)
            log.warning("VMs of this run may be left: %s", sentence)
            return
        until_s = time.monotonic() + LEAVE_PATIENCE_S
        wait_s = WAIT_S
        while True:
            try:
                self._provider.dismantle()
                return
            except Exception as error:  # whatever it is, the user must hear of it, and the rest be closed
                asked_s = getattr(error, "retry_after_s", None) or wait_s
                again = isinstance(error, Throttled | Transient) and time.monotonic() + asked_s < until_s
                if not again:
                    self._fact("vms_left", str(error))
                    log.warning("VMs of this run may be left: %s", error)
                    return
                time.sleep(asked_s)
                wait_s = min(2 * wait_s, WAIT_MAX_S)

    def _give_up(self, nodes: Sequence[str]) -> None:
        """Take note that the controller needs nodes no more, and end the VMs of which it needs none.

        Of a VM whose grant was not heard of only its one worker is known.
        """
        vms = []
        with self._lock:
            for node in nodes:
                vm = vm_of(node)
                wanted = self._wanted.setdefault(vm, {known for known in self._nodes if vm_of(known) == vm})
                wanted.discard(node)
                if not wanted:
                    del self._wanted[vm]
                    vms.append(vm)
        if vms:
            self._tasks.put(lambda: self._end(vms))

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=self._look_every_s)
            except queue.Empty:
                task = self._look
            if task is None:
                return
            if self._over.is_set():
                continue
            try:
                task()
            except (
                Exception
            ) as error:  # a bug, or a provider's own error: without this thread nothing is asked any more
                self._fact("provider_failed", f"{type(error).__name__}: {error}")

    def _adopt(self) -> None:
        if self._inherited is None:
            return
        nodes, requests = self._inherited
        with self._told("provider_silent"):
            known = {vm_of(node) for node in nodes}
            ours = [vm for vm in self._provider.list() if vm.name in known or vm.request in requests]
            with self._lock:
                self._granted |= {vm.name: vm.request for vm in ours}
                for vm in ours:
                    self._wanted.setdefault(vm.name, set(nodes.intersection(vm.workers) or vm.workers))
            self._spending.living(ours, self._provider.price())
            for vm in reconcile(self._provider, {vm.name for vm in ours}):
                self._fact("vm_reconciled", f"{vm.name} of {vm.request} was left by an earlier manager: ended")
            self._inherited = None

    def _look(self) -> None:
        """Tell of VMs that were taken, or ended, behind our back: those that two looks in a row did not find.

        And end those that should have been ended, where the provider failed.
        """
        if self._inherited is not None:  # the provider did not answer: until it does, nobody is known to be nobody's
            self._adopt()
            return
        with self._told("provider_silent"):
            vms = self._provider.list()
            there = {vm.name for vm in vms}
            with self._lock:
                left = [vm for vm in vms if vm.name not in self._granted and vm.request not in self._under_way]
                missing = frozenset(self._granted) - there
                gone, self._missed = missing & self._missed, missing - self._missed
                for name in gone:
                    del self._granted[name]
                lost = sorted(node for name in gone for node in self._wanted.pop(name, ()))
            self._spending.living(vms, self._provider.price())
            for node in lost:
                self._inbox.put(WorkerLost(worker=node, cause="the provider has its VM no more"))
        if left:
            with self._told("vms_left"):
                self._provider.delete([vm.name for vm in left])
                self._fact("vm_reconciled", f"{', '.join(vm.name for vm in left)}: nobody's, ended")

    def _ask(self, action: RequestNodes) -> None:
        try:
            found = self._answer(action)
        except Exception as error:  # a bug, or a provider's own error: the controller must hear of the refusal
            detail = f"{type(error).__name__}: {error}"
            found = RequestRefused(request=action.request, cause="error", detail=detail)
        if isinstance(found, RequestRefused):
            self._end_what_came(action.request)
            answer: NodesGranted | RequestRefused = found
        else:
            nodes = tuple(node for vm in found for node in vm.workers)
            answer = NodesGranted(request=action.request, nodes=nodes, paid=_paid(found, time.time()))
        with self._lock:
            self._answers[action.request] = answer
            self._under_way.pop(action.request, None)
            for vm in () if isinstance(found, RequestRefused) else found:
                self._granted[vm.name] = action.request
                self._wanted.setdefault(vm.name, set(vm.workers))
        self._inbox.put(answer)

    def _answer(self, action: RequestNodes) -> tuple[Vm, ...] | RequestRefused:
        name = action.request
        waited = ""
        for attempt in range(TRIES):
            try:
                living = [vm for vm in self._provider.list() if vm.request != name]
                price = self._provider.price()
                allowed, why = self._spending.allowed(action.count, living, price)
                if not allowed:
                    return RequestRefused(request=name, cause="limit", detail=why)
                vms = self._provider.request(name, action.count, allowed)
                num_devices = sum(vm.num_devices for vm in vms)
                if why and num_devices < action.count:
                    self._fact("request_reduced", f"{name}: {num_devices} of {action.count} workers: {why}")
                self._spending.living([*living, *vms], price)
                self._told_of(vms)
                return vms
            except QuotaExceeded as error:
                return RequestRefused(request=name, cause="quota", detail=str(error))
            except CapacityShort as error:
                return RequestRefused(request=name, cause="capacity", detail=str(error))
            except (Throttled, Transient) as error:
                waited = str(error)
                wait_s = getattr(error, "retry_after_s", None) or WAIT_S * 2.0**attempt
            if attempt + 1 < TRIES:
                self._fact("provider_retried", f"{name}: {waited}; again in {min(wait_s, WAIT_MAX_S):g} s")
                if self._pause(min(wait_s, WAIT_MAX_S)):
                    break
        return RequestRefused(request=name, cause="error", detail=waited)

    def _end_what_came(self, request: RequestId) -> None:
        with self._told("vms_left"):
            names = [vm.name for vm in self._provider.list() if vm.request == request]
            if names:
                self._provider.delete(names)

    def _end(self, vms: Sequence[str]) -> None:
        with self._lock:
            for vm in vms:
                self._granted.pop(vm, None)
        with self._told("vms_left"):
            self._provider.delete(vms)
        self._count()

    def _count(self) -> None:
        with self._told("vms_not_counted"):
            self._spending.living(self._provider.list(), self._provider.price())

    def _told_of(self, vms: Sequence[Vm]) -> None:
        for vm in vms:
            self._inbox.put(Fact(name="vm_granted", worker=vm.name, detail=f"{vm.request} {vm.zone} {vm.size}".strip()))

    def _fact(self, name: str, detail: str) -> None:
        self._inbox.put(Fact(name=name, detail=detail))

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Tell a provider's error as a fact, and go on: what is left is found again by ``reconcile``."""
        try:
            yield
        except ProviderError as error:
            self._fact(name, str(error))


def _paid(vms: Sequence[Vm], now_s: float) -> dict[str, Paid]:
    """Say what the nodes of VMs that are granted now cost, a VM's evenly; nothing where nothing is known."""
    told: dict[str, Paid] = {}
    for vm in vms:
        before_s = 0.0 if vm.paid_since_s is None else max(0.0, now_s - vm.paid_since_s)
        if vm.usd_per_h is not None or before_s:
            share = None if vm.usd_per_h is None else vm.usd_per_h / vm.num_devices
            told |= dict.fromkeys(vm.workers, Paid(usd_per_h=share, before_s=before_s))
    return told

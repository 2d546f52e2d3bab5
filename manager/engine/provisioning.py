"""Carries out what the controller asks of a provider: requests one by one, and beside them what ends VMs."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from manager.controller.actions import ReleaseNodes, RequestId, RequestNodes
from manager.controller.events import NodesGranted, Paid, RequestRefused, WorkerLost
from manager.engine.inbox import Inbox
from manager.engine.lane import Lane
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
from morph.contract.vm_names import vm_of

log = logging.getLogger(__name__)

TRIES = 5
WAIT_S = 2.0
WAIT_MAX_S = 120.0
CLOSE_TIMEOUT_S = 10.0
LEAVE_PATIENCE_S = 300.0
"""How long ending the VMs of a run is tried again where the provider fails."""
ROOM_PATIENCE_S = 900.0
"""How long a request that was refused waits for VMs that are being ended: longer than a provider takes for that."""


class Provisioning:
    """Asks a provider for VMs and gives them back; answers come through the inbox.

    The controller's nodes are workers, one for each device of a VM. A request that comes again under its name while it
    is under way, or was answered, makes no further call: its answer is given again. A VM is ended once the controller
    gave up all of its workers.

    Two threads call the provider, so that neither waits for the other: one asks, the other ends and looks. What a VM
    that is being ended takes up is free for its replacement, as far as ``vms.limits`` go: it is gone in a minute, and
    the dollars count until then. Where the provider has no room beside it, the request waits for its end. VMs of a
    request under way that are given up are ended once it is answered: until then it might make them anew.

    Args:
        provider: ``request`` is called from one thread alone.
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
        self._answers: dict[RequestId, NodesGranted | RequestRefused] = {}
        self._look_every_s, self._close_timeout_s = look_every_s, close_timeout_s
        self._under_way: dict[RequestId, int] = {}
        self._granted: dict[str, RequestId] = {}
        self._wanted: dict[str, set[str]] = {}
        self._missed: frozenset[str] = frozenset()
        self._inherited: tuple[frozenset[str], frozenset[RequestId]] | None = None
        self._nodes = frozenset(nodes)
        self._ending: dict[int, frozenset[str]] = {}
        self._num_ends = 0
        self._ended_later: dict[RequestId, list[str]] = {}
        self._lock = threading.Condition()
        self._counting, self._adopting = threading.Lock(), threading.Lock()
        self._asks = Lane("morph-vm-requests", self._failed)
        self._ends = Lane("morph-vm-ends", self._failed, self._look, look_every_s)
        if nodes:
            self._ends.put(self._count)  # they cost from now on

    def request(self, action: RequestNodes) -> None:
        """Ask for VMs; returns at once."""
        with self._lock:
            answer = self._answers.get(action.request)
            if answer is None and action.request in self._under_way:
                return
            if answer is None:
                self._under_way[action.request] = action.count
        if answer is not None:
            self._inbox.put(answer)
        else:
            self._asks.put(lambda: self._ask(action))

    def release(self, action: ReleaseNodes) -> None:
        """Give VMs back of which all workers are given up by now; returns at once."""
        self._give_up(action.nodes)

    def begin(self, nodes: Collection[str], requests: Collection[RequestId]) -> None:
        """Before anything else: go on with the VMs of these nodes and requests, end any other; returns at once.

        Others are what a manager left that was killed, and of which this one knows nothing.
        """
        self._inherited = (frozenset(nodes), frozenset(requests))
        self._asks.put(self._adopt)

    def request_of(self, node: str) -> RequestId | None:
        """Return the request that a VM answers, granted or under way; None: it is none of ours, or was given back."""
        vm = vm_of(node)
        with self._lock:
            if vm in self._granted:
                return self._granted[vm]
            return self._under_way_of(vm)

    def paid_of(self, nodes: Collection[str]) -> dict[str, Paid]:
        """Return what nodes cost whose VMs came before their grant, as far as is known; blocks for a list of VMs."""
        with self._lock:
            vms = {vm_of(node) for node in nodes}
            early = {vm for vm in vms if (self._granted.get(vm) or self._under_way_of(vm)) in self._under_way}
        if not early:
            return {}
        try:
            listed = self._listed()
        except Exception:  # whatever it is, the node joins; what it costs is told with its grant
            return {}
        return _paid([vm for vm in listed if vm.name in early], time.time())

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
        with self._lock:
            self._lock.notify_all()
        self._provider.stop()
        self._asks.stop()
        self._ends.stop()
        until_s = time.monotonic() + self._close_timeout_s
        if not self._asks.join(until_s):
            sentence = f"a call to the provider did not end within {self._close_timeout_s:g} s"
            self._fact("provider_busy", sentence)
            log.warning("VMs of this run may be left: %s", sentence)
            return
        self._ends.join(until_s)  # an end that is still under way does not keep the others from theirs
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

    def _failed(self, error: Exception) -> None:
        self._fact("provider_failed", f"{type(error).__name__}: {error}")  # a bug, or a provider's own error

    def _give_up(self, nodes: Sequence[str]) -> None:
        """Take note that the controller needs nodes no more, and end the VMs of which it needs none; returns at once.

        Of a VM whose grant was not heard of only its one worker is known; it is ended once its request is answered.
        """
        now = []
        with self._lock:
            for node in nodes:
                vm = vm_of(node)
                wanted = self._wanted.setdefault(vm, {known for known in self._nodes if vm_of(known) == vm})
                wanted.discard(node)
                if wanted:
                    continue
                del self._wanted[vm]
                request = self._granted.pop(vm, None) or self._under_way_of(vm)
                if request in self._under_way:
                    self._ended_later.setdefault(request, []).append(vm)
                else:
                    now.append(vm)
            self._begin_end(now)

    def _begin_end(self, vms: Sequence[str]) -> None:
        if not vms:
            return
        with self._lock:
            self._num_ends += 1
            number = self._num_ends
            self._ending[number] = frozenset(vms)
        self._ends.put(lambda: self._end(vms, number))

    def _under_way_of(self, vm: str) -> RequestId | None:
        for request, count in self._under_way.items():
            if vm in {vm_name(request, index) for index in range(count)}:
                return request
        return None

    def _adopt(self) -> None:
        if not self._adopting.acquire(blocking=False):
            return  # the other thread is at it
        try:
            self._adopt_or_end()
        finally:
            self._adopting.release()

    def _adopt_or_end(self) -> None:
        if self._inherited is None:
            return
        nodes, requests = self._inherited
        with self._told("provider_silent"):
            vms = self._listed()
            with self._lock:
                known = {vm_of(node) for node in nodes}
                ours = [vm for vm in vms if vm.name in known or vm.request in requests]
                for vm in ours:
                    if not self._is_ending(vm.name):
                        self._granted[vm.name] = vm.request
                        self._wanted.setdefault(vm.name, set(nodes.intersection(vm.workers) or vm.workers))
                strays = self._nobodys(vms)
            if strays:
                self._provider.delete([vm.name for vm in strays])
            for vm in strays:
                self._fact("vm_reconciled", f"{vm.name} of {vm.request} was left by an earlier manager: ended")
            self._inherited = None

    def _look(self) -> None:
        """Tell of VMs that were taken, or ended, behind our back: those that two looks in a row did not find.

        And end those that should have been ended, where the provider failed.
        """
        if self._inherited is not None:  # the provider did not answer: until it does, nobody is known to be nobody's
            self._adopt()
            return
        left: list[str] = []
        with self._told("provider_silent"):
            vms = self._listed()
            there = {vm.name for vm in vms}
            with self._lock:
                left = [vm.name for vm in self._nobodys(vms)]
                missing = frozenset(self._granted) - there
                gone, self._missed = missing & self._missed, missing - self._missed
                for name in gone:
                    del self._granted[name]
                lost = sorted(node for name in gone for node in self._wanted.pop(name, ()))
            for node in lost:
                self._inbox.put(WorkerLost(worker=node, cause="the provider has its VM no more"))
        if left:
            with self._told("vms_left"):
                self._provider.delete(left)
                self._fact("vm_reconciled", f"{', '.join(left)}: nobody's, ended")

    def _ask(self, action: RequestNodes) -> None:
        try:
            found = self._answer(action)
        except Exception as error:  # a bug, or a provider's own error: the controller must hear of the refusal
            detail = f"{type(error).__name__}: {error}"
            found = RequestRefused(request=action.request, cause="error", detail=detail)
        with self._lock:
            given_up = self._ended_later.pop(action.request, [])
            answer = found if isinstance(found, RequestRefused) else _granted(action.request, found, given_up)
            self._answers[action.request] = answer
            self._under_way.pop(action.request, None)
            if isinstance(answer, RequestRefused) or isinstance(found, RequestRefused):  # what had come is ended
                self._begin_end([vm_name(action.request, index) for index in range(action.count)])
            else:
                for vm in [vm for vm in found if vm.name not in given_up]:
                    self._granted[vm.name] = action.request
                    self._wanted.setdefault(vm.name, set(vm.workers))
                self._begin_end(given_up)
        self._inbox.put(answer)

    def _answer(self, action: RequestNodes) -> tuple[Vm, ...] | RequestRefused:
        name = action.request
        waited = ""
        for attempt in range(TRIES):
            try:
                there = self._listed()
                with self._lock:
                    ends = frozenset(self._ending)
                    living = [vm for vm in there if vm.request != name and not self._is_ending(vm.name)]
                price = self._provider.price()
                allowed, why = self._spending.allowed(action.count, living, price)
                if not allowed:
                    return RequestRefused(request=name, cause="limit", detail=why)
                vms = self._provider.request(name, action.count, allowed)
                num_devices = sum(vm.num_devices for vm in vms)
                if why and num_devices < action.count:
                    self._fact("request_reduced", f"{name}: {num_devices} of {action.count} workers: {why}")
                self._count()
                self._told_of(vms)
                return vms
            except (QuotaExceeded, CapacityShort) as error:
                waited, cause = str(error), "quota" if isinstance(error, QuotaExceeded) else "capacity"
                if attempt + 1 < TRIES and self._wait_for_room(name, waited, ends):
                    continue
                return RequestRefused(request=name, cause=cause, detail=waited)
            except (Throttled, Transient) as error:
                waited = str(error)
                wait_s = getattr(error, "retry_after_s", None) or WAIT_S * 2.0**attempt
            if attempt + 1 < TRIES:
                self._fact("provider_retried", f"{name}: {waited}; again in {min(wait_s, WAIT_MAX_S):g} s")
                if self._pause(min(wait_s, WAIT_MAX_S)):
                    break
        return RequestRefused(request=name, cause="error", detail=waited)

    def _wait_for_room(self, request: RequestId, why: str, ends: Collection[int]) -> bool:
        """Wait for the end of VMs that took up room when it was asked for; returns whether some have made room."""
        if not ends:
            return False
        with self._lock:
            names = sorted(name for number in ends for name in self._ending.get(number, ()))
            if names:
                self._fact("provider_retried", f"{request}: {why}; again when {', '.join(names)} are ended")
            over = self._lock.wait_for(
                lambda: self._over.is_set() or self._ending.keys().isdisjoint(ends), ROOM_PATIENCE_S
            )
        return over and not self._over.is_set()

    def _end(self, vms: Sequence[str], number: int) -> None:
        try:
            with self._told("vms_left"):
                self._provider.delete(vms)
        finally:
            with self._lock:
                del self._ending[number]
                self._lock.notify_all()
        self._count()

    def _count(self) -> None:
        with self._told("vms_not_counted"):
            self._listed()

    def _listed(self) -> tuple[Vm, ...]:
        """List and count what there is: after each change, and one after the other, so that the last one is right."""
        with self._counting:
            vms = self._provider.list()
            self._spending.living(vms, self._provider.price())
        return vms

    def _nobodys(self, vms: Sequence[Vm]) -> list[Vm]:
        """Return the VMs that nobody waits for and that are not about to be ended; the lock is held.

        VMs that were listed before: a request is under way before its VMs are there.
        """
        return [
            vm
            for vm in vms
            if vm.name not in self._granted and vm.request not in self._under_way and not self._is_ending(vm.name)
        ]

    def _is_ending(self, vm: str) -> bool:
        return any(vm in names for names in self._ending.values())

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


def _granted(request: RequestId, found: Sequence[Vm], given_up: Collection[str]) -> NodesGranted | RequestRefused:
    """Return the grant of the VMs that were not given up before it, which nobody awaits, with what they cost."""
    vms, now_s = [vm for vm in found if vm.name not in given_up], time.time()
    if not vms:
        return RequestRefused(request=request, cause="error", detail="its VMs were lost before it was granted")
    nodes = tuple(node for vm in vms for node in vm.workers)
    return NodesGranted(request=request, nodes=nodes, paid=_paid(vms, now_s))


def _paid(vms: Sequence[Vm], now_s: float) -> dict[str, Paid]:
    """Say what the workers of VMs cost; nothing of those of which nothing is known."""
    paid: dict[str, Paid] = {}
    for vm in vms:
        before_s = 0.0 if vm.paid_since_s is None else max(0.0, now_s - vm.paid_since_s)
        if vm.usd_per_h is not None or before_s or vm.num_devices > 1:
            said = Paid(usd_per_h=vm.usd_per_h, num_nodes=vm.num_devices, before_s=before_s)
            paid |= dict.fromkeys(vm.workers, said)
    return paid

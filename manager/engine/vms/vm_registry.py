"""Keeps track of VMs that are requested, granted, given up and being ended, and of their workers; calls no provider."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from manager.controller.node_requests import request_name
from manager.controller.state.actions import RequestId, RequestNodes
from manager.controller.state.events import Cause, NodeFacts, NodesGranted, NodesStarted, Paid, RequestRefused
from manager.controller.state.state import ControllerState
from manager.providers.interface.provider import (
    Granted,
    Misconfigured,
    ProviderError,
    QuotaExceeded,
    Refused,
    Vm,
    request_part,
    vm_name,
)
from morph.contract.vm_names import vm_of

Answer = NodesGranted | RequestRefused


@dataclass(frozen=True)
class Inherited:
    """``vms``: requested from a provider, up or booting. ``nodes``: all workers that the controller knows, also lost
    ones.
    """

    vms: tuple[Vm, ...] = ()
    nodes: frozenset[str] = frozenset()


def inherited(state: ControllerState, up: Collection[str]) -> Inherited:
    """Return the wanted VMs, by the request that they answer.

    A VM is named after its request, so it is known even if its grant was not journalled before the manager died. VMs
    are wanted if they are up and have workers that the controller knows, if they were granted and are awaited, or if
    they are up while their request has no answer. All other VMs that are up were given up.
    """
    if not state.config.target_nodes:
        return Inherited()
    names = [request_name(state.config, number + 1) for number in range(state.provisioning.num_requests)]
    request_of = {request_part(name): name for name in names}
    awaited = [worker for request in state.provisioning.requests.values() for worker in request.granted]
    unanswered = {name for name, request in state.provisioning.requests.items() if request.count}
    coming = [worker for worker in up if _request(worker, request_of) in unanswered]
    wanted = dict.fromkeys([*(worker for worker in state.workers if worker in up), *awaited, *coming])
    vms = tuple(Vm(name=worker, request=request) for worker in wanted if (request := _request(worker, request_of)))
    return Inherited(vms, frozenset(state.workers))


def _request(worker: str, request_of: dict[str, str]) -> str | None:
    return request_of.get(worker.rpartition("-")[0])


@dataclass(frozen=True)
class End:
    """VMs to be ended; they are recorded as such until ``VmRegistry.ended`` is called."""

    number: int
    vms: tuple[str, ...]


class VmRegistry:
    """The VMs of a run; one is ended once none of its workers is wanted. Thread-safe; only ``wait_ended`` blocks."""

    def __init__(self) -> None:
        self._answers: dict[RequestId, Answer] = {}
        self._under_way: dict[RequestId, int] = {}
        self._granted: dict[str, RequestId] = {}
        self._wanted: dict[str, set[str]] = {}
        self._waiting: set[str] = set()
        self._missed: frozenset[str] = frozenset()
        self._ends: dict[int, End] = {}
        self._num_ends = self._num_over = 0
        self._ended_later: dict[RequestId, set[str]] = {}
        self._gone: set[str] = set()
        self._lock = threading.Condition()
        self._over = False

    def ask(self, action: RequestNodes) -> tuple[bool, Answer | None]:
        """Record a request; return whether it is new, and its answer if it already has one."""
        with self._lock:
            answer = self._answers.get(action.request)
            if answer is not None or action.request in self._under_way:
                return False, answer
            self._under_way[action.request] = action.count
            return True, None

    def answer(
        self, action: RequestNodes, grant: Granted | RequestRefused, known: Collection[str]
    ) -> tuple[Answer, End | None]:
        """Record the answer to a request; return the event for the controller, and the VMs to be ended.

        ``known``: all workers that the controller knows; their VMs live on, whatever the answer is.
        """
        with self._lock:
            of_known = {vm_of(worker) for worker in known}
            given_up = self._ended_later.pop(action.request, set()) - of_known
            there = () if isinstance(grant, RequestRefused) else grant
            wanted = {vm.name: set(vm.workers) - (self._gone - set(known)) for vm in there}
            given_up |= {vm for vm, workers in wanted.items() if not workers}
            vms = [vm for vm in there if vm.name not in given_up]
            for vm in vms:
                self._grant(vm, action.request)
                self._wanted[vm.name] = wanted[vm.name]
            if isinstance(grant, RequestRefused):
                answer: Answer = grant
            elif vms:
                nodes = tuple(worker for vm in vms for worker in vm.workers if worker in wanted[vm.name])
                costs = {worker: cost for worker, cost in paid(vms, time.time()).items() if worker in nodes}
                facts = {worker: known for worker, known in facts_of(vms).items() if worker in nodes}
                waiting = tuple(worker for vm in vms if vm.waits for worker in vm.workers if worker in nodes)
                answer = NodesGranted(
                    request=action.request,
                    nodes=nodes,
                    paid=costs,
                    facts=facts,
                    waiting=waiting,
                    short=None if grant.missing is None else cause_of(grant.missing),
                    detail="; ".join([*grant.decisions, *([] if grant.missing is None else [str(grant.missing)])]),
                )
            else:
                lost = "its VMs were lost before it was granted"
                answer = RequestRefused(request=action.request, cause="error", detail=lost)
            self._answers[action.request] = answer
            self._under_way.pop(action.request, None)
            if isinstance(answer, RequestRefused):
                return answer, self._end(self._refuse(action, known) | given_up)
            return answer, self._end(given_up)

    def _refuse(self, action: RequestNodes, known: Collection[str]) -> set[str]:
        """Keep the VMs of a refused request that have a known worker; return the others."""
        vms = {vm_name(action.request, index) for index in range(action.count)}
        vms |= {vm for vm, request in self._granted.items() if request == action.request}
        for vm in vms:
            self._granted.pop(vm, None)
            self._wanted.pop(vm, None)
        for worker in known:
            if (vm := vm_of(worker)) in vms:
                self._granted[vm] = action.request
                self._wanted.setdefault(vm, set()).add(worker)
        return vms - self._granted.keys()

    def request_of(self, worker: str) -> RequestId | None:
        """Return the request that a VM answers, granted or under way; None: the VM is not ours, or was given back."""
        vm = vm_of(worker)
        with self._lock:
            return self._granted.get(vm) or self._under_way_of(vm)

    def granted(self) -> list[str]:
        """Return the VMs that were granted and not given up."""
        with self._lock:
            return sorted(self._granted)

    def is_settled(self, vm: str) -> bool:
        """Return whether a VM was granted, and no request that it answers is under way."""
        with self._lock:
            return vm in self._granted and self._granted[vm] not in self._under_way

    def ungranted(self, workers: Collection[str]) -> frozenset[str]:
        """Return the VMs of workers whose requests are unanswered or were refused, and those last known as queued."""
        with self._lock:
            vms = {vm_of(worker) for worker in workers}
            early = self._under_way.keys() | {
                name for name, answer in self._answers.items() if isinstance(answer, RequestRefused)
            }
            return frozenset(
                vm for vm in vms if vm in self._waiting or (self._granted.get(vm) or self._under_way_of(vm)) in early
            )

    def give_up(self, workers: Sequence[str], known: Collection[str]) -> End | None:
        """Record that the controller no longer needs these workers; return the VMs of which it needs no worker.

        If a VM's grant has not come, only one of its workers is known. Such a VM is ended once its request is answered,
        because until then the request might make it again. ``known``: all other workers that the controller knows.
        """
        now = []
        with self._lock:
            self._gone.update(workers)
            for worker in workers:
                vm = vm_of(worker)
                wanted = self._wanted.setdefault(vm, set())
                wanted |= {other for other in known if vm_of(other) == vm and other not in workers}
                wanted.discard(worker)
                if wanted:
                    continue
                del self._wanted[vm]
                request = self._granted.pop(vm, None) or self._under_way_of(vm)
                if request in self._under_way:
                    self._ended_later.setdefault(request, set()).add(vm)
                else:
                    now.append(vm)
            return self._end(now)

    def adopt(self, vms: Sequence[Vm], workers: frozenset[str], requests: Collection[RequestId]) -> list[Vm]:
        """Treat these workers' and requests' VMs as granted, unless given up or answered by now; return the others."""
        with self._lock:
            workers = workers - self._gone
            known = {vm_of(worker) for worker in workers}
            unanswered = set(requests) - self._answers.keys()
            for vm in vms:
                is_given_up = vm.name in self._ended_later.get(vm.request, ()) or self._gone.issuperset(vm.workers)
                is_ours = vm.name in known or vm.request in unanswered
                if is_ours and not is_given_up and not self._is_ending(vm.name):
                    self._grant(vm, vm.request)
                    awaited = () if vm.request in unanswered else workers.intersection(vm.workers)
                    self._wanted.setdefault(vm.name, set(awaited or vm.workers) - self._gone)
            return self._nobodys(vms)

    def compare(self, vms: Sequence[Vm]) -> tuple[list[Vm], list[str]]:
        """Return the stray VMs, and the workers whose VMs are gone: missing now and at the last comparison."""
        with self._lock:
            missing = frozenset(self._granted) - {vm.name for vm in vms}
            gone, self._missed = missing & self._missed, missing - self._missed
            for name in gone:
                del self._granted[name]
            return self._nobodys(vms), sorted(worker for name in gone for worker in self._wanted.pop(name, ()))

    def started(self, vms: Sequence[Vm], now_s: float) -> list[NodesStarted]:
        """Return the events for VMs that are listed and no longer wait in their market's queue."""
        with self._lock:
            self._waiting &= self._granted.keys()
            begun = [vm for vm in vms if vm.name in self._waiting and not vm.waits]
            self._waiting -= {vm.name for vm in begun}
            requests = {vm.name: self._granted[vm.name] for vm in begun}
        return [
            NodesStarted(request=requests[vm.name], nodes=vm.workers, paid=paid([vm], now_s), facts=facts_of([vm]))
            for vm in begun
        ]

    def living(self, vms: Sequence[Vm], request: RequestId) -> tuple[list[Vm], int]:
        """Return the VMs of other requests that are not being ended, and the number of finished ends."""
        with self._lock:
            living = [vm for vm in vms if vm.request != request and not self._is_ending(vm.name)]
            return living, self._num_over

    def end(self, vms: Collection[str]) -> End | None:
        """Record that stray VMs are to be ended, and return their end; None if there are none."""
        with self._lock:
            return self._end(vms)

    def ended(self, end: End) -> None:
        """Record that VMs are ended, or that ending them was tried."""
        with self._lock:
            del self._ends[end.number]
            self._num_over += 1
            self._lock.notify_all()

    def ending(self) -> list[str]:
        """Return the VMs whose ends are under way."""
        with self._lock:
            return sorted(vm for end in self._ends.values() for vm in end.vms)

    def wait_ended(self, num_over: int, patience_s: float) -> bool:
        """Wait until more ends are over than these; returns whether that happened before the registry was closed."""
        with self._lock:
            there = self._lock.wait_for(lambda: self._over or self._num_over > num_over, patience_s)
            return there and not self._over

    def close(self) -> None:
        """End all waits."""
        with self._lock:
            self._over = True
            self._lock.notify_all()

    def _grant(self, vm: Vm, request: RequestId) -> None:
        self._granted[vm.name] = request
        if vm.waits:
            self._waiting.add(vm.name)

    def _end(self, vms: Collection[str]) -> End | None:
        if not vms:
            return None
        self._num_ends += 1
        end = End(self._num_ends, tuple(sorted(vms)))
        self._ends[end.number] = end
        return end

    def _under_way_of(self, vm: str) -> RequestId | None:
        for request, count in self._under_way.items():
            if vm in {vm_name(request, index) for index in range(count)}:
                return request
        return None

    def _nobodys(self, vms: Sequence[Vm]) -> list[Vm]:
        """Return the VMs that are not wanted and that are not being ended yet.

        These VMs were listed before: a request is under way before its VMs exist.
        """
        return [
            vm
            for vm in vms
            if vm.name not in self._granted and vm.request not in self._under_way and not self._is_ending(vm.name)
        ]

    def _is_ending(self, vm: str) -> bool:
        return any(vm in end.vms for end in self._ends.values())


def cause_of(error: ProviderError) -> Cause:
    """Return what kind of error keeps VMs from coming."""
    kinds: tuple[tuple[type[ProviderError], Cause], ...] = (
        (Misconfigured, "input"), (QuotaExceeded, "quota"), (Refused, "capacity")
    )  # fmt: skip
    return next((cause for kind, cause in kinds if isinstance(error, kind)), "error")


def paid(vms: Sequence[Vm], now_s: float) -> dict[str, Paid]:
    """Return the prices of the VMs' workers, without those that are unknown."""
    by_worker: dict[str, Paid] = {}
    for vm in vms:
        before_s = 0.0 if vm.paid_since_s is None else max(0.0, now_s - vm.paid_since_s)
        if vm.usd_per_h is not None or before_s or vm.num_devices > 1:
            said = Paid(usd_per_h=vm.usd_per_h, num_nodes=vm.num_devices, before_s=before_s)
            by_worker |= dict.fromkeys(vm.workers, said)
    return by_worker


def facts_of(vms: Sequence[Vm]) -> dict[str, NodeFacts]:
    """Return the workers' kinds of VM, without those that are unknown."""
    by_worker: dict[str, NodeFacts] = {}
    for vm in vms:
        zone = "" if vm.zone == "unknown" else vm.zone
        if vm.provider:
            said = NodeFacts(provider=vm.provider, size=vm.size, region=vm.region, zone=zone, node_type=vm.node_type)
            by_worker |= dict.fromkeys(vm.workers, said)
    return by_worker

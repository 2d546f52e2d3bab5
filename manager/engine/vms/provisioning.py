"""Carries out what the controller asks of a provider: requests one by one, and beside them what ends VMs."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

from manager.controller.state.actions import ReleaseNodes, RequestId, RequestNodes
from manager.controller.state.events import NodeFacts, Paid, RequestRefused, WorkerLost
from manager.engine.loop.event_queue import EventQueue
from manager.engine.vms.budget import Spending
from manager.engine.vms.vm_registry import End, VmRegistry, facts_of, paid
from manager.host.serial_executor import ParallelExecutor, SerialExecutor
from manager.journal.records import VM_KILLED, Fact
from manager.providers.interface.provider import (
    CapacityShort,
    Provider,
    ProviderError,
    QuotaExceeded,
    Throttled,
    Transient,
    Vm,
    end_all,
)
from morph.contract.vm_names import vm_of
from morph.contract.waits import Backoff

log = logging.getLogger(__name__)

TRIES = 5
RETRIES = Backoff(first_s=2.0, most_s=120.0)
RETRY_AFTER_MAX_S = 3600.0
"""Of what a provider says itself: asked earlier, it only refuses for longer."""
CLOSE_TIMEOUT_S = 10.0
ROOM_LOOK_S = 15.0
ROOM_PATIENCE_S = 900.0
"""How long a request that was refused waits for VMs that are being ended: longer than a provider takes for that."""


class Provisioning:
    """Asks a provider for VMs and gives them back; answers come through the event queue.

    The controller's nodes are workers, one for each device of a VM. A request that comes again under its name while it
    is under way, or was answered, makes no further call: its answer is given again. A VM is ended once the controller
    gave up all of its workers.

    One thread asks the provider, another looks, and each end has one of its own: nothing waits for a VM that does not
    end. What a VM that is being ended takes up is free for its replacement, as far as ``vms.limits`` go: it is gone in
    a minute, and the dollars count until then. Where the provider has no room beside it, the request waits until one
    of those that are being ended is gone. VMs of a request under way that are given up are ended once it is answered:
    until then it might make them anew. A refusal ends what had come of its request, but for VMs of which a worker
    joined already.

    Args:
        provider: ``request`` is called from one thread alone.
        event_queue: Where ``NodesGranted`` and ``RequestRefused`` go, and facts.
        spending: What the user allows.
        pause: Waits some seconds; returns True when everything is over.
        nodes: Nodes that the controller knows from another manager, whose VMs the provider lists.
        look_every_s: How often the provider is asked which VMs there are, for one may be taken while it boots; None:
            never.
        close_timeout_s: How long ``close`` waits for a call that is under way before it ends the other VMs.
        end_all: Ends every VM of the run, again where that may help.
        least_vms: With fewer, a request is of no use: where the limits allow no more, it is refused.
    """

    def __init__(
        self,
        provider: Provider,
        event_queue: EventQueue,
        spending: Spending,
        pause: Callable[[float], bool] | None = None,
        *,
        nodes: Collection[str] = (),
        look_every_s: float | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        end_all: Callable[..., Sequence[str]] = end_all,
        least_vms: int = 1,
    ) -> None:
        self._provider = provider
        self._event_queue = event_queue
        self._spending = spending
        self._over, self._hurry = threading.Event(), threading.Event()
        self._pause = pause or self._over.wait
        self._registry = VmRegistry()
        self._close_timeout_s = close_timeout_s
        self._end_all = end_all
        self._least_vms = least_vms
        self.failure: Exception | None = None
        """Why the last request that failed was refused, where asking again does not help."""
        self._inherited: tuple[frozenset[str], frozenset[RequestId]] | None = None
        self._has_begun = False
        self._nodes = frozenset(nodes)
        self._joined = {vm_of(node) for node in nodes}
        self._counting, self._adopting = threading.Lock(), threading.Lock()
        self._asks = SerialExecutor("morph-vm-requests", self._failed)
        self._looks = SerialExecutor("morph-vm-looks", self._failed, self._look, look_every_s)
        self._ends = ParallelExecutor("morph-vm-ends", self._failed)
        if nodes:
            self._looks.put(self._count)  # they cost from now on

    def request(self, action: RequestNodes) -> None:
        """Ask for VMs; returns at once."""
        is_new, answer = self._registry.ask(action)
        if answer is not None:
            self._event_queue.put(answer)
        elif is_new:
            self._asks.put(lambda: self._ask(action))

    def release(self, action: ReleaseNodes) -> None:
        """End the VMs of which all workers are given up by now; returns at once."""
        self._end(self._registry.give_up(action.nodes, self._nodes), keep_logs=True)

    def begin(self, nodes: Collection[str], requests: Collection[RequestId]) -> None:
        """Before anything else: go on with the VMs of these nodes and requests, end any other; returns at once.

        Others are what a manager left that was killed, and of which this one knows nothing.
        """
        self._inherited = (frozenset(nodes), frozenset(requests))
        self._has_begun = True
        self._asks.put(self._adopt)

    def request_of(self, node: str) -> RequestId | None:
        """Return the request that a VM answers, granted or under way; None: it is none of ours, or was given back."""
        return self._registry.request_of(node)

    def known_of(self, nodes: Collection[str]) -> tuple[dict[str, Paid], dict[str, NodeFacts]]:
        """Return what nodes cost, and what they are, whose VMs came before their grant; blocks for a list of VMs.

        Of those of which something is known.
        """
        early = self._registry.ungranted(nodes)
        if not early:
            return {}, {}
        try:
            listed = self._listed()
        except Exception:  # whatever it is, the node joins; what it costs is told with its grant
            return {}, {}
        vms = [vm for vm in listed if vm.name in early]
        return paid(vms, time.time()), facts_of(vms)

    def may_take(self, vm: str) -> bool:
        """Whether a VM is granted and was not given up; one of a request under way might be made anew."""
        return self._registry.is_settled(vm)

    def evict(self, vm: str) -> bool:
        return self._provider.evict(vm)

    def take(self, vms: Mapping[str, Collection[str]]) -> None:
        """End VMs, given with their workers, behind the controller's back, as a provider does that takes them; blocks.

        Raises:
            ProviderError: naming those that are left.
        """
        for worker in (worker for workers in vms.values() for worker in workers):
            self._event_queue.put(Fact(name=VM_KILLED, worker=worker))
        self._provider.delete([*vms])
        self._count()

    def know(self, nodes: Collection[str]) -> None:
        """Take note of the nodes that the controller knows: whatever comes of their request, their VMs go on."""
        self._nodes = frozenset(nodes)
        self._joined |= {vm_of(node) for node in nodes}

    def close(self) -> None:
        """Ask for nothing any more, and end every VM of the run; blocks for a bounded time: see ``end_all``.

        What cannot be ended in time is told by name, as a fact and to the user, with the command that ends it.
        """
        self._over.set()
        self._registry.close()
        self._provider.stop()
        for executor in (self._asks, self._looks, self._ends):
            executor.stop()
        until_s = time.monotonic() + self._close_timeout_s
        if not self._asks.join(until_s):
            sentence = f"a call to the provider did not end within {self._close_timeout_s:g} s, and may make VMs"
            self._warn("provider_busy", sentence + self._command())
        for executor in (self._looks, self._ends):
            executor.join(until_s)  # an end that is still under way does not keep the others from theirs
        try:
            told = partial(self._warn, "provider_retried")
            for left in self._end_all(self._provider, told=told, hurry=self._hurry):
                self._fact("orphan_ended", left)
        except Exception as error:  # whatever it is, the user must hear of it, and the rest be closed
            granted = self._registry.granted()
            named = any(vm in str(error) for vm in granted)  # else it is not known which of them are left
            perhaps = f"; {', '.join(granted)} may be there" if granted and not named else ""
            self._warn("vms_left", f"{error}{perhaps}{self._command()}")

    def hurry(self) -> None:
        """From now on ``close`` tries each end once more at most; returns at once."""
        self._hurry.set()

    def _command(self) -> str:
        """What the user can do about VMs that are left."""
        command = self._provider.capabilities().ending
        return f"; what ends them: {command}" if command else ""

    def _warn(self, name: str, sentence: str) -> None:
        self._fact(name, sentence)
        log.warning("VMs of this run may be left: %s", sentence)

    def _failed(self, error: Exception) -> None:
        self._fact("provider_failed", f"{type(error).__name__}: {error}")  # a bug, or a provider's own error

    def _end(self, end: End | None, facts: Sequence[str] = (), *, keep_logs: bool = False) -> None:
        """Have VMs ended; returns at once.

        Args:
            end: Which.
            facts: Told once they are ended, of those that nobody had asked to end.
            keep_logs: Of those that never joined, for with the VM goes what it said of why.
        """
        if end is not None:
            silent = [vm for vm in end.vms if vm not in self._joined] if keep_logs else []
            self._ends.put(lambda: self._delete(end, facts, silent))

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
        strays: list[Vm] = []
        with self._told("provider_silent"):
            strays = self._registry.adopt(self._listed(), nodes, requests)
            self._inherited = None  # one that cannot be ended is nobody's from now on, and no reason not to look
        facts = [f"{vm.name} of {vm.request} was left by an earlier manager: ended" for vm in strays]
        self._end(self._registry.end([vm.name for vm in strays]), facts)

    def _look(self) -> None:
        """Tell of VMs that were taken, or ended, behind our back: those that two looks in a row did not find.

        And end those that should have been ended, where the provider failed. Before ``begin`` nothing is known of any.
        """
        if not self._has_begun:
            return
        if self._inherited is not None:  # the provider did not answer: until it does, nobody is known to be nobody's
            self._adopt()
            return
        with self._told("provider_silent"):
            strays, lost = self._registry.compare(self._listed())
            for node in lost:
                self._event_queue.put(WorkerLost(worker=node, cause="the provider has its VM no more"))
            left = [vm.name for vm in strays]
            self._end(self._registry.end(left), [f"{', '.join(left)}: of no run, ended"])

    def _ask(self, action: RequestNodes) -> None:
        try:
            found: tuple[Vm, ...] | RequestRefused = self._answer(action)
        except Exception as error:  # a bug, or a provider's own error: the controller must hear of the refusal
            self.failure = _without_frames(error)
            detail = f"{type(error).__name__}: {error}"
            found = RequestRefused(request=action.request, cause="error", detail=detail)
        with self._counting:  # a VM is told of as started once its grant is
            answer, end = self._registry.answer(action, found, self._nodes)
            self._event_queue.put(answer)
        self._end(end)

    def _answer(self, action: RequestNodes) -> tuple[Vm, ...] | RequestRefused:
        name = action.request
        waited, attempt, until_s = "", 0, time.monotonic() + ROOM_PATIENCE_S
        while True:
            try:
                listed = self._listed()
                living, num_over = self._registry.living(listed, name)
                of_type = {"node_type": action.node_type} if action.node_type else {}
                price = self._provider.price(**of_type)
                allowed, why = self._spending.allowed(action.count, living, price)
                if allowed < self._least_vms:
                    return RequestRefused(request=name, cause="limit", detail=why)
                vms = self._provider.request(name, action.count, allowed, **of_type)
                num_devices = sum(vm.num_devices for vm in vms)
                if why and num_devices < action.count:
                    self._fact("request_reduced", f"{name}: {num_devices} of {action.count} workers: {why}")
                self._count()
                self._told_of(vms)
                return vms
            except (QuotaExceeded, CapacityShort) as error:
                waited = str(error)
                if self._wait_for_room(name, waited, num_over, {vm.name for vm in listed}, until_s):
                    continue
                is_quota = isinstance(error, QuotaExceeded)
                cause: Literal["quota", "capacity"] = "quota" if is_quota else "capacity"
                return RequestRefused(request=name, cause=cause, detail=waited, retry_s=error.retry_after_s)
            except (Throttled, Transient) as error:
                waited = str(error)
                own_s = RETRIES.pause_s(attempt)
                wait_s = own_s if error.retry_after_s is None else min(error.retry_after_s, RETRY_AFTER_MAX_S)
            attempt += 1
            if attempt < TRIES:
                self._fact("provider_retried", f"{name}: {waited}; again in {wait_s:g} s")
            if attempt == TRIES or self._pause(wait_s):
                return RequestRefused(request=name, cause="error", detail=waited)

    def _wait_for_room(
        self, request: RequestId, why: str, num_over: int, listed: Collection[str], until_s: float
    ) -> bool:
        """Wait for room that VMs took up when it was requested, where any are being ended; returns whether one is gone.

        Args:
            request: That was refused.
            why: It was.
            num_over: How many ends were over then.
            listed: The VMs that were there then.
            until_s: A second of the monotonic clock.
        """
        if names := [name for name in self._registry.ending() if name in listed]:
            self._fact("provider_retried", f"{request}: {why}; again when one of {', '.join(names)} is ended")
        while names and not self._over.is_set() and (left_s := until_s - time.monotonic()) > 0:
            if self._registry.wait_ended(num_over, min(left_s, ROOM_LOOK_S)):
                return True
            with self._told("provider_silent"):  # of those that end together, one may be stuck
                if set(listed) - {vm.name for vm in self._listed()}:
                    return True
        return self._registry.wait_ended(num_over, 0.0)

    def _delete(self, end: End, facts: Sequence[str], silent: Sequence[str]) -> None:
        try:
            for vm in silent:
                self._keep_log(vm)
            with self._told("vms_left"):
                self._provider.delete(end.vms)
                for fact in facts:
                    self._fact("vm_reconciled", fact)
        finally:
            self._registry.ended(end)
        self._count()

    def _keep_log(self, vm: str) -> None:
        try:
            log = self._provider.boot_log(vm)
        except Exception as error:  # another package's provider: whatever it is, the VM costs until it is ended
            self._failed(error)
        else:
            if log:
                self._event_queue.put(Fact(name="vm_boot_log", worker=vm, detail=log))

    def _count(self) -> None:
        with self._told("vms_not_counted"):
            self._listed()

    def _listed(self) -> tuple[Vm, ...]:
        """List and count what there is: after each change, and one after the other, so that the last one is right."""
        with self._counting:
            vms = self._provider.list()
            self._spending.living(vms, self._provider.price())
            for started in self._registry.started(vms, time.time()):
                self._event_queue.put(started)
        return vms

    def _told_of(self, vms: Sequence[Vm]) -> None:
        for vm in vms:
            self._event_queue.put(
                Fact(name="vm_granted", worker=vm.name, detail=f"{vm.request} {vm.zone} {vm.size}".strip())
            )

    def _fact(self, name: str, detail: str) -> None:
        self._event_queue.put(Fact(name=name, detail=detail))

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Tell a provider's error as a fact, and go on: what is left is found again by ``reconcile``."""
        try:
            yield
        except ProviderError as error:
            self._fact(name, str(error))


def _without_frames(error: Exception) -> Exception:
    """Let go of where an error was raised: the frames hold the connections of the call that failed."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)

"""Carries out the controller's orders to a provider: one request at a time, and in parallel the ends of VMs."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from manager.controller.state.actions import ReleaseNodes, RequestId, RequestNodes
from manager.controller.state.events import NodeFacts, Paid, RequestRefused, WorkerLost
from manager.engine.loop.event_queue import EventQueue
from manager.engine.vms.budget import Spending
from manager.engine.vms.serial_executor import ParallelExecutor, SerialExecutor
from manager.engine.vms.vm_registry import End, VmRegistry, cause_of, facts_of, paid
from manager.journal.records import VM_KILLED, Fact
from manager.providers.interface.provider import (
    ENDED,
    RETRYABLE,
    Granted,
    Misconfigured,
    Provider,
    ProviderError,
    Refused,
    Vm,
    end_all,
)
from morph.contract.vm_names import vm_of
from morph.contract.waits import Backoff

log = logging.getLogger(__name__)

TRIES = 5
RETRIES = Backoff(first_s=2.0, most_s=120.0)
RETRY_AFTER_MAX_S = 3600.0
"""Seconds for which a request waits because its provider asks for it; such a wait is not a failure."""
CLOSE_TIMEOUT_S = 10.0
ROOM_LOOK_S = 15.0
ROOM_PATIENCE_S = 900.0
"""Seconds for which a refused request waits for VMs that are being ended, more than a provider needs for this."""


class Provisioner:
    """Requests VMs from a provider and gives them back; answers come through the event queue.

    A VM has a worker for each of its devices. A request that is repeated under its name, while it is under way or after
    its answer, makes no further call: the same answer is given again. A VM is ended once the controller has given up
    all of its workers. One thread makes requests, another lists VMs, and each end of a VM has its own thread, so that
    nothing waits for a VM that does not end. A VM that is being ended does not count against ``vms.limits`` for its
    replacement: it is gone in a minute, and its dollars count until then. If the provider has no room for the
    replacement, the request waits until one of the VMs that are being ended is gone. VMs that are given up while their
    request is under way are ended once it is answered, because until then it might make them again. After a refusal,
    the request's VMs are ended, except VMs with a worker that has joined already. ``pause``: waits some seconds;
    returns True if everything is over. ``nodes``: workers of an earlier manager that the controller knows; the provider
    lists their VMs. ``look_every_s``: the time between two lists of VMs from the provider, because a VM may be
    preempted while it boots; None: no lists. ``close_timeout_s``: how long ``close`` waits for a call that is under way
    before it ends the other VMs. ``end_all``: ends every VM of the run, with retries where they may help.
    ``least_vms``: a request for fewer VMs is useless: it is refused if the limits do not allow this number.
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
        self._is_silent = False
        self._waits_for: dict[str, str] = {}
        self.failure: Exception | None = None
        """The reason why the last failed request was refused, if repeating the request does not help."""
        self.left: Exception | None = None
        """The reason why ``close`` may have left VMs."""
        self._inherited: tuple[frozenset[str], frozenset[RequestId]] | None = None
        self._has_begun = False
        self._nodes = frozenset(nodes)
        self._joined = {vm_of(worker) for worker in nodes}
        self._counting, self._adopting = threading.Lock(), threading.Lock()
        self._asks = SerialExecutor("morph-vm-requests", self._failed)
        self._looks = SerialExecutor("morph-vm-looks", self._failed, self._look, look_every_s)
        self._ends = ParallelExecutor("morph-vm-ends", self._failed)
        if nodes:
            self._looks.put(self._count)  # these VMs cost money from now on

    def request(self, action: RequestNodes) -> None:
        """Request VMs; returns at once."""
        is_new, answer = self._registry.ask(action)
        if answer is not None:
            self._event_queue.put(answer)
        elif is_new:
            self._asks.put(lambda: self._ask(action))

    def release(self, action: ReleaseNodes) -> None:
        """End the VMs whose workers are all given up by now; returns at once."""
        self._end(self._registry.give_up(action.nodes, self._nodes), keep_logs=True)

    def begin(self, workers: Collection[str], requests: Collection[RequestId]) -> None:
        """Continue with the VMs of these workers and requests; end others that a killed manager left. Call it first."""
        self._inherited = (frozenset(workers), frozenset(requests))
        self._has_begun = True
        self._asks.put(self._adopt)

    def request_of(self, worker: str) -> RequestId | None:
        """Return the request that a VM answers, granted or under way; None: the VM is not ours, or was given back."""
        return self._registry.request_of(worker)

    def known_of(self, workers: Collection[str]) -> tuple[dict[str, Paid], dict[str, NodeFacts]]:
        """Return the known prices and types of workers whose VMs came before their grant; blocks for a list of VMs."""
        early = self._registry.ungranted(workers)
        if not early:
            return {}, {}
        try:
            listed = self._listed()
        except Exception:  # any error: the worker joins, and its price comes with its grant
            return {}, {}
        vms = [vm for vm in listed if vm.name in early]
        return paid(vms, time.time()), facts_of(vms)

    def may_take(self, vm: str) -> bool:
        """Return whether a VM is granted and not given up; while its request is under way it might be made again."""
        return self._registry.is_settled(vm)

    def evict(self, vm: str) -> bool:
        return self._provider.evict(vm)

    def take(self, vms: Mapping[str, Collection[str]]) -> None:
        """End VMs, given with their workers, without telling the controller, as a preempting provider does; blocks.

        ProviderError names the VMs that are left.
        """
        for worker in (worker for workers in vms.values() for worker in workers):
            self._event_queue.put(Fact(name=VM_KILLED, worker=worker))
        self._provider.delete([*vms])
        self._count()

    def know(self, workers: Collection[str]) -> None:
        """Record the workers that the controller knows: their VMs live on, whatever the answer to their request is."""
        self._nodes = frozenset(workers)
        self._joined |= {vm_of(worker) for worker in workers}

    def close(self) -> None:
        """Stop requesting, and end every VM of the run; blocks for a bounded time: see ``end_all``.

        VMs that cannot be ended in time are named in a fact and to the user, with the command that ends them.
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
            executor.join(until_s)  # an end that is still under way must not block the others
        try:
            warn = partial(self._warn, "provider_retried")
            for left in self._end_all(self._provider, say=warn, hurry=self._hurry):
                self._fact("orphan_ended", left)
        except Exception as error:  # any error: the user must be told, and the rest closed
            self.left = error
            granted = self._registry.granted()
            named = any(vm in str(error) for vm in granted)  # otherwise it is unknown which VMs are left
            perhaps = f"; {', '.join(granted)} may exist" if granted and not named else ""
            self._warn("vms_left", f"{error}{perhaps}{self._command()}")

    def hurry(self) -> None:
        """Let ``close`` try each end at most once more; returns at once."""
        self._hurry.set()

    def _command(self) -> str:
        """Return the command with which the user can end VMs that are left."""
        command = self._provider.capabilities().ending
        return f"; what ends them: {command}" if command else ""

    def _warn(self, name: str, sentence: str) -> None:
        self._fact(name, sentence)
        log.warning("VMs of this run may be left: %s", sentence)

    def _failed(self, error: Exception) -> None:
        self._fact("provider_failed", f"{type(error).__name__}: {error}")  # a bug, or a provider's own error

    def _end(self, end: End | None, facts: Sequence[str] = (), *, keep_logs: bool = False) -> None:
        """Start ending VMs; ``facts`` follow their end. ``keep_logs``: of those that never joined, as they show why."""
        if end is not None:
            silent = [vm for vm in end.vms if vm not in self._joined] if keep_logs else []
            self._ends.put(lambda: self._delete(end, facts, silent))

    def _adopt(self) -> None:
        if not self._adopting.acquire(blocking=False):
            return  # the other thread is adopting them
        try:
            self._adopt_or_end()
        finally:
            self._adopting.release()

    def _adopt_or_end(self) -> None:
        if self._inherited is None:
            return
        workers, requests = self._inherited
        strays: list[Vm] = []
        with self._told("provider_silent"):
            strays = self._registry.adopt(self._listed(), workers, requests)
            self._inherited = None  # a VM that cannot be ended belongs to no request now; keep looking
        facts = [f"{vm.name} of {vm.request} was left by an earlier manager: ended" for vm in strays]
        self._end(self._registry.end([vm.name for vm in strays]), facts)

    def _look(self) -> None:
        """Report VMs that two consecutive looks did not find, and end VMs again that the provider failed to end."""
        if not self._has_begun:
            return
        if self._inherited is not None:  # until the provider answers, it is unknown which VMs are strays
            self._adopt()
            return
        with self._told("provider_silent"):
            listed = self._listed()
            self._tell_waits([vm for vm in listed if vm.waits_for])
            strays, lost = self._registry.compare(listed)
            whys = {vm: self._why_ended(vm) for vm in dict.fromkeys(map(vm_of, lost))}
            for worker in lost:
                cause = f"the provider no longer has its VM{whys[vm_of(worker)]}"
                self._event_queue.put(WorkerLost(worker=worker, cause=cause))
            left = [vm.name for vm in strays]
            self._end(self._registry.end(left), [f"{', '.join(left)}: belongs to no run, ended"])

    def _ask(self, action: RequestNodes) -> None:
        try:
            granted: Granted | RequestRefused = self._answer(action)
        except Exception as error:  # a bug, or a provider's own error: the controller must learn of the refusal
            self.failure = _without_frames(error)
            detail = f"{type(error).__name__}: {error}"
            granted = RequestRefused(request=action.request, cause="error", detail=detail)
        with self._counting:  # a VM is reported as started only after its grant
            answer, end = self._registry.answer(action, granted, self._nodes)
            self._event_queue.put(answer)
        self._end(end)

    def _answer(self, action: RequestNodes) -> Granted | RequestRefused:
        """Request VMs until they came, or repeating the request does not help; VMs that came are granted."""
        name, until_s = action.request, time.monotonic() + ROOM_PATIENCE_S
        num_failed, told_s = 0, 0.0
        while True:
            granted, why, num_over, listed = Granted(), "", 0, tuple[Vm, ...]()
            try:
                listed = self._listed()
                living, num_over = self._registry.living(listed, name)
                of_type = {"node_type": action.node_type} if action.node_type else {}
                allowed, why = self._spending.allowed(action.count, living, self._provider.price(**of_type))
                if allowed < self._least_vms:
                    return RequestRefused(request=name, cause="limit", detail=why)
                vms = self._provider.request(name, action.count, allowed, **of_type)
                granted = vms if isinstance(vms, Granted) else Granted(vms)
                error = granted.missing
            except ProviderError as raised:
                error = raised
            if isinstance(error, RETRYABLE):
                num_failed, told_s, wait_s = _wait_of(error, num_failed, told_s)
                if wait_s is not None:
                    self._fact("provider_retried", f"{name}: {error}; again in {wait_s:g} s")
                    if self._pause(wait_s):  # everything is over, and what came is ended
                        return RequestRefused(request=name, cause="error", detail=str(error))
                    continue
                if not granted:
                    with contextlib.suppress(ProviderError):
                        granted = Granted((vm for vm in self._listed() if vm.request == name), error)
            if granted:
                return self._granted(action, granted, why)
            assert error is not None, "a request without VMs has a reason"
            if isinstance(error, Refused) and self._wait_for_room(
                name, str(error), num_over, {vm.name for vm in listed}, until_s
            ):
                continue
            if isinstance(error, Misconfigured):
                self.failure = _without_frames(error)
            retry_s = error.retry_after_s if isinstance(error, Refused) else None
            return RequestRefused(request=name, cause=cause_of(error), detail=str(error), retry_s=retry_s)

    def _granted(self, action: RequestNodes, granted: Granted, limit: str) -> Granted:
        """Report a grant, and why it is not a whole one."""
        num_devices = sum(vm.num_devices for vm in granted)
        why = limit if granted.missing is None else str(granted.missing)
        if why and num_devices < action.count:
            self._fact("request_reduced", f"{action.request}: {num_devices} of {action.count} workers: {why}")
        self._count()
        self._told_of(granted)
        return granted

    def _wait_for_room(
        self, request: RequestId, why: str, num_over: int, listed: Collection[str], until_s: float
    ) -> bool:
        """Wait until a VM that is being ended makes room for a refused request; return whether one is gone.

        ``num_over``, ``listed``: the number of finished ends, and the VMs, at the request. ``until_s``: on the
        monotonic clock.
        """
        if names := [name for name in self._registry.ending() if name in listed]:
            self._fact("provider_retried", f"{request}: {why}; again when one of {', '.join(names)} is ended")
        while names and not self._over.is_set() and (left_s := until_s - time.monotonic()) > 0:
            if self._registry.wait_ended(num_over, min(left_s, ROOM_LOOK_S)):
                return True
            with self._told("provider_silent"):  # if several end together, one may be stuck
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

    def _tell_waits(self, vms: Sequence[Vm]) -> None:
        """Tell the user why VMs wait in their market's queue, once for each reason, and give up those that never begin.

        Such a VM is reported until the controller has given it up, because its grant may come later.
        """
        for vm in vms:
            sentence = f"it waits in the queue: {vm.waits_for}"
            if vm.never_begins:
                cause = f"{sentence}, so it never begins"
                for worker in vm.workers:
                    self._event_queue.put(WorkerLost(worker=worker, cause=cause, unfit=True))
            elif self._waits_for.get(vm.name) != vm.waits_for:
                log.warning("%s: %s", vm.name, sentence)
                self._event_queue.put(Fact(name="vm_waits", worker=vm.name, detail=vm.waits_for))
        self._waits_for = {vm.name: vm.waits_for for vm in vms}

    def _why_ended(self, vm: str) -> str:
        """Return the provider's reason, as the end of a sentence; empty: it gives none."""
        first = self._provider.boot_log(vm).partition("\n")[0]
        return f": {first.removeprefix(ENDED)}" if first.startswith(ENDED) else ""

    def _keep_log(self, vm: str) -> None:
        try:
            log = self._provider.boot_log(vm)
        except Exception as error:  # any error of any provider: the VM costs money until it is ended
            self._failed(error)
        else:
            if log:
                self._event_queue.put(Fact(name="vm_boot_log", worker=vm, detail=log))

    def _count(self) -> None:
        with self._told("vms_not_counted"):
            self._listed()

    def _listed(self) -> tuple[Vm, ...]:
        """List and count the VMs after each change, in one call at a time, so that the last count is right."""
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
        """Report a provider's error as a fact, once to the user too if no answer came; ``reconcile`` finds VMs left."""
        is_look = name == "provider_silent"
        try:
            yield
        except ProviderError as error:
            self._fact(name, str(error))
            if is_look and not self._is_silent:
                self._is_silent = True
                log.warning("the provider gives no answer; no VM counts as lost, and training goes on: %s", error)
        else:
            if is_look and self._is_silent:
                self._is_silent = False
                log.warning("the provider answers again")


def _wait_of(error: ProviderError, num_failed: int, told_s: float) -> tuple[int, float, float | None]:
    """Return the failures and the seconds waited as told, with this error, and the next wait (s; None: no more)."""
    if error.retry_after_s is not None:
        wait_s = min(max(error.retry_after_s, RETRIES.first_s), RETRY_AFTER_MAX_S)
        return num_failed, told_s + wait_s, wait_s if told_s < RETRY_AFTER_MAX_S else None
    return num_failed + 1, told_s, RETRIES.pause_s(num_failed) if num_failed + 1 < TRIES else None


def _without_frames(error: Exception) -> Exception:
    """Drop the traceback of an error: its frames hold the connections of the failed call."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)

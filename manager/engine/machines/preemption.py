"""Preempts VMs of a running run on request: the manager's end of ``manager.injection.injector``."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pydantic import Field, ValidationError

from manager.controller.state.events import NoticeGiven
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import WorkerState
from manager.engine.local_vms.control_socket import hear, is_ours, tell
from manager.engine.loop.event_queue import EventQueue
from manager.journal.records import PREEMPTION_FAILED, PREEMPTION_INJECTED, Fact
from manager.providers.interface.provider import ProviderError
from morph.contract.base import Value
from morph.contract.vm_names import vm_of

SOCKET_NAME = "preemptions"
HEAR_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
PAUSE_S = 0.1
BACKLOG = 16


class PreemptionRequest(Value):
    """A request to preempt these VMs; without VMs, it only asks which VMs exist.

    ``lead_s``: the seconds of notice; 0: no notice. ``min_vms``: the number of VMs that must remain. ``why``: for the
    journal.
    """

    vms: tuple[str, ...] = ()
    lead_s: float = Field(default=0.0, ge=0)
    min_vms: int = Field(default=0, ge=0)
    why: str = ""


class PreemptionAnswer(Value):
    """The answer to a ``PreemptionRequest``. Times are on the run's clock, ``now_s``.

    ``vms``: those that may be preempted now, and since when; they have no notice. ``left``: those that are not
    preempted, and why.
    """

    now_s: float
    vms: dict[str, float]
    taken: tuple[str, ...] = ()
    left: dict[str, str] = Field(default_factory=dict)


class PreemptionTarget(Protocol):
    """The owner of the VMs. Calls block for a bounded time, and may raise ProviderError."""

    def may_take(self, vm: str) -> bool:
        """Return whether a VM that the controller knows may be preempted now."""

    def evict(self, vm: str) -> bool:
        """See ``Provider.evict``."""

    def take(self, vms: Mapping[str, Collection[str]]) -> None:
        """End VMs, given with their workers, all at once and without telling the controller."""


class PreemptionServer:
    """Answers each ``PreemptionRequest`` in turn, from its own thread, and ends VMs when their notice is over.

    The provider gives the notice if it can; else it is given here, and the VM is ended when the notice is over, even if
    the requester is gone. Only VMs whose ``workers`` the controller knows are preempted. ``folder``: that of the
    socket; only this user and root can enter it.
    """

    def __init__(
        self,
        folder: Path,
        workers: Callable[[], Mapping[str, WorkerState]],
        event_queue: EventQueue,
        target: PreemptionTarget,
    ) -> None:
        self._workers, self._event_queue, self._target = workers, event_queue, target
        self._path = folder / SOCKET_NAME
        self._path.unlink(missing_ok=True)  # a killed manager's socket
        self._doomed: set[str] = set()
        self._over = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self._path))
        self._listener.listen(BACKLOG)
        self._thread = threading.Thread(target=self._serve, name="morph-preempting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and do not end VMs whose notice is not over."""
        self._over.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def answer(self, requested: PreemptionRequest) -> PreemptionAnswer:
        """Start preempting the VMs that may be preempted; returns once every notice is given."""
        known = self._workers()
        vms: dict[str, list[str]] = {}
        for worker in known:
            vms.setdefault(vm_of(worker), []).append(worker)
        living = [vm for vm in vms if vm not in self._doomed and not any(_drains(known[each]) for each in vms[vm])]
        free = {vm: min(known[each].appeared_s for each in vms[vm]) for vm in living if self._target.may_take(vm)}
        taken: list[str] = []
        ended: dict[str, list[str]] = {}
        left: dict[str, str] = {}
        for vm in dict.fromkeys(requested.vms):
            if vm not in vms:
                left[vm] = f"this run has no such VM; it has {', '.join(vms) or 'none'}"
            elif vm not in free:
                left[vm] = "its request is under way" if vm in living else "it is being preempted already"
            elif len(living) - len(taken) <= requested.min_vms:
                left[vm] = f"at least {requested.min_vms} VMs must remain"
            else:
                try:
                    if not (requested.lead_s and self._target.evict(vm)):
                        ended[vm] = vms[vm]
                    taken.append(vm)
                except ProviderError as error:
                    left[vm] = str(error)
        self._doomed.update(taken)
        for vm in taken:
            ours = f"a notice of {requested.lead_s:g} s" if requested.lead_s else "no notice"
            detail = f"{requested.why}, {ours if vm in ended else 'evicted by the provider, with its notice'}"
            self._event_queue.put(Fact(name=PREEMPTION_INJECTED, worker=vm, detail=detail))
        if ended:
            self._begin(ended, requested.lead_s)
        return PreemptionAnswer(now_s=self._event_queue.now_s(), vms=free, taken=tuple(taken), left=left)

    def _begin(self, vms: Mapping[str, Sequence[str]], lead_s: float) -> None:
        notice = f"injected-{secrets.token_hex(4)}"
        for worker in (worker for workers in vms.values() for worker in workers if lead_s):
            self._event_queue.put(NoticeGiven(worker=worker, lead_s=lead_s, notice=notice))
        threading.Thread(target=self._end, args=(vms, lead_s), name="morph-preemption", daemon=True).start()

    def _end(self, vms: Mapping[str, Sequence[str]], lead_s: float) -> None:
        if self._over.wait(lead_s):
            return
        try:
            self._target.take(vms)
        except Exception as error:  # also a provider's own error: the VMs go on, and the requester must know
            self._doomed.difference_update(vms)
            for vm in vms:
                self._event_queue.put(Fact(name=PREEMPTION_FAILED, worker=vm, detail=f"it keeps running: {error}"))

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the server is closed, or no descriptor is left
                self._over.wait(PAUSE_S)
                continue
            with connection, suppress(OSError, ValidationError):  # callers that break the protocol are refused
                connection.settimeout(HEAR_TIMEOUT_S)
                requested, _ = hear(connection) if is_ours(connection) else (None, [])
                if requested is not None:
                    tell(connection, **self.answer(PreemptionRequest.model_validate(requested)).model_dump())


def _drains(worker: WorkerState) -> bool:
    return worker.node is NodeState.DRAINING

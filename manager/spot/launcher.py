"""Drives the controller of ``morph spot-run``: hears the script and the VM, and does what is decided."""

from __future__ import annotations

import json
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from manager.engine.vms.spending import Spending
from manager.host.signals import deaf_to_signals
from manager.notices.agent import sources_of
from manager.notices.watch import Given, NoticeWatch, Told
from manager.providers.interface.provider import (
    Misconfigured,
    Provider,
    ProviderError,
    Throttled,
    Transient,
    Vm,
    end_all,
)
from manager.providers.interface.provider import Refused as VmsRefused
from manager.spot.controller import (
    Action,
    Ask,
    Came,
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
from manager.spot.spec import Preemptions, SpotJob
from morph.contract.cluster import Limits

log = logging.getLogger("morph.spot")

LOOK_EVERY_S = 0.05
LOOK_FOR_VMS_S = 5.0
ASK_AGAIN_S = 5.0
ASK_TIMEOUT_S = 120.0
TAKEN_CODE = 75
"""The VM on which the command runs is about to be taken: the same command goes on with the script on the next one."""


class Machines(Protocol):
    """What runs on VMs, by their names; after ``start``, but for that and ``close``."""

    def start(self, vms: Sequence[str], command: Sequence[str], storage: str) -> None:
        """Start the script on each VM of a group.

        Raises:
            OSError: it cannot be started.
        """

    def save(self, vm: str, number: int) -> None:
        """Order the script to save."""

    def said(self, vm: str) -> bytes:
        """Return what the script said since this was last asked.

        Raises:
            ProviderError: no VM like this can be used.
        """

    def ended(self, vm: str) -> int | None:
        """Return the script's exit code; None: it runs, or not all that it said has come."""

    def is_lost(self, vm: str) -> bool:
        """Whether nothing is heard of the VM any more."""

    def end(self, vms: Sequence[str]) -> None:
        """End the script, where that is heard, on VMs that the provider is about to end; does not wait for it."""

    def close(self) -> None:
        """Hear nothing more of any."""


class Taking(Protocol):
    """Takes VMs on purpose. Both are asked with the seconds that the script has run on the VM, and its steps there."""

    def notice_s(self, ran_s: float, num_steps: int) -> float | None:
        """Return after how many seconds the VM will be taken; None: there is no notice."""

    def is_taken(self, ran_s: float, num_steps: int) -> bool:
        """Whether it is taken now."""


class Exponential:
    """Takes each VM after an exponential time."""

    def __init__(self, given: Preemptions) -> None:
        self._given, self._random = given, random.Random(given.seed)
        self._life_s, self._before_s = 0.0, float("inf")

    def _life(self, ran_s: float) -> float:
        if ran_s < self._before_s:  # another VM
            self._life_s = self._random.expovariate(1 / self._given.mttp_s)
        self._before_s = ran_s
        return self._life_s

    def notice_s(self, ran_s: float, num_steps: int) -> float | None:
        """See ``Taking``."""
        del num_steps
        left_s = self._life(ran_s) - ran_s
        return max(0.0, left_s) if self._given.notice_s > 0 and left_s <= self._given.notice_s else None

    def is_taken(self, ran_s: float, num_steps: int) -> bool:
        """See ``Taking``."""
        del num_steps
        return ran_s >= self._life(ran_s)


@dataclass(frozen=True)
class Source:
    """Where VMs come from, on which ``Machines`` run the script.

    ``num_devices``: of the VMs of a group, together: one VM, where each has as many. ``least_vms``: that have them.
    """

    provider: Provider
    num_devices: int
    least_vms: int = 1
    spending: Spending = field(default_factory=lambda: Spending(Limits()))


@dataclass
class Outcome:
    """``num_vms``: or groups of them, that ran the script.

    ``reasons``: of everything that was decided, with the seconds since the beginning.
    """

    code: int
    num_vms: int
    reasons: list[tuple[float, str]]


class Launcher:
    """Runs one job to its end.

    Args:
        job: What to do.
        command: The script's.
        source: Of VMs.
        machines: Closed by ``run``.
        taking: Takes VMs on purpose.
    """

    def __init__(
        self, job: SpotJob, command: Sequence[str], source: Source, machines: Machines, taking: Taking | None
    ) -> None:
        self._job, self._command, self._machines, self._taking = job, command, machines, taking
        self._source, self._provider = source, source.provider
        self._state = SpotState()
        self._events: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        self._begin_s = time.monotonic()
        self._groups: dict[str, tuple[str, ...]] = {}
        self._vms: tuple[str, ...] = ()
        self._gone: set[str] = set()
        self._half = b""
        self._num_steps = self._num_groups = self._num_asked = 0
        self._started_s = 0.0
        self._is_noticed = False
        self._reasons: list[tuple[float, str]] = []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def run(self) -> Outcome:
        """Block until the script ends; no VM outlives this.

        Raises:
            ProviderError: asking for VMs does not help, or one is left.
            OSError: the script cannot be started.
        """
        watches = [NoticeWatch(source, self._told) for source in sources_of(self._job.notices)]
        try:
            for watch in watches:
                watch.start()
            self._beside(self._look_for_vms)
            while self._state.phase != "ended":
                for event in self._heard():
                    self._happened(event)
                if self._job.vms == "here" and self._num_groups and self._state.phase == "waiting":
                    return Outcome(TAKEN_CODE, self._num_groups, self._reasons)
                time.sleep(LOOK_EVERY_S)
        finally:
            with deaf_to_signals():
                self._end(watches)
        code = self._state.code
        return Outcome(1 if code is None or code < 0 else code, self._num_groups, self._reasons)

    def _end(self, watches: Sequence[NoticeWatch]) -> None:
        """End whatever is left."""
        self._over.set()
        for watch in watches:
            watch.close()
        self._provider.stop()
        for thread in self._threads:
            thread.join(ASK_TIMEOUT_S)
        log.info("ending what is left of the run's VMs")  # which takes minutes where they are deleted
        end_all(self._provider, told=log.info)
        self._machines.close()
        if (price := self._provider.price()) is not None:
            log.info("VMs cost about %.2f dollars", self._source.spending.spent_usd(price))

    def noticed(self, vm: str, lead_s: float) -> None:
        """Hear of a notice that a VM has got; from any thread."""
        if vm in self._vms:
            self._events.put(Noticed(lead_s))

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
                self._beside(self._ask)
            case Start(group):
                self._vms, self._half, self._num_steps, self._is_noticed = self._groups[group], b"", 0, False
                self._num_groups += 1
                self._started_s = time.monotonic()
                self._machines.start(self._vms, self._command, self._job.storage)
            case Save(number):
                self._machines.save(self._vms[0], number)
            case Release():
                self._take()

    def _take(self) -> None:
        """Give the group back, or what is left of it: the next one does not wait until the provider has ended it."""
        vms, self._vms = self._vms, ()
        if vms:
            self._machines.end(vms)
            self._beside(partial(self._delete, vms))
            self._events.put(Gone())

    def _delete(self, vms: Sequence[str]) -> None:
        try:
            self._provider.delete(vms)
        except ProviderError as error:
            log.info("%s", error)  # it is tried again in the end

    def _beside(self, run: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                run()
            except Exception as error:
                self._events.put(error)

        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(threading.Thread(target=guarded, name="morph-spot-vms", daemon=True))
        self._threads[-1].start()

    def _ask(self) -> None:
        """Ask for a group until there is a whole one; under the same name until there is an answer."""
        self._num_asked += 1
        told, num_devices = "", self._source.num_devices
        while not self._over.is_set():
            name, pause_s = f"{self._job.name}-{self._num_asked}", ASK_AGAIN_S
            try:
                vms = self._provider.request(name, num_devices, self._allowed())
                if sum(vm.num_devices for vm in vms) >= num_devices:
                    self._groups[name] = tuple(vm.name for vm in vms)
                    self._events.put(Came(name))
                    return
                self._provider.delete([vm.name for vm in vms])
                self._num_asked += 1
                log.info("there are VMs for %d of a group alone", len(vms))
            except (VmsRefused, Throttled, Transient) as error:
                if told != (told := str(error)):
                    log.info("no VM yet: %s", error)
                pause_s = error.retry_after_s or ASK_AGAIN_S
            self._over.wait(pause_s)

    def _allowed(self) -> int:
        """Return how many VMs may be asked for now.

        Raises:
            Refused: too few for a group.
            Misconfigured: and no VM is there whose end would change that.
        """
        living, source = self._listed(), self._source
        allowed, why = source.spending.allowed(source.num_devices, living, self._provider.price())
        if allowed < source.least_vms:
            raise VmsRefused(why) if living else Misconfigured(f"no VM may be asked for: {why}")
        return allowed

    def _listed(self) -> tuple[Vm, ...]:
        vms = self._provider.list()
        self._source.spending.living(vms, self._provider.price())
        return vms

    def _look_for_vms(self) -> None:
        """Ask the provider now and then whether VMs are still there."""
        while not self._over.wait(LOOK_FOR_VMS_S):
            vms = self._vms
            try:
                there = {vm.name for vm in self._listed()}
            except ProviderError as error:
                log.info("which VMs there are is not known: %s", error)
                continue
            self._gone.update(set(vms) - there)

    def _told(self, told: Told) -> None:
        if isinstance(told, Given) and told.certain and told.lead_s is not None:
            self._events.put(Noticed(told.lead_s))

    def _heard(self) -> Iterator[Event]:
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, Exception):
                raise event
            yield event
        if not self._vms:
            yield Tick()
            return
        codes = [self._machines.ended(vm) for vm in self._vms]  # before what is said is read: nothing is left unread
        yield from self._said()
        if not self._vms:
            return
        failed = next((code for code in codes if code), None)
        if failed is not None or None not in codes:
            yield Ended(failed or 0)
            return
        if any(vm in self._gone or self._machines.is_lost(vm) for vm in self._vms):
            self._take()
            return
        yield Tick()
        ran_s = time.monotonic() - self._started_s
        if self._taking is not None and self._vms:
            lead_s = None if self._is_noticed else self._taking.notice_s(ran_s, self._num_steps)
            if lead_s is not None:
                self._is_noticed = True
                yield Noticed(lead_s)
            if self._vms and self._taking.is_taken(ran_s, self._num_steps):
                self._take()

    def _said(self) -> Iterator[Event]:
        """What the script said on the first VM of the group since the last time."""
        data = self._half + self._machines.said(self._vms[0])
        *lines, self._half = data.split(b"\n")
        for line in lines:
            told = json.loads(line)
            self._num_steps += told["kind"] == "step"
            yield _EVENTS[told.pop("kind")](**told)


_EVENTS: dict[str, Callable[..., Event]] = {"step": Stepped, "saved": Saved, "uploaded": Uploaded, "refused": Refused}

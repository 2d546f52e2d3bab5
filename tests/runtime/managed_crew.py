"""The live driver over workers that are forked here: decisions, journal, messages and deaths, without Ray or VMs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait

from manager.controller.state.actions import Finish
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import NodeAppeared, WorkerAnswered, WorkerLost
from manager.controller.state.state import initial_state
from manager.engine.loop.driver import Driver, Observer
from manager.engine.loop.event_queue import EventQueue
from manager.journal.journal import Journal
from manager.run_dir import RunDir
from morph.contract.faults import Fault
from morph.contract.messages import CommitOrder, PreCopyOrder, ProbeOrder, ReshapeOrder, StepOrder, WorkerSetup
from morph.jobs.snapshot import collect, pack
from morph.runtime.groups.store import StoreHost
from tests.runtime.worker_crew import LOOPBACK, Member
from tests.system.harness import JOB, TinyJob

BEATS_EVERY_S = 0.05


class ManagedCrew:
    """A driver's ``Pool``. Processes are used again under other names once a run is over.

    Args:
        job: What every run trains.
    """

    def __init__(self, job: TinyJob) -> None:
        self.job = job
        self._code = pack(JOB, collect(JOB))
        self._idle: list[Member] = []
        self._members: dict[str, Member] = {}
        self._lost: set[str] = set()
        self._event_queue = EventQueue()
        self._store: StoreHost
        self._checkpoint_url = ""
        self._ending = threading.Event()

    def run(self, config: ControllerConfig, run_dir: RunDir, observer: Callable[[ManagedCrew], Observer]) -> Finish:
        """Run a session to its end on as many workers as it expects."""
        self._event_queue, self._store = EventQueue(), StoreHost(LOOPBACK)
        self._checkpoint_url, self._members, self._lost = run_dir.checkpoint_url, {}, set()
        self._ending.clear()
        listening = threading.Thread(target=self._listen, daemon=True)
        listening.start()
        try:
            with Journal.open(run_dir.journal_path) as journal:
                journal.append_config(0.0, config)
                observers = [observer(self)]
                url = run_dir.checkpoint_url
                driver = Driver(initial_state(config), self._event_queue, self, journal, url, observers)
                self.add(*(f"w{index}" for index in range(config.expected_nodes)))
                return driver.run()
        finally:
            self._ending.set()
            listening.join()
            for name, member in self._members.items():
                if name in self._lost:
                    member.end()
                else:
                    self._idle.append(member)

    def close(self) -> None:
        """End every process."""
        for member in self._idle:
            member.end()

    def add(self, *workers: str) -> None:
        """VMs are up: their workers are started."""
        for worker in workers:
            self._event_queue.put(NodeAppeared(node=worker))

    def arm(self, *faults: Fault, slow_s: float = 0.0) -> None:
        """Schedule deaths of living workers; ``slow_s``: what state takes between them and their followers."""
        for worker in dict.fromkeys(fault.worker for fault in faults):
            mine = tuple(fault for fault in faults if fault.worker == worker)
            self._members[worker].control("arm", mine, slow_s)

    def put(self, event: object) -> None:
        """Tell the controller of something."""
        self._event_queue.put(event)  # type: ignore[arg-type]

    # ---- the driver's ----

    def start(self, worker: str, vm: str) -> None:
        member = self._members[worker] = self._idle.pop() if self._idle else Member(worker)
        setup = WorkerSetup(
            worker=worker,
            job_path=JOB,
            fingerprint=self.job.fingerprint,
            num_sections=self.job.num_sections,
            micro_batch_size=self.job.micro_batch_size,
            checkpoint_url=self._checkpoint_url,
            store_host=LOOPBACK,
            store_port=self._store.port(),
            listen_host=LOOPBACK,
            secret="of the run",
            code=self._code,
        )
        member.send("setup", setup)

    def reshape(self, worker: str, order: ReshapeOrder) -> None:
        self._send(worker, "reshape", order)

    def step(self, worker: str, order: StepOrder) -> None:
        self._send(worker, "step", order)

    def commit(self, worker: str, order: CommitOrder) -> None:
        self._send(worker, "commit", order)

    def probe(self, worker: str, order: ProbeOrder) -> None:
        raise AssertionError(f"{worker} is not slow: {order}")

    def abort(self, worker: str, generation: int) -> None:
        self._control(worker, "abort", generation)

    def ahead(self, worker: str, order: PreCopyOrder) -> None:
        self._control(worker, "ahead", order)

    def end(self, worker: str) -> None:
        self._members[worker].process.kill()

    def watch(self) -> bool:
        return True

    # ---- inside ----

    def _send(self, worker: str, method: str, order: object) -> None:
        with suppress(OSError):  # it is dead, and is about to be seen to be
            self._members[worker].send(method, order)

    def _control(self, worker: str, command: str, *arguments: object) -> object:
        with suppress(OSError, EOFError):
            return self._members[worker].control(command, *arguments)
        return None

    def _listen(self) -> None:
        beats_at_s = time.monotonic()
        while not self._ending.is_set():
            living = {member.orders: name for name, member in tuple(self._members.items()) if name not in self._lost}
            for connection in wait(list(living), BEATS_EVERY_S) if living else ():
                self._take(living[connection], connection)  # type: ignore[index]
            if not living:
                time.sleep(BEATS_EVERY_S)
            if time.monotonic() >= beats_at_s:
                beats_at_s = time.monotonic() + BEATS_EVERY_S
                for name in living.values():
                    beat = self._control(name, "heartbeat", 0.0)
                    if beat is not None:
                        self._event_queue.put_beat(name, beat)  # type: ignore[arg-type]

    def _take(self, worker: str, connection: object) -> None:
        try:
            answer = connection.recv()  # type: ignore[attr-defined]
        except (OSError, EOFError):
            self._lost.add(worker)
            self._event_queue.put(WorkerLost(worker=worker, cause="killed"))
            return
        self._event_queue.put(WorkerAnswered(worker=worker, answer=answer))

"""One manager's process: ``python -m tests.system.one_manager ORDERS.json``; takes over from a killed one.

It can be ordered to kill itself, with or without a worker, when the run reaches a phase at a version.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil

from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import Event, ManagerResumed, WorkerAnswered
from manager.engine.loop.driver import Observed
from manager.engine.loop.event_queue import EventQueue
from manager.engine.machines.attachment import find_living
from manager.journal.records import Fact
from manager.run import session
from manager.run.session import SessionSpec
from manager.run.train import Restarts
from manager.run_dir import RunDir
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.base import Value
from morph.contract.cluster import ClusterConfig, LocalVms
from morph.contract.errors import ClusterError
from morph.contract.messages import HandedCut, WorkerReady
from morph.contract.trace import Trace
from morph.jobs.snapshot import collect, pack
from tests.system.harness import facts_of


class Death(Value):
    """When a manager dies: after a decision in ``phase`` at this version or a later one.

    ``taking_over``: after the decision with which it took over instead. ``unwritten``: instead when the first worker
    reports that it is set up, which then is in no journal. ``worker``: a worker that dies a moment before; with
    ``manager_lives`` only the worker dies. ``process``: the rendezvous store, or the host from which all is forked,
    dies instead of the manager. ``saved``: not before a checkpoint is complete.
    """

    phase: str = ""
    version: int = 0
    taking_over: bool = False
    unwritten: bool = False
    worker: str | None = None
    manager_lives: bool = False
    process: Literal["", "store", "host"] = ""
    saved: bool = False


class Orders(Value):
    """What a manager has to do.

    ``pids``: process ids of the workers that are set up. ``gate``: the gate of a ``HeldJob``, opened once the store is
    started again, or the run continues after the loss of its cluster.
    """

    run_dir: Path
    job: str
    cut: HandedCut
    num_sections: int
    micro_batch_size: int
    batch_size: int
    config: ControllerConfig
    trace: Trace
    gate: Path
    vms: LocalVms = LocalVms()
    deaths: tuple[Death, ...] = ()
    pids: dict[str, int] | None = None


class Undertaker:
    """Kills this process at its ordered death."""

    def __init__(self, death: Death, orders: Orders) -> None:
        self._death, self._over, self._run_dir = death, False, orders.run_dir
        self.pids = dict(orders.pids or {})

    def __call__(self, observed: Observed) -> None:
        death, state = self._death, observed.decision.state
        answer = observed.event.answer if isinstance(observed.event, WorkerAnswered) else None
        if isinstance(answer, WorkerReady):
            self.pids[answer.worker] = answer.pid
        if death.taking_over:
            due = isinstance(observed.event, ManagerResumed)
        else:
            due = state.phase == death.phase and state.version >= death.version
            due = due and (state.saving.checkpoint is not None or not death.saved)
        if due and not self._over:
            self._over = True
            if death.worker is not None:
                os.kill(self.pids[death.worker], signal.SIGKILL)
            if death.process:
                kill(death.process, self.pids, self._run_dir)
            elif not death.manager_lives:
                os.kill(os.getpid(), signal.SIGKILL)


def kill(process: str, workers: dict[str, int], run_dir: Path) -> None:
    """End the store, or the host of this manager's plain processes."""
    of_ray = [member for member in ray_processes(run_dir) if "morph.runtime.groups.store" in member.cmdline()]
    if of_ray:
        of_ray[0].kill()
        return
    children = psutil.Process().children(recursive=True)
    hosts = {child.pid: child for child in children if "manager.engine.on_processes.process_host" in child.cmdline()}
    (host,) = [child for child in hosts.values() if child.ppid() not in hosts]  # its forks have the same name
    (store,) = [child for child in host.children() if child.pid not in workers.values() and child.status() != "zombie"]
    (store if process == "store" else host).kill()


def ray_processes(run_dir: Path) -> list[psutil.Process]:
    """Return the host of a run's Ray nodes and its descendants, whichever manager started it."""
    socket = Path(json.loads((run_dir / "attach.json").read_text(encoding="utf-8"))["control_socket"])
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_host = "manager.engine.on_ray.vm_host" in process.cmdline()
            if is_host and Path(process.environ().get("RAY_TMPDIR", ".")) in socket.parents:
                return [process, *process.children(recursive=True)]
    return []


class WatchedEventQueue(EventQueue):
    """Kills this process when a worker reports that it is set up, or opens a gate when the store is started again."""

    is_deaf, gate = False, Path()

    def put(self, item: Event | Fact) -> None:
        """Add an item, or die."""
        if self.is_deaf and isinstance(item, WorkerAnswered) and isinstance(item.answer, WorkerReady):
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(item, Fact) and item.name == "store_started_again":
            self.gate.touch()
        super().put(item)


def main() -> None:
    """Run until the end, or until the ordered death."""
    orders = Orders.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    config = orders.config
    spec = SessionSpec(
        job_path=orders.job,
        config=config,
        cluster=ClusterConfig(vms=orders.vms, policy=config.policy),
        trace=orders.trace,
        num_sections=orders.num_sections,
        micro_batch_size=orders.micro_batch_size,
        code=pack(orders.job, collect(orders.job)),
        cut=orders.cut,
    )
    WatchedEventQueue.is_deaf = any(death.unwritten for death in orders.deaths)
    WatchedEventQueue.gate = orders.gate
    session.EventQueue = WatchedEventQueue  # type: ignore[misc]
    again = Restarts(config.policy.give_up_after_s, print)
    undertakers = [Undertaker(death, orders) for death in orders.deaths if not death.unwritten]

    def observe(observed: Observed) -> None:
        again(observed)
        for undertaker in undertakers:
            undertaker(observed)

    with RunDir(orders.run_dir, facts_of(spec, orders.batch_size)) as opened:
        finish, begun = None, spec
        while finish is None:
            found = find_living(opened, {})
            if found and not orders.vms.under_ray:
                for undertaker in undertakers:
                    undertaker.pids.update(found.greeting["vms"])
            print(f"found {len(found.vms) if found else 'nothing'}", flush=True)
            try:
                finish = again.after(session.run_session(begun, opened, observe, orphan=found))
            except ClusterError as error:
                finish = again.after(error)
            orders.gate.touch()
            begun = session.with_resumed_trace(replace(spec, config=from_newest(config, opened)), opened)
        print(finish.outcome, flush=True)


def from_newest(config: ControllerConfig, run_dir: RunDir) -> ControllerConfig:
    """Return the orders with the newest checkpoint as the beginning."""
    versions = complete_versions(run_dir.checkpoint_url)
    if not versions:
        return config
    manifest = read_manifest(run_dir.checkpoint_url, versions[-1])
    return config.model_copy(update={"initial_version": manifest.version, "initial_checkpoint": manifest})


if __name__ == "__main__":
    main()

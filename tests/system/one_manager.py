"""One manager's process: ``python -m tests.system.one_manager ORDERS.json``; takes over what a killed one left.

It can be told to kill itself, and a worker with it, when the run reaches a phase at a version.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from manager.controller.config import ControllerConfig
from manager.controller.events import ManagerResumed, WorkerAnswered
from manager.engine.attachment import find_living
from manager.engine.driver import Observed
from manager.engine.machines import Processes
from manager.engine.session import RunSpec, run_session
from manager.run_dir import RunDir, RunFacts
from morph.contract.base import Value
from morph.contract.cluster import ClusterConfig, LocalVms
from morph.contract.messages import WorkerReady
from morph.contract.trace import Trace


class Death(Value):
    """When the manager is to die: after a decision in ``phase`` with the version at least so high.

    ``taking_over``: instead after the decision with which it took over. ``worker``: dies a moment before; with
    ``manager_lives`` it alone. ``saved``: not before a checkpoint is complete.
    """

    phase: str = ""
    version: int = 0
    taking_over: bool = False
    worker: str | None = None
    manager_lives: bool = False
    saved: bool = False


class Orders(Value):
    """What a manager is to do."""

    run_dir: Path
    kind: str
    job: str
    num_sections: int
    micro_batch_size: int
    batch_size: int
    config: ControllerConfig
    trace: Trace
    vms: LocalVms = LocalVms()
    death: Death | None = None


class Undertaker:
    """Kills this process when its time has come."""

    def __init__(self, death: Death, pids: dict[str, int]) -> None:
        self._death, self._pids, self._over = death, pids, False

    def __call__(self, observed: Observed) -> None:
        death, state = self._death, observed.decision.state
        answer = observed.event.answer if isinstance(observed.event, WorkerAnswered) else None
        if isinstance(answer, WorkerReady):
            self._pids[answer.worker] = answer.pid
        if death.taking_over:
            due = isinstance(observed.event, ManagerResumed)
        else:
            due = state.phase == death.phase and state.version >= death.version
            due = due and (state.checkpoint is not None or not death.saved)
        if due and not self._over:
            self._over = True
            if death.worker is not None:
                os.kill(self._pids[death.worker], signal.SIGKILL)
            if not death.manager_lives:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run until the end, or until the ordered death."""
    orders = Orders.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    config = orders.config
    facts = RunFacts(
        job=orders.job,
        fingerprint=config.fingerprint,
        micro_batch_size=orders.micro_batch_size,
        batch_size=orders.batch_size,
        num_sections=orders.num_sections,
    )
    spec = RunSpec(
        job_path=orders.job,
        config=config,
        cluster=ClusterConfig(vms=orders.vms, policy=config.policy),
        trace=orders.trace,
        num_sections=orders.num_sections,
        micro_batch_size=orders.micro_batch_size,
        machines=Processes(orders.run_dir / "workers.log") if orders.kind == "processes" else None,
    )
    with RunDir(orders.run_dir, facts) as opened:
        found = find_living(opened, {})
        pids = dict(found.greeting["vms"]) if found and orders.kind == "processes" else {}
        observer = Undertaker(orders.death, pids) if orders.death else lambda _: None
        print(f"found {len(found.vms) if found else 'nothing'}", flush=True)
        finish = run_session(spec, opened, observer, found=found)
        print(finish.outcome, flush=True)


if __name__ == "__main__":
    main()

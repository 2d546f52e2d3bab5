"""A new manager goes on with the workers of one that was killed."""

from __future__ import annotations

from manager.controller.state.events import Event, ManagerResumed, WorkerLost
from manager.engine.local_vms.trace_replayer import TraceReplayer
from manager.engine.loop.driver import Driver
from manager.engine.run.attachment import Found
from manager.engine.run.machines import Machines
from manager.engine.vms.inherited import inherited
from manager.journal.records import TOOK_OVER, Fact


def take_over(found: Found, machines: Machines, replayer: TraceReplayer, driver: Driver) -> None:
    """Reach the workers, tell the trace's replayer which VMs are up, and the controller who lives.

    In this order: what the controller decides of its VMs finds them known. What is new to it waits in the event_queue.
    What is decided is written down before it is done, as ever: should this manager be killed here too, the next one
    takes over from the same journal, and repeats what is not answered.
    """
    workers, up = found.state.workers, machines.up()
    reached = machines.pool.attach([worker for worker, entry in workers.items() if entry.ready])
    living = tuple(worker for worker in reached if worker in found.appeared)  # of the rest the replayer tells
    events: list[Event] = [
        WorkerLost(worker=worker, cause="its VM was gone when the new manager took over")
        for worker, entry in workers.items()
        if not entry.ready and worker not in up
    ]
    if machines.provided is None:
        asked = {vm.name: vm.request for vm in inherited(found.state, found.vms).vms}
        replayer.resume(found.vms, found.appeared, asked)
    driver.tell(Fact(name=TOOK_OVER), *events, ManagerResumed(living=living))

"""A new manager goes on with the workers of one that was killed."""

from __future__ import annotations

from manager.controller.events import Event, ManagerResumed, WorkerLost
from manager.engine.attachment import Found
from manager.engine.driver import Driver
from manager.engine.inherited import inherited
from manager.engine.machines import Machines
from manager.engine.vm_player import VmPlayer
from manager.journal.records import TOOK_OVER, Fact


def take_over(found: Found, machines: Machines, player: VmPlayer, driver: Driver) -> None:
    """Reach the workers, tell the trace's player which VMs are up, and the controller who lives.

    In this order: what the controller decides of its VMs finds them known. What is new to it waits in the inbox.
    What is decided is written down before it is done, as ever: should this manager be killed here too, the next one
    takes over from the same journal, and repeats what is not answered.
    """
    workers, up = found.state.workers, machines.up()
    reached = machines.attach([worker for worker, entry in workers.items() if entry.ready])
    living = tuple(worker for worker in reached if worker in found.appeared)  # of the rest the player tells
    events: list[Event] = [
        WorkerLost(worker=worker, cause="its VM was gone when the new manager took over")
        for worker, entry in workers.items()
        if not entry.ready and worker not in up
    ]
    if machines.provided is None:
        asked = {vm.name: vm.request for vm in inherited(found.state, found.vms).vms}
        player.resume(found.vms, found.appeared, asked)
    driver.tell(Fact(name=TOOK_OVER), *events, ManagerResumed(living=living))

"""A provider of VMs in virtual time: grants, refuses, loses requests, gives notices, and takes VMs or does not."""

from __future__ import annotations

from collections.abc import Callable

from simulated_worker import SimulatedWorker
from simulated_workers import SimulatedWorkers
from simulated_world import World

from manager.controller.state.actions import RequestNodes
from manager.controller.state.events import (
    Event,
    NodeAppeared,
    NodesGranted,
    NoticeGiven,
    NoticeWithdrawn,
    Paid,
    RequestRefused,
    WorkerLost,
)
from morph.contract.vm_names import beside, workers_of


def priced(number: int) -> Paid:
    """What VM number so and so costs: by its number, for no chance is to be drawn for what nobody decides by."""
    usd_per_h = 0.1 * (number % 4) if number % 4 else None
    return Paid(usd_per_h=usd_per_h, num_nodes=1 + number % 3, before_s=0.3 * (number % 7))


class SimulatedProvider:
    """Brings VMs up. A request that comes again under its name gets no further VMs, and the same answer."""

    def __init__(self, world: World, tell: Callable[[Event], None], workers: SimulatedWorkers) -> None:
        self.world, self.tell, self.workers = world, tell, workers
        self.num_nodes = 0
        self.num_notices = 0
        self.answers: dict[str, Event] = {}

    def add_node(self, host: str | None = None, request: str | None = None) -> str:
        """A VM comes up; ``host`` names a machine that was there before."""
        self.num_nodes += 1
        vm = f"n{self.num_nodes}"
        self.up(vm, host, request)
        return vm

    def up(self, vm: str, host: str | None, request: str | None) -> None:
        """A VM is up, with all of its workers."""
        names = workers_of(vm, self.world.faults.num_devices)
        for name in names:
            self.workers.all[name] = SimulatedWorker(host=host or name)
        for name in names:
            self.tell(NodeAppeared(node=name, host=host, request=request))

    def tell_all(self) -> None:
        """Tell of every VM that is up, as a manager that takes over finds them."""
        for name, worker in self.workers.all.items():
            if worker.alive:
                self.tell(NodeAppeared(node=name, host=worker.host))

    def come_back(self, host: str) -> None:
        """A machine comes back with another id, after a while."""
        if self.world.chance(self.world.faults.comeback):
            self.world.at(self.world.between(0.5, 3), lambda: self.add_node(host))

    def request(self, action: RequestNodes) -> None:
        """Grant a request, or some of it, or refuse it, or lose it."""
        world = self.world
        if world.chance(world.faults.unanswered):
            return
        answer = self.answers.get(action.request)
        if answer is None:
            answer = self.answers[action.request] = self.decide(action)
        if not world.chance(world.faults.unanswered):
            world.at(world.between(0.1, 1) + world.lag_s(), lambda: self.tell(answer))

    def decide(self, action: RequestNodes) -> Event:
        """Say how many VMs there are for a request, and boot them."""
        count, world = action.count, self.world
        if world.chance(world.faults.refused):
            count = world.random.randrange(count)
        if not count:
            return RequestRefused(request=action.request, cause=world.random.choice(["quota", "capacity", "error"]))
        each = world.faults.num_devices
        vms = []
        for _ in range(-(-count // each)):
            self.num_nodes += 1
            vms.append(f"n{self.num_nodes}")
        for vm in vms:
            if not world.chance(world.faults.refused / 4):
                world.at(world.between(0.2, 4), lambda vm=vm: self.up(vm, None, action.request))
            elif self.num_nodes % 2:  # it never comes up, and the provider says so or does not
                for name in workers_of(vm, each):
                    lost = WorkerLost(worker=name, cause="taken while it booted")
                    world.at(world.between(0.2, 4), lambda lost=lost: self.tell(lost))
        paid = {}
        for vm in (vm for vm in vms if int(vm[1:]) % 5):  # of some nothing is known
            price = priced(int(vm[1:]))
            price = price.model_copy(update={"num_nodes": each}) if each > 1 else price
            paid |= dict.fromkeys(workers_of(vm, each), price)
        nodes = tuple(name for vm in vms for name in workers_of(vm, each))
        return NodesGranted(request=action.request, nodes=nodes, paid=paid)

    def acknowledged(self, name: str) -> None:
        """A VM of which nothing is needed any more is taken at once, or was taken, or stays after all."""
        if self.world.chance(self.world.faults.doubled):
            self.workers.killer(name)

    def notice(self, taken_after_s: float | None) -> None:
        """Give a notice of some worker's VM, now and then twice; then take it, or not."""
        world = self.world
        living = [name for name, worker in self.workers.all.items() if worker.alive]
        if not living:
            return
        name = world.random.choice(living)
        self.num_notices += 1
        world.note(f"{name} is noticed")
        names = (name, *beside(name, self.workers.all))
        for each in names:
            given = NoticeGiven(worker=each, lead_s=taken_after_s or 2.0, notice=f"notice {self.num_notices}")
            self.tell(given)
            if world.chance(world.faults.doubled):
                world.at(world.between(0, 4), lambda given=given: self.tell(given))
        if taken_after_s is not None and len(names) > 1:
            world.at(taken_after_s, lambda: self.workers.die_together(names))
        elif taken_after_s is not None:
            world.at(taken_after_s, lambda: self.workers.killer(name))
        elif world.chance(world.faults.notice_withdrawn):
            for each in names:
                world.at(world.between(0, 3), lambda each=each: self.tell(NoticeWithdrawn(worker=each)))

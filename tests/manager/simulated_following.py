"""What simulated workers keep for others: units in step with their primary's, and copies of its partial sums."""

from __future__ import annotations

import dataclasses
import random

from simulated_worker import SimulatedWorker
from simulated_world import World

from morph.contract.messages import ReshapeOrder
from morph.contract.salvage import Follow, PartialSum


class SimulatedFollowing:
    """Every pair of a worker and its follower, in the generation that both are in."""

    def __init__(self, world: World, workers: dict[str, SimulatedWorker]) -> None:
        self.world, self.workers = world, workers
        self.random = random.Random(world.seed)  # the world's own draws are what they are without followers
        self.in_step: set[tuple[int, str]] = set()
        self.broken: set[tuple[int, str]] = set()
        self.num_shared = self.num_copied = 0

    def begin(self, name: str, worker: SimulatedWorker, order: ReshapeOrder) -> None:
        """A worker is reshaped: what it is said to have of others' units it must have."""
        for follow in order.follows:
            if follow.follower == name and any(worker.units.get(unit) != order.version for unit in follow.known):
                raise self.world.broken(f"{name} is to have {follow.known} at {order.version}: {worker.units}")
            if follow.follower == name and worker.stage_units & set(follow.units):
                raise self.world.broken(f"{name} is to follow {follow.units}, which it drives")

    def enter(self, worker: SimulatedWorker, version: int) -> None:
        """A version is decided: gradients that are here for it are applied."""
        for unit, step in worker.shared.items():
            if step + 1 == version and worker.units.get(unit) == step:
                worker.units[unit] = version
        worker.shared = {}

    def share(self, name: str, step: int) -> bool:
        """A step is prepared: its gradients go to the follower, if that has caught up; whether it has them."""
        shape = self.workers[name].shape
        assert shape is not None
        follow = next((follow for follow in shape.follows if follow.worker == name), None)
        if follow is None or not follow.units:
            return False
        pair = shape.generation, name
        follower = self.workers[follow.follower]
        if self.random.random() < self.world.faults.broken_stream or not follower.alive:
            self.broken.add(pair)
        if pair in self.broken or (pair not in self.in_step and self.random.random() < 0.3):
            return False
        self.in_step.add(pair)
        self.num_shared += 1
        for unit in follow.units:
            follower.units[unit] = follower.shared[unit] = step
        return True

    def copies(self, name: str, step: int) -> list[PartialSum]:
        """What a worker that gives up a step has of others' sums: of whole runs of micro-batches, or none yet."""
        shape, found = self.workers[name].shape, list[PartialSum]()
        assert shape is not None
        every = shape.copy_sums_every
        for follow in shape.follows if every else ():
            found += self._copy_of(follow, step, every) if follow.follower == name else ()
        return found

    def _copy_of(self, follow: Follow, step: int, every: int) -> list[PartialSum]:
        primary = self.workers[follow.worker]
        if primary.begun_sums is None or primary.begun_sums.step != step:
            return []
        sums = dataclasses.replace(primary.begun_sums, counted=dict(primary.begun_sums.counted or {}))
        sums.run(every * self.random.randrange(len(sums.share) // every + 1))
        sums.keep(step)
        self.num_copied += len(sums.parts)
        return sums.parts

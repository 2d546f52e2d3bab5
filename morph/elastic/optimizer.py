"""The optimizer of a loop that Morph does not run: a step of all workers, applied by all or by none of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from morph.contract.errors import GenerationAborted, InputError, PeerLost
from morph.data.seeding import own_generators, seed_of
from morph.elastic.invitation import Invitation
from morph.elastic.membership import Place
from morph.elastic.mini_batches import Batch
from morph.elastic.replicas import Sum, Union, as_vector, move_to
from morph.elastic.session import Session
from morph.elastic.state import TrainingState
from morph.elastic.strategy import (
    AD_PSGD,
    PULL,
    S_SGD,
    SMA,
    SYNCS,
    begun,
    is_meeting,
    observed,
    partner,
    shares_of,
)
from morph.elastic.sums import JOINING, LOSS, Accumulation, Kind, Signals, StepSums, buckets_of
from morph.runtime.groups.channels import Ring
from morph.runtime.state.accumulators import Reduced, apply_change
from morph.runtime.state.parts import Memory

log = logging.getLogger("morph.elastic")

MOST_WORKERS = 4096
"""With a loop's own batches each worker contributes once: exact sums leave room for so many."""

KEPT_BYTES = 31 * 2**20
"""glibc returns what is freed to the system above twice the largest block so far that it mapped, of at most 32 MiB."""

MODEL = "model"
"""Under this name a replica of ad-psgd lies ready for others."""

_optimizers: list[Optimizer] = []


def the_optimizer() -> Optimizer:
    """Return the process's optimizer.

    Raises:
        InputError: there is none.
    """
    if not _optimizers:
        raise InputError(
            "there is no optimizer yet", field="batches", allowed="morph.elastic.Optimizer(...) before the loop"
        )
    return _optimizers[-1]


class _Try(NamedTuple):
    """One try of a step."""

    place: Place
    batch: Batch | None
    loss_of: Callable[[Any], Tensor]


class Optimizer:
    """Wraps a ``torch.optim`` optimizer; ``step`` runs the loss, sums gradients over all workers and applies them.

    The optimizer's gradients lie in memory that the next step uses again: what is to be kept of them must be copied.

    Args:
        optimizer: Of all parameters that are trained; its ``step`` takes no closure.
        model: The model, whole, on its device.
        accumulation: ``exact``: with ``morph.elastic.batches`` the weights are bit for bit those of a run that nothing
            disturbs, with any number of workers. ``fast``: ordinary floating point.
        sync: ``s-sgd``: gradients are averaged over all workers at each step. ``sma``: each worker applies its own
            gradients, and moves towards the mean of all models. ``ad-psgd``: each worker averages its model with one
            other worker's, and waits for nobody. ``auto``: s-sgd, and ad-psgd while the network is the bottleneck.

    Raises:
        InputError: an argument is not what it should be.
        WaitTimeout: the other workers do not come.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: Module,
        *,
        accumulation: Accumulation = "exact",
        sync: str = "s-sgd",
    ) -> None:
        if accumulation not in ("exact", "fast"):
            raise InputError("is no kind of sum", field="accumulation", value=accumulation, allowed="exact or fast")
        if sync not in SYNCS:
            raise InputError("is no way to synchronise", field="sync", value=sync, allowed=" or ".join(SYNCS))
        if sync != S_SGD:
            log.warning("sync=%s: workers' models may differ until the end, so results are not exact", sync)
        self._optimizer, self._accumulation = optimizer, accumulation
        self._state = TrainingState(model, optimizer, pace=begun(sync))
        self._parameters = self._state.parameters()
        devices = {str(parameter.device): parameter.device for parameter in self._parameters.values()}
        if len(devices) > 1:
            found = " and ".join(sorted(devices))
            raise InputError("lies on several devices", field="model", value=found, allowed="one device for all of it")
        self._device = next(iter(devices.values()), torch.device("cpu"))
        self._buckets = buckets_of(self._parameters)
        self._sums: StepSums | None = None
        self._left: list[Tensor] = []
        torch.empty(KEPT_BYTES, dtype=torch.uint8)  # freed at once, so that gradients come to pages that are there
        self._batch: Batch | None = None
        self._overflow: tuple[Place, dict[str, int]] | None = None
        self._rate: float | None = None
        self._num_shares = 0
        for name, parameter in self._parameters.items():
            hook: Any = partial(self._take_gradient, name)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call] # as backward
        self._session = Session(self._state, Invitation.of_environment(), self._become_one)
        _optimizers.append(self)

    @property
    def num_steps(self) -> int:
        """How many steps the model has."""
        return self._state.num_steps

    @property
    def num_workers(self) -> int:
        """How many workers there are now."""
        return len(self._session.place.ring.members)

    @property
    def rank(self) -> int:
        """This worker's place among them, from 0."""
        return self._session.place.ring.members.index(self._session.membership.me)

    @property
    def sync(self) -> str:
        """How workers are kept together now: ``s-sgd``, ``sma`` or ``ad-psgd``."""
        return self._state.pace.sync

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def settled_steps(self) -> int:
        """Return how many steps the model has, once this worker is in a ring and has its state."""
        self._session.settle()
        return self._state.num_steps

    def use(self, batch: Batch) -> None:
        """The next step is of this batch."""
        self._batch = batch

    def finish(self) -> None:
        """Leave in good order after the last step, with the mean of all models where they differ.

        The end of ``batches``, or of the process, does it too.
        """
        self._session.finish()

    def step(self, loss_of: Callable[[Any], Tensor]) -> float:
        """Do one step with all other workers, however often it must be begun again.

        Args:
            loss_of: Returns the mean loss of a share of the batch. It may be called several times, or not at all. In a
                loop with batches of its own it is called with None, once for each try.

        Returns:
            The mean loss, the same at every worker; under ``ad-psgd`` this worker's own.

        Raises:
            NonFiniteGradient: a gradient is NaN or infinite.
            TrainingStopped: this worker trains no more; says why.
        """
        batch, self._batch = self._batch, None
        wanted, self._overflow = self._state.num_steps, None
        ways = {S_SGD: self._step_s_sgd, SMA: self._step_sma, AD_PSGD: self._step_ad_psgd}
        num_tries = 0
        while self._state.num_steps == wanted:  # it may come with the state of somebody who has this step
            begin_s = time.monotonic()
            place = self._session.settle()
            sync = self._state.pace.sync
            if self._state.num_steps > wanted:
                break
            if sync == S_SGD and self._state.differs:
                self._become_one()
                continue
            num_tries += 1
            try:
                ways[sync](_Try(place, batch, loss_of))
            except (GenerationAborted, PeerLost):
                self._session.leave(place)
                continue
            finally:
                self._sums = None
            seconds = time.monotonic() - begin_s
            self._rate = self._num_shares / seconds if num_tries == 1 else None
        while self._is_meeting_due():
            self._meet()
        return self._state.loss

    def _step_s_sgd(self, given: _Try) -> None:
        place = given.place
        signals = self._signals() if self._state.pace.is_auto else None
        reduced, exponents = self._computed(given, self._session.ring)
        told = None if signals is None else signals.reduce(self._session.ring, len(place.ring.members))
        if any(part.overflowed for part in reduced):
            self._overflow = (place, exponents)
            return
        if self._is_agreed(place):
            step: tuple[Tensor, ...] = ()
            if self._session.journal.is_open:
                gradients = {name: one for part in reduced[:-1] for name, one in part.gradients.items()}
                step = (self._state.pack_gradients(gradients),)
            self._apply(reduced, exponents)
            is_joined = float(reduced[-1].gradients[JOINING]) > 0
            self._cross(place, None if told is None else told[1], is_joined, step)

    def _step_sma(self, given: _Try) -> None:
        place, weights = given.place, self._state.weights()
        total = Sum(as_vector(weights), self._session.ring)  # of what the step begins with, while it computes
        reduced, exponents = self._computed(given, None)
        signals = self._signals(float(reduced[-1].gradients[LOSS]))
        mean = total.wait("the sum of all replicas") / len(place.ring.members)
        loss, rate, is_joined = signals.reduce(self._session.ring, len(place.ring.members))
        if self._is_agreed(place):
            move_to(weights, mean, PULL)
            self._apply(reduced, exponents)
            self._state.loss, self._state.differs = loss, True
            self._cross(place, rate, is_joined)

    def _step_ad_psgd(self, given: _Try) -> None:
        """Needs nobody: the partner may be lost, and the ring."""
        members, weights, membership = given.place.ring.members, self._state.weights(), self._session.membership
        other = partner(members, membership.me, self._state.num_steps)
        fetch = None if other is None else self._session.fetch(other, MODEL, given.place.interrupt)
        reduced, exponents = self._computed(given, None)
        found = None if fetch is None else fetch.wait()
        mine = as_vector(weights)
        if found is not None and len(found) == mine.nbytes:
            move_to(weights, found.view(mine.dtype), 0.5)
        self._apply(reduced, exponents)
        self._state.differs = True
        membership.shelf.put(MODEL, as_vector(weights))

    def _is_meeting_due(self) -> bool:
        state = self._state
        return is_meeting(state.pace.sync, state.num_steps) and state.met_at != state.num_steps

    def _meet(self) -> None:
        """Try once to meet the others, unless somebody's state comes that was there."""
        place = self._session.settle()
        if not self._is_meeting_due():
            return
        try:
            told = self._signals(self._state.loss).reduce(self._session.ring, len(place.ring.members))
        except (GenerationAborted, PeerLost):
            self._session.leave(place)
            return
        if self._is_agreed(place):
            self._state.met_at = self._state.num_steps
            self._cross(place, *told[1:])

    def _become_one(self) -> None:
        """Make all replicas equal, at all workers or at none."""
        while self._state.differs:
            place = self._session.settle()
            if not self._state.differs:
                return
            try:
                union = Union(self._state, self._session.ring, self.rank, len(place.ring.members))
                union.wait()
            except (GenerationAborted, PeerLost):
                self._session.leave(place)
                continue
            if self._is_agreed(place):
                union.apply()
                self._session.membership.shelf.drop(MODEL)

    def _signals(self, loss: float = 0.0) -> Signals:
        return Signals(loss, self._rate, has_joiners=self._session.membership.has_ready_joiners)

    def _is_agreed(self, place: Place) -> bool:
        """Whether what was reduced counts; if so, all who go on will have it."""
        is_agreed = self._session.membership.reduced(place.ring.ballot)
        if not is_agreed:
            self._session.leave(place)
        return is_agreed

    def _cross(self, place: Place, rate: float | None, is_joined: bool, step: tuple[Tensor, ...] = ()) -> None:
        """At a boundary: change the strategy, keep the step for joiners, and let in who waits."""
        if rate is not None:
            self._state.pace, reason = observed(self._state.pace, rate, len(place.ring.members))
            if reason is not None:
                log.info("step %d: %s from now on: %s", self._state.num_steps, self._state.pace.sync, reason)
        step = (self._state.pack_applied(), *step) if step else ()
        is_wanted = self._session.membership.has_joiners
        self._session.journal.boundary(self._state, step, is_wanted=is_wanted, is_apart=self._state.differs)
        if is_joined:
            self._session.cross_boundary(place)

    def _computed(self, given: _Try, ring: Ring | None) -> tuple[list[Reduced], dict[str, int]]:
        """Run this worker's shares; return gradients summed over the ring, or its own alone, and the next scales."""
        is_shared = self._state.pace.sync == S_SGD
        place, batch = given.place, given.batch
        rank, size = place.ring.members.index(self._session.membership.me), len(place.ring.members)
        num_shares = MOST_WORKERS if batch is None else batch.num_shares
        kind = Kind(self._accumulation, num_shares + 1, self._parameters, self._state.buffers(), self._buckets)
        mine = [rank] if batch is None else shares_of(rank, size, num_shares, is_shared=is_shared)
        num_summed = len(mine) if not is_shared else size if batch is None else num_shares
        # Whoever left a ring may not know that a sum overflowed there: all begin with the scales before it.
        scales = self._overflow[1] if self._overflow and self._overflow[0] is place else self._state.exponents
        self._num_shares = len(mine)
        buffers = {name: one.clone() for name, one in self._state.buffers().items()}
        try:
            while True:
                # Of a step that was given up nothing is left: an operation of its ring may still write into it.
                memory, self._left = Memory(self._device, self._left), []
                self._sums = StepSums(kind, scales, ring, place.interrupt, num_summed, memory)
                if is_shared and self._session.membership.has_ready_joiners:
                    self._sums.add_joining()
                for index in mine:
                    if is_shared:
                        place.interrupt.check()
                    self._sums.is_last_share = index == mine[-1]
                    self._run_share(given, index)
                    if buffers:
                        self._sums.add_changes(buffers)
                        self._restore(buffers)
                reduced = self._sums.reduced(self._state.num_steps)
                scales = {name: one for part in reduced for name, one in part.exponents.items()}
                if is_shared or not any(part.overflowed for part in reduced):
                    return reduced, scales
        finally:
            self._restore(buffers)

    def _run_share(self, given: _Try, index: int) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        if given.batch is None:
            self._run(given.loss_of(None))
            return
        share = given.batch.share(index)
        with own_generators() as seed_all:
            seed_all(seed_of(given.batch.seed, "share", given.batch.step, index))
            self._run(given.loss_of(share))

    def _run(self, loss: Tensor) -> None:
        assert self._sums is not None
        self._sums.add_loss(float(loss.detach()))
        loss.backward()  # type: ignore[no-untyped-call] # torch ships no types for it

    def _take_gradient(self, name: str, parameter: Parameter) -> None:
        if self._sums is not None:
            self._sums.add_gradient(name, parameter)

    def _restore(self, buffers: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, one in self._state.buffers().items():
                one.copy_(buffers[name])

    def _apply(self, reduced: list[Reduced], exponents: dict[str, int]) -> None:
        for part in reduced[:-1]:
            for name, gradient in part.gradients.items():
                self._parameters[name].grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        assert self._sums is not None
        self._left = list(self._sums.memory.used.values())
        aside = reduced[-1].gradients
        for name, buffer in self._state.buffers().items():
            apply_change(name, buffer, aside[name])
        self._state.exponents = exponents
        self._state.loss = float(aside[LOSS])
        self._state.num_steps += 1

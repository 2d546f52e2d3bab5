"""The optimizer of an elastic loop: each step is applied by all workers or by none."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.lr_scheduler import LRScheduler

from morph.contract.errors import GenerationAborted, InputError, PeerLost
from morph.contract.messages import WEIGHT
from morph.elastic.gradients import Gradients, Try
from morph.elastic.invitation import Invitation
from morph.elastic.membership import RingPlace
from morph.elastic.mini_batches import Batch, batch_users, is_used_by_another, loss_warnings, use_batches_with
from morph.elastic.participation import Participation
from morph.elastic.replicas import Sum, Union, as_vector, move_to
from morph.elastic.settings import SettingsDiffer, difference, exchanged, schedule_of
from morph.elastic.state import TrainingState
from morph.elastic.strategy import (
    AD_PSGD,
    PULL,
    S_SGD,
    SMA,
    SYNCS,
    begun,
    is_sync_step,
    observed,
    partner,
)
from morph.elastic.sums import JOINING, LOSS, Accumulation, Signals
from morph.losses import Loss
from morph.runtime.state.accumulators import Reduced, apply_change
from morph.runtime.state.optimizer_state import MakeScheduler
from morph.runtime.state.unit_state import squared_norm

log = logging.getLogger("morph.elastic")

CLIP_EPSILON = 1e-6
"""The same constant as in ``torch.nn.utils.clip_grad_norm_``."""

STATE = "morph.elastic"
"""The only key of ``state_dict``."""
SECOND = (
    "is the second in this process, and each would be a job of its own: some workers would wait for others that are in "
    "another optimizer"
)
UNUSED = "gives its batches to the optimizer that was made last, which is another one"
ONE_FOR_SEVERAL = (
    "one elastic optimizer of all models: wrap a torch optimizer with a group for each model (morph.Optimizers for "
    "several classes), and freeze the models that a step does not train (requires_grad_(False))"
)
MODEL = "model"
"""The name under which a worker's shelf (:mod:`morph.elastic.shelf`) holds its model for others, with ad-psgd."""


class Optimizer:
    """Wraps a ``torch.optim`` optimizer; ``step`` runs the loss, sums gradients over all workers and applies them.

    Gradients are set only while the wrapped optimizer steps: read or copy them in its ``register_step_pre_hook``.
    Parameters may be frozen and thawed between two steps (``requires_grad``), and added to the optimizer, in the same
    way at all workers.

    Args:
        optimizer: An optimizer of the model's parameters; its ``step`` takes no closure.
        model: The whole model, on its device.
        accumulation: ``exact``: with ``morph.elastic.batches`` the weights are bit for bit those of an undisturbed run,
            with any number of workers. ``fast``: ordinary floating point.
        sync: ``s-sgd``: gradients are averaged over all workers at each step. ``sma``: each worker applies its own
            gradients, and moves towards the mean of all models. ``ad-psgd``: each worker averages its model with
            another's, and never waits for it. ``auto``: s-sgd, but ad-psgd while the network is the bottleneck.
        lr_scheduler: The optimizer's schedule, or a function that makes it from the optimizer. Morph steps it after
            each step (the loop must not), and workers share its state.
        clip_grad_norm: Largest 2-norm of all gradients together, as applied; ``math.inf`` only measures the norm.
        state: The loop's own objects whose state a joiner gets from the oldest worker, and ``state_dict`` includes, by
            name: anything with ``state_dict`` and ``load_state_dict`` (moving averages, scalers), or a dict that is
            changed in place (best values).

    Raises:
        InputError: an argument has a value that is not allowed, or this is not the process's first optimizer under
            ``morph elastic``.
        WaitTimeout: the other workers do not arrive in time.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: Module,
        *,
        accumulation: Accumulation = "exact",
        sync: str = "s-sgd",
        lr_scheduler: LRScheduler | MakeScheduler | None = None,
        clip_grad_norm: float | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if accumulation not in ("exact", "fast"):
            raise InputError("is not a kind of sum", field="accumulation", value=accumulation, allowed="exact or fast")
        if sync not in SYNCS:
            raise InputError("is not a way to synchronise", field="sync", value=sync, allowed=" or ".join(SYNCS))
        if isinstance(optimizer, torch.optim.SparseAdam):
            allowed = "an optimizer for dense gradients (torch.optim.Adam): workers sum all gradients as dense"
            raise InputError("requires sparse gradients", field="optimizer", value="SparseAdam", allowed=allowed)
        if clip_grad_norm is not None and (isinstance(clip_grad_norm, bool) or not clip_grad_norm > 0):
            allowed = "a number above 0, or None"
            raise InputError("is not a bound of a norm", field="clip_grad_norm", value=clip_grad_norm, allowed=allowed)
        if sync != S_SGD:
            log.warning("sync=%s: workers' models may differ until the end, so results are not exact", sync)
        self._optimizer, self._clip_grad_norm = optimizer, clip_grad_norm
        scheduler = None if lr_scheduler is None else schedule_of(optimizer, lr_scheduler)
        agreed = {"accumulation": accumulation, "sync": sync, "clip_grad_norm": clip_grad_norm}
        self._state = TrainingState(
            model, optimizer, pace=begun(sync), scheduler=scheduler, agreed=agreed, carried=dict(state or {})
        )
        self._parameters = self._state.named
        self._gradients = Gradients(self._state, accumulation)
        self.gradient_norm: float | None = None
        """The 2-norm of all gradients of the last step, before they were clipped; None without ``clip_grad_norm``."""
        self._batch: Batch | None = None
        self._rate: float | None = None
        invitation = Invitation.of_environment()
        if invitation.is_shared and any(not user.is_over for user in batch_users()):
            raise InputError(SECOND, field="morph.elastic.Optimizer", allowed=ONE_FOR_SEVERAL)
        self._participation = Participation(self._state, invitation, self._become_one)
        use_batches_with(self)

    @property
    def num_steps(self) -> int:
        """The number of steps that the model has had."""
        return self._state.num_steps

    @property
    def num_workers(self) -> int:
        """The present number of workers."""
        return len(self._participation.place.ring.members)

    @property
    def rank(self) -> int:
        """This worker's rank among the workers, from 0."""
        return self._participation.place.ring.members.index(self._participation.membership.me)

    @property
    def sync(self) -> str:
        """How workers are kept together now: ``s-sgd``, ``sma`` or ``ad-psgd``."""
        return self._state.pace.sync

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    @property
    def is_over(self) -> bool:
        """Whether this worker has left the job."""
        return self._participation.is_over

    def zero_grad(self) -> None:
        """Drop the gradients of a backward of your own: ``step`` refuses them."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything with which the loop continues, to be saved by ``torch.save`` at rank 0.

        It includes model, optimizer, schedule, number of steps, and the objects of ``state=``.
        """
        self._state.load_carried(in_step=True)
        return {STATE: self._state.pack()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from what ``state_dict`` returned; call this before the first step.

        Raises InputError if another loop saved it, or a step was done before.
        """
        if self._state.num_steps:
            raise InputError("comes too late", field="load_state_dict", allowed="a call before the first step")
        try:
            self._state.unpack(saved[STATE].cpu())
        except (AttributeError, KeyError, RuntimeError, ValueError) as error:
            problem = f"is not a state of this model and optimizer: {type(error).__name__}: {error}"
            allowed = "what state_dict() of the same loop's morph.elastic.Optimizer returned"
            raise InputError(problem, field="load_state_dict", allowed=allowed) from error
        self._state.load_carried(in_step=True)

    def settled_steps(self) -> int:
        """Return how many steps the model has had, once this worker is in a ring and has its state."""
        self._state.load_carried(in_step=False)
        self._participation.settle()
        self._state.load_carried(in_step=False)
        self._state.pass_boundary()
        return self._state.num_steps

    def use(self, batch: Batch) -> None:
        """Set the batch of the next step."""
        self._batch = batch

    def finish(self) -> None:
        """Leave the job properly after the last step, with the mean of all models if they differ.

        The end of ``batches``, or of the process, also does this.
        """
        self._state.load_carried(in_step=True)
        self._participation.finish()
        self._state.load_carried(in_step=True)

    def __enter__(self) -> Optimizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave properly, but leave at once if the block raised anything except ``SystemExit`` with code 0."""
        if isinstance(error, SystemExit):
            self._participation.will_exit(error)
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.finish()
        else:
            self._participation.close()

    def step(self, loss_of: Callable[[Any], Tensor | Loss]) -> float:
        """Do one step together with all other workers; the attempt is repeated if workers are lost.

        Args:
            loss_of: Returns the mean loss of a share of the batch, or a :class:`morph.Loss`: totals of all shares are
                divided by the sum of all weights, and a step without any weight changes no parameter. It may be called
                several times, or not at all. In a loop with batches of its own it is called with None, once for each
                attempt.

        Returns:
            The mean loss, the same at every worker; under ``ad-psgd`` this worker's own. NaN if nothing has a weight.

        Raises:
            InputError: gradients were computed outside ``loss_of``, or the settings are not those of the oldest worker.
            NonFiniteGradient: a gradient is NaN or infinite.
            TrainingStopped: this worker no longer trains; the message says why.
        """
        self._gradients.check()
        self._state.load_carried(in_step=True)
        batch, self._batch = self._batch, None
        wanted, self._gradients.overflow = self._state.num_steps, None
        ways = {S_SGD: self._step_s_sgd, SMA: self._step_sma, AD_PSGD: self._step_ad_psgd}
        if batch is not None and wanted == 0 and self.rank == 0:
            for sentence in loss_warnings(batch.batches, self._state.model, loss_of):
                log.warning("%s", sentence)
        num_tries = 0
        while self._state.num_steps == wanted:  # the step may arrive with another worker's state
            begin_s = time.monotonic()
            place = self._participation.settle()
            sync = self._state.pace.sync
            if self._state.num_steps > wanted:
                break
            self._state.load_carried(in_step=True)
            if sync == S_SGD and self._state.differs:
                self._become_one()
                continue
            num_tries += 1
            try:
                ways[sync](Try(place, batch, loss_of))
            except (GenerationAborted, PeerLost):
                self._participation.leave(place)
                continue
            except SettingsDiffer:
                self._compare(place)
                continue
            except SystemExit as exit:
                self._participation.will_exit(exit)
                raise
            except (AttributeError, LookupError, TypeError) as error:
                if batch is not None or not is_used_by_another(self):
                    raise
                raise InputError(UNUSED, field="morph.elastic.batches", allowed=ONE_FOR_SEVERAL) from error
            finally:
                self._gradients.drop()
            seconds = time.monotonic() - begin_s
            self._rate = self._gradients.num_shares / seconds if num_tries == 1 else None
        while self._is_sync_due():
            self._synchronise()
        return self._state.loss

    def _step_s_sgd(self, given: Try) -> None:
        place = given.place
        signals = self._signals() if self._state.pace.is_auto else None
        reduced, exponents = self._gradients.compute(given, self._participation.ring, self._participation.membership)
        signalled = None if signals is None else signals.reduce(self._participation.ring, len(place.ring.members))
        if any(part.overflowed for part in reduced):
            self._gradients.overflow = (place, exponents)
            return
        if self._is_agreed(place):
            step = self._apply(reduced, exponents, is_kept=self._participation.catch_up_log.is_open)
            self._state.summed = self._gradients.settings["trained"]
            is_joined = float(reduced[-1].gradients[JOINING]) > 0
            self._cross(place, None if signalled is None else signalled[1], is_joined, step)

    def _step_sma(self, given: Try) -> None:
        place, weights = given.place, self._state.weights()
        total = Sum(as_vector(weights), self._participation.ring)  # the weights before the step
        reduced, exponents = self._gradients.compute(given, None, self._participation.membership)
        signals = self._signals(_mean_loss(reduced[-1].gradients))
        mean = total.wait("the sum of all replicas") / len(place.ring.members)
        loss, rate, is_joined = signals.reduce(self._participation.ring, len(place.ring.members))
        if self._is_agreed(place):
            move_to(weights, mean, PULL)
            self._apply(reduced, exponents)
            self._state.loss, self._state.differs, self._state.summed = loss, True, self._gradients.settings["trained"]
            self._cross(place, rate, is_joined)

    def _step_ad_psgd(self, given: Try) -> None:
        """Do one step that needs no other worker, even if the partner or the whole ring is lost."""
        members, weights, membership = given.place.ring.members, self._state.weights(), self._participation.membership
        other = partner(members, membership.me, self._state.num_steps)
        fetch = None if other is None else self._participation.fetch(other, MODEL, given.place.interrupt)
        reduced, exponents = self._gradients.compute(given, None, self._participation.membership)
        fetched = None if fetch is None else fetch.wait()
        mine = as_vector(weights)
        if fetched is not None and len(fetched) == mine.nbytes:
            move_to(weights, fetched.view(mine.dtype), 0.5)
        self._apply(reduced, exponents)
        self._state.differs = True
        membership.shelf.put(MODEL, as_vector(weights))

    def _is_sync_due(self) -> bool:
        state = self._state
        return is_sync_step(state.pace.sync, state.num_steps) and state.met_at != state.num_steps

    def _synchronise(self) -> None:
        """Try once to synchronise with all workers, unless one that has done so already sends its state first."""
        place = self._participation.settle()
        if not self._is_sync_due():
            return
        self._gradients.look_at_settings()
        try:
            signalled = self._signals(self._state.loss).reduce(self._participation.ring, len(place.ring.members))
        except (GenerationAborted, PeerLost):
            self._participation.leave(place)
            return
        except SettingsDiffer:
            self._compare(place)
            return
        if self._is_agreed(place):
            self._state.met_at, self._state.summed = self._state.num_steps, self._gradients.settings["trained"]
            self._cross(place, *signalled[1:])

    def _become_one(self) -> None:
        """Make all replicas equal, at all workers or at none."""
        while self._state.differs:
            place = self._participation.settle()
            if not self._state.differs:
                return
            try:
                union = Union(self._state, self._participation.ring, self.rank, len(place.ring.members))
                union.wait()
            except (GenerationAborted, PeerLost):
                self._participation.leave(place)
                continue
            if self._is_agreed(place):
                union.apply()
                self._participation.membership.shelf.drop(MODEL)

    def _signals(self, loss: float = 0.0) -> Signals:
        has_joiners = self._participation.membership.has_ready_joiners
        return Signals(loss, self._rate, self._gradients.digest, has_joiners=has_joiners)

    def _is_agreed(self, place: RingPlace) -> bool:
        """Whether the reduced values count; if so, all workers that continue will have these values."""
        is_agreed = self._participation.membership.reduced(place.ring.ballot)
        if not is_agreed:
            self._participation.leave(place)
        return is_agreed

    def _cross(self, place: RingPlace, rate: float | None, is_joined: bool, step: tuple[Tensor, ...] = ()) -> None:
        """Pass a step's boundary: update the strategy, keep the step for joiners, and let waiting joiners in."""
        if rate is not None:
            self._state.pace, reason = observed(self._state.pace, rate, len(place.ring.members))
            if reason is not None:
                log.info("step %d: %s from now on: %s", self._state.num_steps, self._state.pace.sync, reason)
        is_wanted = self._participation.membership.has_joiners
        self._participation.catch_up_log.boundary(self._state, step, is_wanted=is_wanted, is_apart=self._state.differs)
        if is_joined:
            self._participation.cross_boundary(place)

    def _compare(self, place: RingPlace) -> None:
        """End this worker with an InputError if its settings are not the oldest's; the others begin the step again."""
        try:
            oldest = exchanged(self._participation.ring, self._gradients.settings)[0]
        except (GenerationAborted, PeerLost):
            oldest = self._gradients.settings
        if oldest != json.loads(json.dumps(self._gradients.settings)):
            self._participation.close()
            raise difference(self._gradients.settings, oldest, list(self._parameters), self._state.num_steps) from None
        self._participation.leave(place)

    def _clip(self, gradients: Mapping[str, Tensor]) -> None:
        """Scale gradients down to the requested norm; after exact sums the result has the same bits in any ring."""
        if self._clip_grad_norm is not None:
            self.gradient_norm = math.sqrt(squared_norm(gradients.values()))
            shrink = min(1.0, self._clip_grad_norm / (self.gradient_norm + CLIP_EPSILON))
            for gradient in gradients.values():
                gradient.mul_(shrink)

    def _apply(self, reduced: list[Reduced], exponents: dict[str, int], *, is_kept: bool = False) -> tuple[Tensor, ...]:
        """Apply a step; return it in the form that joiners need, or empty if it need not be kept for them."""
        aside = reduced[-1].gradients
        gradients = {name: one for part in reduced[:-1] for name, one in part.gradients.items()}
        weight = float(aside[WEIGHT])
        if weight == 0:
            log.info("step %d: nothing in it has a weight, so parameters stay as they are", self._state.num_steps)
            gradients = {}
        elif weight != 1:
            for gradient in gradients.values():
                gradient.mul_(1 / weight)
        self._clip(gradients)
        packed = self._state.pack_gradients(gradients) if is_kept else None
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.get(name)
        self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._gradients.release()
        self._gradients.leave_mark()
        for name, buffer in self._state.buffers().items():
            apply_change(name, buffer, aside[name])
        self._state.exponents = exponents
        self._state.loss = _mean_loss(aside)
        self._state.num_steps += 1
        step = () if packed is None else (self._state.pack_applied(self._gradients.settings), packed)
        self._state.advance_schedule()
        return step


def _mean_loss(aside: Mapping[str, Tensor]) -> float:
    """Return the loss divided by its weight; NaN without any weight."""
    weight = float(aside[WEIGHT])
    return float(aside[LOSS]) / weight if weight else math.nan

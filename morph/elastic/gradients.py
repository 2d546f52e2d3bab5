"""Runs a worker's shares of a step, and sums their gradients during the backward pass."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from morph.contract.errors import InputError
from morph.contract.messages import WEIGHT
from morph.data.seeding import own_generators, seed_of
from morph.elastic.membership import Membership, RingPlace
from morph.elastic.mini_batches import Batch
from morph.elastic.settings import Digest, Settings
from morph.elastic.state import TrainingState
from morph.elastic.strategy import S_SGD, shares_of
from morph.elastic.sums import Accumulation, Kind, MemberSums, buckets_of
from morph.losses import Loss, values_of
from morph.runtime.groups.channels import Ring
from morph.runtime.state.accumulators import Reduced
from morph.runtime.state.parts import Memory

log = logging.getLogger("morph.elastic")

MOST_WORKERS = 4096
"""The most workers: with a loop's own batches each contributes once to a sum, and exact sums have room for these."""

MOST_CHANGES = 10
CHANGED = (
    "step %d: the loop changes gradients between two steps (clip_grad_norm_, a scaler's unscale_), without any effect: "
    "they are 0 there, because gradients exist only within step(); clip with "
    "morph.elastic.Optimizer(clip_grad_norm=...), or in register_step_pre_hook of the wrapped optimizer"
)

KEPT_BYTES = 31 * 2**20
"""The size of a block (of at most 32 MiB) to map and free once: glibc then keeps twice as much freed memory."""


class Try(NamedTuple):
    """One attempt at a step."""

    place: RingPlace
    batch: Batch | None
    loss_of: Callable[[Any], Tensor | Loss]


class Gradients:
    """Sums the gradients of a model's parameters, including those of parameters that are trained only at times.

    ``accumulation``: how gradients are summed: ``exact`` or ``fast``. Raises InputError if the model is on several
    devices.
    """

    def __init__(self, state: TrainingState, accumulation: Accumulation) -> None:
        self._state, self._parameters, self._accumulation = state, state.named, accumulation
        devices = {str(parameter.device): parameter.device for parameter in self._parameters.values()}
        if len(devices) > 1:
            names = " and ".join(sorted(devices))
            raise InputError("is on several devices", field="model", value=names, allowed="one device for all of it")
        self._device = next(iter(devices.values()), torch.device("cpu"))
        self._buckets: tuple[str, list[list[str]]] = ("", [])
        self.settings: Settings = {}
        self._groups_text, self.digest = "", Digest("")
        self._sums: MemberSums | None = None
        self._is_in_backward = False
        self._strayed: str | None = None
        self._left: list[Tensor] = []
        torch.empty(KEPT_BYTES, dtype=torch.uint8)  # freed at once, so that gradients reuse pages
        self.overflow: tuple[RingPlace, dict[str, int]] | None = None
        """The ring in which a sum of the last attempt at a step overflowed, and the scales for the next attempt."""
        self.num_shares = 0
        self._mark: Tensor | None = None
        self._num_changes = 0
        self._has_warned = False
        for name, parameter in self._parameters.items():
            self._listen(name, parameter)

    def drop(self) -> None:
        """End the current step without applying it."""
        self._sums = None

    def release(self) -> None:
        """Record that the step's gradients are applied: the next step may use their memory."""
        assert self._sums is not None
        self._left = list(self._sums.memory.used.values())

    def compute(self, given: Try, ring: Ring | None, membership: Membership) -> tuple[list[Reduced], dict[str, int]]:
        """Run this worker's shares; return the gradients, summed over the ring or these shares, and the next scales."""
        self.look_at_settings()
        is_shared = self._state.pace.sync == S_SGD
        place, batch = given.place, given.batch
        rank, size = place.ring.members.index(membership.me), len(place.ring.members)
        num_shares = MOST_WORKERS if batch is None else batch.num_shares
        kind = self._kind(num_shares + 1, self._state.summed if is_shared else self.settings["trained"])
        mine = [rank] if batch is None else shares_of(rank, size, num_shares, is_shared=is_shared)
        num_summed = len(mine) if not is_shared else size if batch is None else num_shares
        # A member that left a ring may not know that a sum overflowed there: in a new ring all use the old scales.
        scales = self.overflow[1] if self.overflow and self.overflow[0] is place else self._state.exponents
        self.num_shares = len(mine)
        buffers = {name: buffer.clone() for name, buffer in self._state.buffers().items()}
        try:
            while True:
                # After an abandoned step no memory is reused: an operation of the old ring may still write to it.
                memory, self._left = Memory(self._device, self._left), []
                self._sums = MemberSums(kind, scales, ring, place.interrupt, num_summed, memory)
                if is_shared and membership.has_ready_joiners:
                    self._sums.add_joining()
                if is_shared:
                    self._sums.add_digest(self.digest)
                for index in mine:
                    if is_shared:
                        place.interrupt.check()
                    self._sums.is_last_share = index == mine[-1]
                    self._run_share(given, index)
                    if buffers:
                        self._sums.add_changes(buffers)
                        self._restore(buffers)
                reduced = self._sums.reduced(self._state.num_steps)
                scales = {name: exponent for part in reduced for name, exponent in part.exponents.items()}
                if is_shared or not any(part.overflowed for part in reduced):
                    return reduced, scales
        finally:
            self._restore(buffers)

    def _run_share(self, given: Try, index: int) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        if given.batch is None:
            self._run(given.loss_of(None))
            return
        share = given.batch.share(index)
        with own_generators(seed_of(given.batch.seed, "share", given.batch.step, index)):
            self._run(given.loss_of(share))

    def _run(self, result: Tensor | Loss) -> None:
        assert self._sums is not None
        loss, further = values_of(result)
        self._sums.add_loss(float(loss.detach()), float(further.get(WEIGHT, 1.0)))
        self._is_in_backward = True
        try:
            loss.backward()  # type: ignore[no-untyped-call] # torch ships no types for it
        finally:
            self._is_in_backward = False

    def _listen(self, name: str, parameter: Parameter) -> None:
        """Collect the parameter's gradients whenever it is trained, even if it is frozen now."""
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen parameter accepts no hook
        hook: Any = partial(self._take_gradient, name)
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call] # as backward
        parameter.requires_grad_(is_trained)

    def _take_gradient(self, name: str, parameter: Parameter) -> None:
        if self._sums is None:
            self._strayed = name
        elif self._is_in_backward:
            self._sums.add_gradient(name, parameter)
        else:
            allowed = "a function that returns the loss: step() runs its backward, and clip_grad_norm= clips gradients"
            raise InputError("runs backward itself", field="loss_of", allowed=allowed)

    def leave_mark(self) -> None:
        """Leave zeros as the gradient of the smallest parameter: the next step sees whether the loop changes them."""
        parameters = [each for each in self._parameters.values() if each.requires_grad]
        if self._has_warned or not parameters:
            return
        least = min(parameters, key=Tensor.numel)
        self._mark = least.grad = torch.zeros_like(least, requires_grad=False)

    def check(self) -> None:
        """Refuse gradients that the loop's own backward has left, because a step would ignore them.

        Warns once if the loop changes gradients between steps (clipping, a scaler): there are none then to change.
        """
        mark, self._mark = self._mark, None
        self._num_changes += int(mark is not None and mark._version > 0)
        if self._num_changes == MOST_CHANGES and not self._has_warned:
            self._has_warned = True
            log.warning(CHANGED, self._state.num_steps)
        name, self._strayed = self._strayed, None
        if name is not None and self._parameters[name].grad is not None:
            raise InputError(
                "has a gradient before step(), which would ignore it: step() runs the backward of the loss that its "
                "function returns, and sums gradients over all workers",
                field=name,
                allowed="no backward() or clip_grad_norm_() of your own before it (clip_grad_norm= of "
                "morph.elastic.Optimizer clips), or zero_grad() after it",
            )

    def _restore(self, buffers: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._state.buffers().items():
                buffer.copy_(buffers[name])

    def look_at_settings(self) -> None:
        """Read the settings that the loop's own code has left, and compute their digest."""
        self._state.check_parameters()
        settings = self._state.settings()
        self._state.check_schedule(settings)
        if settings["groups"] is not self.settings.get("groups"):
            self._groups_text = json.dumps(settings["groups"])
        self.settings = settings
        self.digest = Digest(self._groups_text + json.dumps({**self.settings, "groups": None}))

    def _kind(self, num_contributions: int, summed: str) -> Kind:
        """Return how this step is summed: parameters that were not ``summed`` in the last step are reduced last."""
        late = "".join("01"[now > before] for now, before in zip(self.settings["trained"], summed, strict=True))
        if self._buckets[0] != summed:
            self._buckets = (summed, buckets_of(self._state.parameters(summed)))
        return Kind(
            self._accumulation,
            num_contributions,
            self._parameters,
            self._state.buffers(),
            self._buckets[1],
            buckets_of(self._state.parameters(late)) if "1" in late else (),
        )

"""Mini-batches whose samples and order do not depend on the workers, which compute shares of a fixed size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import nn

from morph.contract.errors import InputError
from morph.data.batches import Collate, Recipe
from morph.data.lengths import MicroBatch, checked_lengths, divided
from morph.data.loader import check_map_style, measured, num_at_hand, numbered
from morph.data.order import EpochOrder, Sampler
from morph.data.streams import reading_warning

MOST_SHARES = 32
TRIAL_S = 1.0
"""Seconds of processor time that the trial of the loss may take."""


class BatchUser(Protocol):
    """The consumer of mini-batches, one per step: ``morph.elastic.Optimizer``, whose module imports this one."""

    @property
    def num_steps(self) -> int:
        """The number of steps that the model has had."""

    def settled_steps(self) -> int:
        """Return how many steps the model has had, once this worker is in a ring and has the ring's state."""

    def use(self, batch: Batch) -> None:
        """Set the batch of the next step."""

    @property
    def is_over(self) -> bool:
        """Whether this worker has left the job."""

    def finish(self) -> None:
        """Leave the job properly after the last step."""


_users: list[BatchUser] = []
_looping: list[BatchUser] = []
"""The users of the loops over ``batches`` that are running."""


def batch_users() -> Sequence[BatchUser]:
    """Return the optimizers of this process, in order of their creation."""
    return _users


def is_used_by_another(user: BatchUser) -> bool:
    """Whether loops over ``batches`` are running, but none that uses this optimizer."""
    return bool(_looping) and user not in _looping


def use_batches_with(user: BatchUser) -> None:
    """From now on, use this optimizer for all loops over ``batches`` in this process."""
    _users.append(user)


def the_optimizer() -> BatchUser:
    """Return the process's optimizer."""
    if not _users:
        raise InputError(
            "there is no optimizer yet", field="batches", allowed="morph.elastic.Optimizer(...) before the loop"
        )
    return _users[-1]


class Batch:
    """The samples of one step. Each share's samples are loaded by the worker that computes the share."""

    def __init__(self, batches: Batches, step: int) -> None:
        self.step = step
        self.seed, self.num_shares = batches.seed, batches.num_shares
        self.batches = batches
        self._shares: list[MicroBatch] | None = None

    def share(self, index: int) -> Any:
        """Load a share's samples, collated as a ``DataLoader`` would.

        A sample's draws from the global generators depend only on (seed, epoch, sample).
        """
        given = self.batches
        if self._shares is None:
            places = given.order.mini_batch(self.step)
            self._shares = divided(places, given.share_size, given.lengths, given.recipe.buckets)
        share = self._shares[index]
        samples = given.recipe.read(given.dataset, share.places)
        return given.recipe.nest(samples, share.places, "dataset", share.length)


class Batches:
    """See ``batches``."""

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        seed: int,
        share_size: int | None,
        num_steps: int | None,
        recipe: Recipe,
        sampler: Sampler | None = None,
        lengths: Callable[[Any], Any] | None = None,
    ) -> None:
        dataset = numbered(dataset)
        size = check_map_style(dataset, "dataset")
        if global_batch < 1:
            raise InputError("is not a batch size", field="global_batch", value=global_batch, allowed="1 or more")
        if share_size is None:
            share_size = next(
                n for n in range(1, global_batch + 1) if global_batch % n == 0 and n * MOST_SHARES >= global_batch
            )
        if share_size < 1 or global_batch % share_size:
            allowed = f"a divisor of global_batch, {global_batch}"
            raise InputError("does not divide the batch", field="share_size", value=share_size, allowed=allowed)
        if num_steps is not None and num_steps < 0:
            raise InputError("is not a number of steps", field="num_steps", value=num_steps, allowed="0 or more")
        self.dataset, self.global_batch, self.seed, self.share_size = dataset, global_batch, seed, share_size
        self.num_shares = global_batch // share_size
        if bool(recipe.buckets) != (lengths is not None):
            raise InputError("needs lengths and buckets together", field="buckets", value=recipe.buckets)
        self.lengths = None if lengths is None else checked_lengths(lengths(dataset), size, recipe.buckets, "dataset")
        self.recipe = measured(recipe, dataset, self.lengths)
        self.order = EpochOrder(dataset, seed, global_batch, sampler)
        size = size if sampler is None else len(self.order.epoch(0))
        self.num_steps = max(1, size // global_batch) if num_steps is None else num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[Batch]:
        optimizer = the_optimizer()
        _looping.append(optimizer)
        try:
            while (step := optimizer.settled_steps()) < self.num_steps:
                batch = Batch(self, step)
                optimizer.use(batch)
                yield batch
                if optimizer.num_steps == step:
                    raise InputError(
                        "a batch was not used", field="batches", allowed="one optimizer.step(...) for each batch"
                    )
        finally:
            _looping.remove(optimizer)
        optimizer.finish()


def batches(
    dataset: Any,
    *,
    global_batch: int,
    seed: int = 0,
    share_size: int | None = None,
    num_steps: int | None = None,
    collate_fn: Collate | None = None,
    sampler: Sampler | None = None,
    lengths: Callable[[Any], Any] | None = None,
    buckets: Sequence[int] = (),
) -> Batches:
    """Return the mini-batches of a data set, for ``morph.elastic.Optimizer.step``.

    Args:
        dataset: Map-style: ``len(dataset)`` and ``dataset[i]``, such as a ``morph.data.streams.Stream``.
        global_batch: Samples per step, over all workers.
        seed: Seeds the order of samples, the draws of samples, and the draws of the model (dropout).
        share_size: Samples that are computed at once. It affects the result, so it does not depend on the number of
            workers; each worker computes any number of shares of a step. None: the smallest size that makes at most 32
            shares.
        num_steps: The number of steps in all; None: one pass over the data.
        collate_fn: Makes a batch of a list of samples, as in a ``DataLoader``; None: the default of ``DataLoader``. The
            global generators are seeded for it by its samples.
        sampler: ``sampler(dataset, seed, epoch)`` returns an epoch's samples in order: see ``morph.data.order``.
        lengths: ``lengths(dataset)`` returns the length of each sample, if lengths vary. A share has samples of
            similar length.
        buckets: Lengths, ascending, to which shares are padded: each to the smallest that holds its samples. ``labels``
            are padded with -100, other keys with 0.

    Raises:
        InputError: an argument is wrong; the message names it.
    """
    recipe = Recipe(seed, collate_fn, tuple(buckets))
    return Batches(dataset, global_batch, seed, share_size, num_steps, recipe, sampler, lengths)


def loss_warnings(batches: Batches, model: nn.Module, loss_of: Callable[[Any], Any]) -> tuple[str, ...]:
    """Return the warnings that ``morph run`` gives about a loss that is not a mean over samples; Morph assumes one.

    A further warning is about the cost of reading data that can be read only from its beginning.

    Calls ``loss_of`` several times without gradients, with different samples of the data set. Returns nothing if a call
    fails, or if samples cannot be told apart: the step calls ``loss_of`` next, and reports the error.
    """
    from morph.preflight.mean_loss import LossTrial, mean_warnings  # imported only where it is needed

    def read(indices: Sequence[int]) -> list[Any]:
        return batches.recipe.read(batches.dataset, [(0, index) for index in indices])

    def collate(samples: Sequence[Any]) -> Any:
        return batches.recipe.nest(samples, [(0, 0)] * len(samples), "dataset")

    size, costs = num_at_hand(batches.dataset), reading_warning(batches.dataset, "dataset")
    trial = LossTrial(loss_of, model, size, read, collate, part="share", setting="share_size")
    known = () if costs is None else (costs,)
    try:
        return (*known, *mean_warnings(trial, running_s=TRIAL_S))
    except Exception:  # the user's loss and data set may raise anything
        return known

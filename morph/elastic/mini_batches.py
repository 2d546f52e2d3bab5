"""Mini-batches whose samples and order do not depend on who trains: shares of a fixed size, dealt to whoever trains."""

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
"""Processor time for which the loss is tried."""


class BatchUser(Protocol):
    """What takes the mini-batches of a loop, one step after the other: ``morph.elastic.Optimizer``."""

    @property
    def num_steps(self) -> int:
        """How many steps the model has."""

    def settled_steps(self) -> int:
        """Return how many steps the model has, once this worker is in a ring and has its state."""

    def use(self, batch: Batch) -> None:
        """The next step is of this batch."""

    def finish(self) -> None:
        """Leave in good order after the last step."""


_users: list[BatchUser] = []


def use_batches_with(user: BatchUser) -> None:
    """Let loops over ``batches`` in this process belong to this optimizer from now on."""
    _users.append(user)


def the_optimizer() -> BatchUser:
    """Return the process's optimizer.

    Raises:
        InputError: there is none.
    """
    if not _users:
        raise InputError(
            "there is no optimizer yet", field="batches", allowed="morph.elastic.Optimizer(...) before the loop"
        )
    return _users[-1]


class Batch:
    """The samples of one step. Its shares are loaded by whoever computes them."""

    def __init__(self, batches: Batches, step: int) -> None:
        self.step = step
        self.seed, self.num_shares = batches.seed, batches.num_shares
        self.batches = batches
        self._shares: list[MicroBatch] | None = None

    def share(self, index: int) -> Any:
        """Load a share's samples, collated as by a ``DataLoader``.

        What a sample draws from the global generators depends on (seed, epoch, sample) alone.
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
            raise InputError("is no batch", field="global_batch", value=global_batch, allowed="1 or more")
        if share_size is None:
            share_size = next(
                n for n in range(1, global_batch + 1) if global_batch % n == 0 and n * MOST_SHARES >= global_batch
            )
        if share_size < 1 or global_batch % share_size:
            allowed = f"a divisor of global_batch, {global_batch}"
            raise InputError("does not divide the batch", field="share_size", value=share_size, allowed=allowed)
        if num_steps is not None and num_steps < 0:
            raise InputError("is no number of steps", field="num_steps", value=num_steps, allowed="0 or more")
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
        while (step := optimizer.settled_steps()) < self.num_steps:
            batch = Batch(self, step)
            optimizer.use(batch)
            yield batch
            if optimizer.num_steps == step:
                raise InputError(
                    "a batch was not used", field="batches", allowed="one optimizer.step(...) for each batch"
                )
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
        global_batch: Samples of one step, over all workers.
        seed: Of the order of samples, of what samples draw, and of what the model draws (dropout).
        share_size: Samples that are computed at once. It is part of the result, so it does not depend on how many
            workers there are; one of them computes several shares of a step, or none. None: the smallest that makes
            at most 32 shares.
        num_steps: How many steps there are in all; None: one pass over the data.
        collate_fn: Makes a batch of a list of samples, as in a ``DataLoader``; None: as there by default. What it draws
            from the global generators is seeded by its samples.
        sampler: ``sampler(dataset, seed, epoch)`` returns an epoch's samples in order: see ``morph.data.order``.
        lengths: ``lengths(dataset)`` returns the length of each sample, where lengths vary: like ones share a share.
        buckets: Lengths, ascending, to which shares are padded: each to the smallest that holds its samples. ``labels``
            are padded with -100, others with 0.

    Raises:
        InputError: naming what is wrong.
    """
    recipe = Recipe(seed, collate_fn, tuple(buckets))
    return Batches(dataset, global_batch, seed, share_size, num_steps, recipe, sampler, lengths)


def loss_warnings(batches: Batches, model: nn.Module, loss_of: Callable[[Any], Any]) -> tuple[str, ...]:
    """Say, as ``morph run`` does, how the loss differs from the mean over samples that Morph takes it for.

    Also what reading the data costs, where it must be read from its beginning.

    Calls ``loss_of`` several times without gradients, with unlike samples of the data set. Says nothing where that
    fails, or where it cannot tell samples apart: if something is wrong, the step, which calls it next, says so.
    """
    from morph.preflight.mean_loss import LossTrial, mean_warnings  # not before it is needed

    def read(indices: Sequence[int]) -> list[Any]:
        return batches.recipe.read(batches.dataset, [(0, index) for index in indices])

    def collate(samples: Sequence[Any]) -> Any:
        return batches.recipe.nest(samples, [(0, 0)] * len(samples), "dataset")

    size, costs = num_at_hand(batches.dataset), reading_warning(batches.dataset, "dataset")
    trial = LossTrial(loss_of, model, size, read, collate, part="share", setting="share_size")
    known = () if costs is None else (costs,)
    try:
        return (*known, *mean_warnings(trial, running_s=TRIAL_S))
    except Exception:  # the loss and the data set are the user's, who may do anything with samples of any kind
        return known

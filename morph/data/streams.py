"""Data sets of samples in shards: any sample can be read by its number; the order reads shards one after the other."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, Protocol

import fsspec
import numpy as np
import torch

from morph.contract.errors import JobError
from morph.data.order import AGAIN
from morph.data.seeding import own_generators, seed_of
from morph.data.shard_files import ShardedFiles
from morph.data.shard_kinds import Jsonl, Mds, Parquet, Tar
from morph.data.shard_order import ShardedEpoch, ShardOrder

__all__ = ["Iterated", "Jsonl", "Mds", "Parquet", "Rows", "ShardedFiles", "Source", "Stream", "Tar", "reading_warning"]

log = logging.getLogger(__name__)

_PREPARED_AHEAD = 2
Samples = Sequence[Any]


class Source(Protocol):
    """A source of samples in shards, as ``Stream`` uses it.

    A source whose shards must be fetched may have a ``prepare(shard)``, which another thread calls some time before
    ``open(shard)``. With ``in_order = True``, shards are opened only in their order.
    """

    @property
    def sizes(self) -> Sequence[int]:
        """Return how many samples each shard has. The result is the same on every machine and at any time."""
        ...

    def open(self, shard: int) -> Samples:
        """Return the samples of a shard, which are read in any order. The result is kept for a while."""
        ...


class Stream:
    """A data set of the samples of a source: for ``Job.dataset``, ``Job.eval_data`` and ``morph.elastic.batches``.

    Seed and epoch determine the order of an epoch: shards in random order, and samples shuffled among those of
    ``window`` shards. So the samples of a step depend only on the step: there is no position to save, and a run can
    resume anywhere.

    Args:
        source: ``Jsonl``, ``Tar``, ``Parquet``, ``Mds``, ``Rows``, ``Iterated``, or any other ``Source``.
        sample: Makes a sample, a dict of tensors, from an item of the source. None: an item is already a sample.
        window: The number of shards of average size among whose samples these are shuffled; 0: samples of a shard keep
            their order.
        shuffle: Whether the order of shards is drawn.

    Raises:
        JobError: there are no samples, or ``window`` is not a whole number.
    """

    def __init__(
        self, source: Source, sample: Callable[[Any], Any] | None = None, *, window: int = 8, shuffle: bool = True
    ) -> None:
        if not isinstance(window, int) or isinstance(window, bool) or window < 0:
            raise JobError(
                "is not right", source="Stream", field="window", value=window, allowed="a whole number from 0"
            )
        self.source, self._sample = source, sample
        sizes = [int(size) for size in source.sizes]
        num_samples = sum(sizes)
        if not num_samples:
            raise JobError("is empty", source="Stream", field="source", allowed="at least one sample")
        width = max(1, window * num_samples // len([size for size in sizes if size]))
        self._order = ShardOrder(sizes, width, shuffle_shards=shuffle and not getattr(source, "in_order", False))
        self._most_open = width + 2 * max(sizes)
        self._open: OrderedDict[int, Samples] = OrderedDict()
        self._sizes = sizes
        self._prepared = deque[int](maxlen=4 * (window + _PREPARED_AHEAD))
        self._preparing: threading.Thread | None = None
        self.num_at_hand = next(size for size in sizes if size)
        """How many of the first samples can be read for inspection without reading much else."""

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard, place = self._order.shard_of(index)
        found = self._samples_of(shard)[place]
        return found if self._sample is None else self._sample(found)

    def sample_order(self, seed: int, epoch: int) -> ShardedEpoch:
        """Return the samples of an epoch in their order; see ``morph.data.order``."""
        return self._order(seed, epoch)

    def expect_samples(self, seed: int, places: Iterable[tuple[int, int]]) -> None:
        """In the background, fetch the shards that follow these samples, each given as an epoch and an index."""
        prepare = getattr(self.source, "prepare", None)
        *_, (epoch, index) = ((-1, 0), *places)
        if prepare is None or epoch < 0 or (self._preparing is not None and self._preparing.is_alive()):
            return
        order = self._order(seed, epoch % AGAIN)
        begin = int(order.place_of[self._order.shard_of(index)[0]]) + 1
        coming = [shard for shard in order.row[begin : begin + _PREPARED_AHEAD].tolist() if shard not in self._prepared]
        if coming:
            self._prepared.extend(coming)
            self._preparing = threading.Thread(target=_prepare, args=(prepare, coming), daemon=True)
            self._preparing.start()

    def _samples_of(self, shard: int) -> Samples:
        if shard not in self._open:
            with own_generators(seed_of("shard", shard)):
                self._open[shard] = self.source.open(shard)
            while len(self._open) > 1 and sum(self._sizes[other] for other in self._open) > self._most_open:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]


def _prepare(prepare: Callable[[int], object], shards: Iterable[int]) -> None:
    try:
        for shard in shards:
            prepare(shard)
    except Exception as error:  # the reader fetches the shard itself, and reports errors
        log.info("a shard was not fetched ahead: %s: %s", type(error).__name__, error)


def reading_warning(dataset: Any, name: str) -> str | None:
    """Return a warning if a data set can be read only from its beginning, which is slow; otherwise None."""
    if not isinstance(dataset, Stream) or not isinstance(dataset.source, Iterated):
        return None
    return (
        f"{name} is a stream without shards: each worker and data worker that needs samples reads all of it, and after "
        "a restart it is read from its beginning (docs/guides/training.md, Data in shards)"
    )


class Rows:
    """A map-style data set as a source, read mostly in its own order, for data that is on disk or memory-mapped.

    Args:
        dataset: Has a length and numbered samples, as a ``datasets.Dataset`` has.
        shard_size: The number of neighbouring samples that make a shard.
    """

    def __init__(self, dataset: Any, shard_size: int = 1000) -> None:
        self._dataset, self._shard_size = dataset, shard_size
        self.sizes = _even(len(dataset), shard_size, "Rows", "shard_size")

    def open(self, shard: int) -> Samples:
        return _View(self._dataset, shard * self._shard_size, self.sizes[shard])


class _View(Sequence[Any]):
    def __init__(self, dataset: Any, first: int, size: int) -> None:
        self._dataset, self._first, self._size = dataset, first, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[self._first + index]


class Iterated:
    """Data that can be read only from its beginning, as a source: an ``IterableDataset``, a stream of ``datasets``.

    Each process that reads samples reads all data up to the sample that it needs; the order of blocks stays as it is.
    So prefer shards, or data that one process can read as fast as the whole run trains.

    Args:
        make: Returns a new iterable of the same samples each time it is called.
        num_samples: How many samples make an epoch.
        block_size: How many samples are read at once, and kept in memory.
        bookmarks: A folder, in any file system of fsspec, for the states of an iterable that has ``state_dict`` and
            ``load_state_dict``, one per block: a process that begins in the middle reads from there. A state that
            does not lead back to the same samples is not used. None: reading always starts at the beginning.
        options: Options of that file system.
    """

    in_order = True

    def __init__(
        self,
        make: Callable[[], Iterable[Any]],
        num_samples: int,
        *,
        block_size: int = 1024,
        bookmarks: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._make, self._num_samples, self._block_size = make, num_samples, block_size
        self.sizes = _even(num_samples, block_size, "Iterated", "block_size")
        self._bookmarks = None if bookmarks is None else _Bookmarks(bookmarks, options or {})
        self._iterable: Iterable[Any] = ()
        self._moved: Iterable[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._block = 0

    def open(self, shard: int) -> list[Any]:
        block, samples = self._go_near(shard)
        while block != shard:
            block, samples = self._read_block()
        return samples

    def _go_near(self, shard: int) -> tuple[int, list[Any]]:
        """Read a block, or an earlier one if the block must be reached from there; return its number and samples."""
        marks, marked = self._bookmarks, None
        if marks is not None and (self._iterator is None or self._block != shard):
            marked = marks.last(shard, self._block if self._iterator is not None and self._block <= shard else 0)
        if marks is not None and marked is not None:
            block, state, digest = marked
            self._begin(block, state)
            with suppress(JobError):  # the iterable ends too soon
                read = self._read_block()
                if _digest(read[1]) == digest:
                    return read
            log.warning("the stream is read from its beginning: a state does not lead back to the same samples")
            self._bookmarks, self._iterator = None, None
        if self._iterator is None or self._block > shard:
            self._begin(0, None)
        return self._read_block()

    def _begin(self, block: int, state: Any) -> None:
        with own_generators(seed_of("block", block)):
            made = self._make()
            if made is self._moved:
                allowed = "with bookmarks, a function that makes a new iterable at each call"
                raise JobError("returns the same iterable again", source="Iterated", field="make", allowed=allowed)
            self._iterable = made
            if state is not None:
                self._moved = made
                made.load_state_dict(state)  # type: ignore[attr-defined]  # the iterable returned this state
            self._iterator, self._block = iter(made), block

    def _read_block(self) -> tuple[int, list[Any]]:
        """Read the next block; return its number and samples."""
        assert self._iterator is not None
        block, marks = self._block, self._bookmarks
        state = marks.state_of(self._iterable) if marks is not None and block else None
        with own_generators(seed_of("block", block)):
            samples = list(itertools.islice(self._iterator, self.sizes[block]))
        if len(samples) < self.sizes[block]:
            ended = block * self._block_size + len(samples)
            allowed = f"up to {ended}, where the iterable ends" if ended else "an iterable that has samples each time"
            self._iterator = None
            raise JobError(
                "is too large", source="Iterated", field="num_samples", value=self._num_samples, allowed=allowed
            )
        if marks is not None and state is not None:
            marks.keep(block, state, samples)
        self._block = block + 1
        return block, samples


class _Bookmarks:
    """States of an iterable before blocks, each with a digest of the block."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._fs, self._folder = fsspec.core.url_to_fs(url, **options)

    def last(self, block: int, now: int) -> tuple[int, Any, str] | None:
        """Return the nearest bookmark before a block and after ``now``, as block, state and digest, or None."""
        try:
            names = self._fs.ls(self._folder, detail=False)
        except FileNotFoundError:
            return None
        numbers = [int(stem) for name in names if (stem := PurePosixPath(str(name)).stem).isdigit()]
        newest = max((number for number in numbers if now < number <= block), default=0)
        if newest == 0:
            return None
        try:
            content = json.loads(self._fs.cat_file(self._path(newest)))
            return newest, content["state"], str(content["samples"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def state_of(self, iterable: Any) -> Any:
        """Return the state of an iterable, if it has one that can be written."""
        take = getattr(iterable, "state_dict", None)
        try:
            state = None if take is None else take()
            return None if state is None else json.loads(json.dumps(state))
        except (TypeError, ValueError):
            return None

    def keep(self, block: int, state: Any, samples: Sequence[Any]) -> None:
        """Write a bookmark, unless there is one."""
        try:
            if not self._fs.exists(self._path(block)):
                content = {"state": state, "samples": _digest(samples)}
                self._fs.makedirs(self._folder, exist_ok=True)
                self._fs.pipe_file(self._path(block), json.dumps(content).encode())
        except OSError as error:
            log.warning("a state of the stream cannot be kept in %s: %s", self._folder, error)

    def _path(self, block: int) -> str:
        return f"{self._folder}/{block:09d}.json"


def _digest(sample: Any) -> str:
    """Return a digest of a sample: of all bytes of its tensors and arrays, and the representation of other values."""
    digest = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy() if value.dtype != torch.bfloat16 else value.detach().float().numpy()
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                take(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                take(item)
        else:
            digest.update(repr(value).encode())

    take(sample)
    return digest.hexdigest()


def _even(total: int, size: int, source: str, field: str) -> list[int]:
    """Return the sizes of shards of equal size, the last one smaller."""
    for name, value in (("num_samples", total), (field, size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise JobError("is not right", source=source, field=name, value=value, allowed="a whole number from 1")
    return [min(size, total - begin) for begin in range(0, total, size)]

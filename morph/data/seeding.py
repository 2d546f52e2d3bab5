"""Seeds the global random generators for each part of the user's code, and restores them afterwards.

Only the training thread should draw from them: if blocks of two threads overlap, their draws mix. Once both have ended,
each generator is nevertheless as before.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_FREE: list[np.random.MT19937] = []
"""Generators to reuse: creating one can take longer than reading a sample."""
_ENTERED: list[list[Any]] = []
"""One list for each block that has not ended: the generators before it (states of torch and Python, numpy's own)."""
_CHANGES = threading.Lock()


def seed_of(*key: object) -> int:
    """Return a 63-bit seed made from the key."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def own_generators(seed: int | None = None) -> Iterator[Callable[[int], None]]:
    """Give the block its own states of torch's, numpy's and Python's generators; yields a function that seeds them.

    numpy's generator is exchanged, not copied, because a copy can take longer than reading a sample; so a normal number
    that it has kept for its next call is drawn anew. Generators of CUDA devices are seeded, but not restored.
    """
    with _CHANGES:
        own = _FREE.pop() if _FREE else np.random.MT19937(0)
        before: list[Any] = [torch.default_generator.get_state(), random.getstate(), mtrand.get_bit_generator()]
        _ENTERED.append(before)
        mtrand.set_bit_generator(own)
    try:
        if seed is not None:
            _seed_all(seed)
        yield _seed_all
    finally:
        with _CHANGES:
            _FREE.append(own)
            place = [entered is before for entered in _ENTERED].index(True)
            del _ENTERED[place]
            if place < len(_ENTERED):  # a later block, of another thread, has not ended: it will restore these
                _ENTERED[place][:] = before
            else:
                torch.default_generator.set_state(before[0])
                random.setstate(before[1])
                mtrand.set_bit_generator(before[2])


@contextmanager
def kept_generators() -> Iterator[None]:
    """As ``own_generators``, but those of CUDA devices in use are restored, too; the block does the seeding."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with own_generators(), torch.random.fork_rng(devices=devices):
        yield


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed: see morph.runtime.step.stage
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch ships no types for it
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)

"""Seeds the global random generators for each part of the user's code, and restores them afterwards.

Only the training thread may enter: the generators belong to the process, and no other thread of Morph draws from them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random import mtrand

_NUMPY = np.random.MT19937(0)
"""A generator to reuse: creating one can take longer than reading a sample."""


def seed_of(*key: object) -> int:
    """Return a 63-bit seed made from the key."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def own_generators() -> Iterator[Callable[[int], None]]:
    """Give the block its own generator states; yields a function that seeds torch, ``numpy.random`` and ``random``.

    numpy's generator is exchanged, not copied, because a copy can take longer than reading a sample; so a normal number
    that it has kept for its next call is drawn anew. Generators of CUDA devices are seeded, but not restored.
    """
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    numpy_generator = mtrand.get_bit_generator()
    mtrand.set_bit_generator(_NUMPY if numpy_generator is not _NUMPY else np.random.MT19937(0))
    try:
        yield _seed_all
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        mtrand.set_bit_generator(numpy_generator)


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed: see morph.runtime.step.stage
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch ships no types for it
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)

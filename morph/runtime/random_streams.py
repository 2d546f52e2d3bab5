"""Randomness that depends only on (job seed, step, micro-batch, section), never on the shape."""

from __future__ import annotations

import hashlib

import torch


def stream_seed(seed: int, step: int, micro_batch: int, section: int) -> int:
    """A 63-bit seed for one section's run on one micro-batch."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}/{section}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_section(seed: int, step: int, micro_batch: int, section: int) -> None:
    """Set torch's generators before a section runs, in the forward pass and in the recompute alike.

    Not by ``torch.manual_seed``: for each kind of device that was never used it keeps the call, with its stack, until
    the device is, which takes longer than many a section's kernels and is never freed where there is no such device.
    """
    found = stream_seed(seed, step, micro_batch, section)
    torch.default_generator.manual_seed(found)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch ships no types for it
        torch.cuda.manual_seed_all(found)

"""Profiles of published models on published hardware: plan for V100s and 10 Gbps links without having either.

``published_profile("gpt2-2.5b")`` builds one from the figures of the papers, each value with its source.
``configs/profiles`` holds the result as files (``python -m benchmarks published.profiles``).
"""

from __future__ import annotations

from benchmarks.published.build import SHIPPED, published_profile
from benchmarks.published.hardware import GPU_MEMORY_BYTES, GPUS_PER_LARGE_VM
from benchmarks.published.shapes import MODELS, Transformer

__all__ = ["GPUS_PER_LARGE_VM", "GPU_MEMORY_BYTES", "MODELS", "SHIPPED", "Transformer", "published_profile"]

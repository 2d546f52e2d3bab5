"""Profiles of published models on published hardware: plan for V100s and 10 Gbps links without having either.

``published_profile("gpt2-2.5b")`` builds one from the figures of the papers, each value with its source.
``configs/profiles`` holds the result as files (``python benchmarks/published_profiles.py``).
"""

from __future__ import annotations

from simulator.published.build import SHIPPED, published_profile
from simulator.published.hardware import GPU_MEMORY_BYTES, GPUS_PER_LARGE_VM
from simulator.published.shapes import MODELS, Transformer

__all__ = ["GPUS_PER_LARGE_VM", "GPU_MEMORY_BYTES", "MODELS", "SHIPPED", "Transformer", "published_profile"]

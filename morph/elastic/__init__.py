"""Data-parallel training loops that Morph does not run, whose workers continue when some of them are lost (Spotnik).

``morph elastic -- python train.py`` starts such a loop; without it, the script trains alone. Loads torch on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from morph.elastic.mini_batches import batches as batches
    from morph.elastic.optimizer import Optimizer as Optimizer

__all__ = ["Optimizer", "batches"]


def __getattr__(name: str) -> Any:
    if name == "Optimizer":
        from morph.elastic.optimizer import Optimizer

        return Optimizer
    if name == "batches":
        from morph.elastic.mini_batches import batches

        return batches
    raise AttributeError(f"module 'morph.elastic' has no attribute {name!r}")

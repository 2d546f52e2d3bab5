"""Training loops that Morph does not run: data-parallel workers that go on when some of them are lost (Spotnik).

Started by ``morph elastic -- python train.py``; without it, a script trains alone. Loads torch when it is first used.
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

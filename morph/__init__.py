"""Morph: train one PyTorch model on whatever spot GPUs are there right now.

``import morph`` loads no torch; ``morph.Job`` is fetched on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from morph.job import Job as Job

__version__ = "0.1.0"
__all__ = ["Job", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Job":
        from morph.job import Job

        return Job
    raise AttributeError(f"module 'morph' has no attribute {name!r}")

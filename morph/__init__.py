"""Morph: train one PyTorch model on whatever spot GPUs are there right now.

``import morph`` loads no torch; ``morph.Job`` and its parts are fetched on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from morph.cutting.sections.cut_point import CutPoint as CutPoint
    from morph.job import Job as Job
    from morph.job import LossScaling as LossScaling

__version__ = "0.1.0"
__all__ = ["CutPoint", "Job", "LossScaling", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("Job", "LossScaling"):
        from morph import job

        return getattr(job, name)
    if name == "CutPoint":
        from morph.cutting.sections.cut_point import CutPoint

        return CutPoint
    if name in ("elastic", "spot"):
        import importlib

        return importlib.import_module(f"morph.{name}")
    raise AttributeError(f"module 'morph' has no attribute {name!r}")

"""Morph: train one PyTorch model on whatever spot GPUs are there right now.

``import morph`` loads no torch; ``morph.Job`` and its parts are fetched on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from morph.cutting.sections.cut_point import CutPoint as CutPoint
    from morph.jobs.job import Best as Best
    from morph.jobs.job import Job as Job
    from morph.jobs.job import LossScaling as LossScaling
    from morph.losses import Loss as Loss
    from morph.losses import PerSample as PerSample
    from morph.losses import Sum as Sum
    from morph.optimizers import Optimizers as Optimizers

__version__ = "0.1.0"
__all__ = ["Best", "CutPoint", "Job", "Loss", "LossScaling", "Optimizers", "PerSample", "Sum", "__version__"]
_LAZY = {
    "Best": "morph.jobs.job",
    "CutPoint": "morph.cutting.sections.cut_point",
    "Job": "morph.jobs.job",
    "Loss": "morph.losses",
    "LossScaling": "morph.jobs.job",
    "Optimizers": "morph.optimizers",
    "PerSample": "morph.losses",
    "Sum": "morph.losses",
    "data": None,
    "elastic": None,
    "hf": None,
    "lightning": None,
    "losses": None,
    "spot": None,
}
"""The module that has what loads torch. None: a module of this package."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'morph' has no attribute {name!r}")
    import importlib

    place = _LAZY[name]
    return importlib.import_module(f"morph.{name}") if place is None else getattr(importlib.import_module(place), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})

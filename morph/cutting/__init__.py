"""Cut the user's model into sections: export it, find cheap and even cut positions, build one module per section.

These are imported on first use, because ``torch.export`` takes a second to load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from morph.cutting.sections.section import BoundaryTensor, CutModel, ParameterUnit, Section

if TYPE_CHECKING:
    from morph.cutting.cuts.cut_model import cut
    from morph.cutting.exporting.export import export_job
    from morph.cutting.exporting.exported_job import ExportedJob

_LATER = {
    "cut": "morph.cutting.cuts.cut_model",
    "export_job": "morph.cutting.exporting.export",
    "ExportedJob": "morph.cutting.exporting.exported_job",
}

__all__ = ["BoundaryTensor", "CutModel", "ExportedJob", "ParameterUnit", "Section", "cut", "export_job"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value

"""Cut the user's model into sections: export it, find cheap and even cut positions, build one module per section."""

from __future__ import annotations

from morph.cutting.cut_model import BoundaryTensor, CutModel, ParameterUnit, Section, cut
from morph.cutting.export import export_job
from morph.cutting.exported import ExportedJob

__all__ = ["BoundaryTensor", "CutModel", "ExportedJob", "ParameterUnit", "Section", "cut", "export_job"]

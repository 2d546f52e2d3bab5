"""Find dependencies between sections in a dry run of one training step (Varuna, section 5.2)."""

from __future__ import annotations

from morph.tracing.check import check_dependencies, micro_batch_size_of, require_no_violation
from morph.tracing.findings import KINDS, DependencyReport, Finding, SourceLocation

__all__ = [
    "KINDS",
    "DependencyReport",
    "Finding",
    "SourceLocation",
    "check_dependencies",
    "micro_batch_size_of",
    "require_no_violation",
]

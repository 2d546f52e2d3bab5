"""Measure a job once, section by section, on a real device; the result is a profile."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibrate.computing.compute import Progress
    from calibrate.writing.measure import calibrate
    from calibrate.writing.node_type import add_node_type, add_zone_links
    from morph.contract.profile import write_profile

_LATER = {
    "Progress": "calibrate.computing.compute",
    "add_node_type": "calibrate.writing.node_type",
    "add_zone_links": "calibrate.writing.node_type",
    "calibrate": "calibrate.writing.measure",
    "write_profile": "morph.contract.profile",
}

__all__ = ["Progress", "add_node_type", "add_zone_links", "calibrate", "write_profile"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value

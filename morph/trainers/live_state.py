"""Refuses, by name and line, reads of what only a host's own loop knows within a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from morph.contract.errors import JobError
from morph.cutting.source.locate import calling_line
from morph.cutting.source.refusal import Untraceable
from morph.trainers.lightning_rules import PACKAGES, SOURCE


class Unknown:
    """Stands for a number that is not known within a step; every use is refused by its name."""

    def __init__(self, name: str, allowed: str) -> None:
        self._name, self._allowed = name, allowed

    def _refuse(self, *_: object) -> Any:
        raise unknown(self._name, self._allowed)

    __getattr__ = __getitem__ = __bool__ = __int__ = __index__ = __float__ = __hash__ = __iter__ = __len__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __str__ = _refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _refuse


def unknown(name: str, allowed: str) -> JobError:
    """Return the error for a read of something that only Lightning's own loop has."""
    return JobError("is not known within a step of Morph", source=users_line(), field=name, allowed=allowed)


def users_line() -> str:
    """Return the line of the user's code that is running."""
    return calling_line(PACKAGES) or SOURCE


def branches(read: Mapping[str, str]) -> Untraceable:
    """Return the error for a branch on values that change from step to step; ``read``: their lines by name."""
    names = ", ".join(f"{name} ({line})" for name, line in read.items())
    return Untraceable(
        f"a branch or a Python number depends on values that change from step to step, such as {names}",
        "operations on tensors, such as torch.as_tensor(self.global_step / 10).clamp(max=1), or torch.where",
    )

"""One decided step of one unit as it travels: gradients and scales, and what is needed to apply them alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from morph.contract.decided import Decided
from morph.runtime.accumulators import Reduced
from morph.runtime.unit_state import UnitState


def copy_of_update(state: UnitState, decided: Decided | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Copy what the unit is about to apply, as facts and CPU tensors by parameter."""
    reduced = state.reduced
    assert reduced is not None, f"unit {state.unit.id} has nothing to apply"
    facts = {
        "version": state.version,
        "exponents": dict(state.exponents),
        "next_exponents": dict(reduced.exponents),
        "non_finite": reduced.non_finite,
        "decided": None if decided is None else decided.model_dump(),
    }
    if decided is not None and decided.skipped:
        return facts, {}  # nothing of them is applied
    return facts, {name: value.detach().to("cpu", copy=True).contiguous() for name, value in reduced.gradients.items()}


def apply_update(state: UnitState, facts: dict[str, Any], gradients: dict[str, Tensor]) -> None:
    """Apply an update: the unit is then, bit for bit, what the sender's is.

    Raises:
        ValueError: it is not the update of the unit's version.
    """
    if facts["version"] != state.version:
        raise ValueError(f"unit {state.unit.id}: version {state.version} cannot take step {facts['version']}")
    reduced = Reduced(
        gradients=gradients, exponents=facts["next_exponents"], overflowed=False, non_finite=facts["non_finite"]
    )
    state.take_over(reduced, facts["exponents"])
    state.apply(None if facts["decided"] is None else Decided.model_validate(facts["decided"]))

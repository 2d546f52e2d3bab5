"""Rebuilding the controller's state from a journal."""

from __future__ import annotations

from manager.controller.config import ControllerConfig
from manager.controller.decide import decide
from manager.controller.events import EVENT
from manager.controller.state import ControllerState, initial_state
from manager.journal.journal import Journal
from morph.contract.errors import RunDirError


def replay(journal: Journal) -> ControllerState:
    """Run ``decide`` again over the events since the last configuration, and return the state.

    Raises:
        RunDirError: the journal holds no configuration.
    """
    state: ControllerState | None = None
    for entry in journal.read():
        if entry.kind == "config":
            state = initial_state(ControllerConfig.model_validate_json(entry.payload_json))
        elif entry.kind == "event":
            if state is None:
                raise RunDirError(f"line {entry.sequence} of the journal is an event before any configuration")
            state = decide(state, EVENT.validate_json(entry.payload_json), entry.time_s).state
    if state is None:
        raise RunDirError("the journal holds no configuration")
    return state

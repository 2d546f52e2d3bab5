"""Rebuilding the controller's state from a journal."""

from __future__ import annotations

from manager.controller.config import ControllerConfig
from manager.controller.decide import decide
from manager.controller.events import EVENT
from manager.controller.state import ControllerState, initial_state
from manager.journal.journal import Journal
from manager.journal.records import DecisionRecord, Entry
from morph.contract.errors import RunDirError


def replay(journal: Journal) -> ControllerState:
    """Run ``decide`` again over the events since the last configuration, and return the state.

    Raises:
        RunDirError: the journal holds no configuration, or what was decided then is not what is decided now: it was
            written by another version of the controller. The run can be resumed from its newest checkpoint.
    """
    state: ControllerState | None = None
    for entry in journal.read():
        if entry.kind == "config":
            state = initial_state(ControllerConfig.model_validate_json(entry.payload_json))
        elif entry.kind == "event":
            if state is None:
                raise RunDirError(f"line {entry.sequence} of the journal is an event before any configuration")
            state = decide(state, EVENT.validate_json(entry.payload_json), entry.time_s).state
        elif entry.kind == "decision" and state is not None:
            _check_same(state, entry)
    if state is None:
        raise RunDirError("the journal holds no configuration")
    return state


def _check_same(state: ControllerState, entry: Entry) -> None:
    record = DecisionRecord.model_validate_json(entry.payload_json)
    then, now = (record.phase, record.generation, record.version), (state.phase, state.generation, state.version)
    if then != now:
        raise RunDirError(
            f"line {entry.sequence} of the journal was decided by another version of the controller: {then[0]}, "
            f"generation {then[1]}, version {then[2]}, where this one is at {now[0]}, {now[1]}, {now[2]}; "
            "resume from the newest checkpoint instead"
        )

"""Rebuilds the controller's state from a journal."""

from __future__ import annotations

import json

from pydantic import ValidationError

from manager.controller.decide import decide
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import EVENT
from manager.controller.state.state import ControllerState, initial_state
from manager.journal.journal import Journal
from manager.journal.records import TRACE_PLAYED, VM_UP, DecisionRecord, Entry, Fact, TraceMoment
from morph.contract.errors import RunDirError


def replay(journal: Journal) -> ControllerState:
    """Run ``decide`` again over the events since the last snapshot or configuration, and return the state.

    RunDirError: the journal has no configuration, or its decisions differ from those made now, because another version
    of the controller wrote them. The run can be resumed from its newest checkpoint.
    """
    state, after = _snapshot(journal)
    for entry in journal.each(after, strict=True):
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


def trace_moment(journal: Journal) -> TraceMoment:
    """Return the position in the last session's trace when its manager wrote its last line."""
    noted_s, moment = 0.0, TraceMoment()
    for time_s, fact in _facts(journal):
        if fact.name == TRACE_PLAYED:
            noted_s, moment = time_s, TraceMoment.model_validate_json(fact.detail)
    last = journal.last_moment()
    if not moment.runs or last is None:
        return moment
    return moment.model_copy(update={"clock_s": moment.clock_s + max(0.0, last[1] - noted_s)})


def nodes_up(journal: Journal) -> frozenset[str]:
    """Return the VMs that came up in the last session, including those that are gone again."""
    return frozenset(fact.worker for _, fact in _facts(journal) if fact.name == VM_UP and fact.worker is not None)


def _facts(journal: Journal) -> list[tuple[float, Fact]]:
    config = journal.last_config()
    entries = journal.facts(config.sequence) if config else ()
    return [(entry.time_s, Fact.model_validate_json(entry.payload_json)) for entry in entries]


def _snapshot(journal: Journal) -> tuple[ControllerState | None, int]:
    """Return the state with which to begin, and the line after which it was saved."""
    config, snapshot = journal.last_config(), journal.snapshot()
    if config is None:
        return None, 0
    if snapshot is None or snapshot[0] < config.sequence:
        return None, config.sequence - 1
    sequence, state_json = snapshot
    state = json.loads(state_json) | {"config": json.loads(config.payload_json)}
    try:
        restored = ControllerState.model_validate_json(json.dumps(state))
        measured = restored.measured
        corrected = restored.config.corrected(measured.planned_with, measured.types_planned_with)
        return restored.model_copy(update={"config": corrected}), sequence
    except ValidationError as error:
        raise RunDirError(
            f"the journal's snapshot after line {sequence} was written by another version of the controller; "
            "resume from the newest checkpoint instead"
        ) from error


def _check_same(state: ControllerState, entry: Entry) -> None:
    record = DecisionRecord.model_validate_json(entry.payload_json)
    then, now = (record.phase, record.generation, record.version), (state.phase, state.generation, state.version)
    if then != now:
        raise RunDirError(
            f"line {entry.sequence} of the journal was decided by another version of the controller: {then[0]}, "
            f"generation {then[1]}, version {then[2]}, where this one is at {now[0]}, {now[1]}, {now[2]}; "
            "resume from the newest checkpoint instead"
        )

"""Why the controller decided what it decided."""

from __future__ import annotations

from enum import StrEnum

from morph.contract.base import Value


class ReasonCode(StrEnum):
    """One code per kind of decision; when one decision does several things, the code is the last one's."""

    NODE_REGISTERED = "node_registered"
    WORKER_READY = "worker_ready"
    NODES_REQUESTED = "nodes_requested"
    NODES_GRANTED = "nodes_granted"
    REQUEST_REFUSED = "request_refused"
    NODE_ABSENT = "node_absent"
    NOTICE_KEPT = "notice_kept"
    NOTICE_TAKEN = "notice_taken"
    NOTICE_ACKNOWLEDGED = "notice_acknowledged"
    NODE_SPARED = "node_spared"
    START_WAIT = "start_wait"
    FORMED = "formed"
    SET_BACK = "set_back"
    TOO_FEW_WORKERS = "too_few_workers"
    HOLDING = "holding"
    RESTING = "resting"
    TIMES_NOTED = "times_noted"
    WORKER_SLOW = "worker_slow"
    WORKER_WELL = "worker_well"
    WORKER_PROBED = "worker_probed"
    MANAGER_RESUMED = "manager_resumed"
    AHEAD_NOTED = "ahead_noted"
    AHEAD_DROPPED = "ahead_dropped"
    AWAITING_ANSWERS = "awaiting_answers"
    STEP_STARTED = "step_started"
    STEP_DECIDED = "step_decided"
    OVERFLOW_RETRY = "overflow_retry"
    ABORTING = "aborting"
    OUTAGE_OVER = "outage_over"
    WORKER_REMOVED = "worker_removed"
    COMMIT_STARTED = "commit_started"
    COMMIT_WAIT = "commit_wait"
    UNITS_NOTED = "units_noted"
    CHECKPOINT_SEALED = "checkpoint_sealed"
    CHECKPOINT_COMPLETE = "checkpoint_complete"
    CHECKPOINT_ABANDONED = "checkpoint_abandoned"
    STOP_NOTED = "stop_noted"
    NOTHING_DUE = "nothing_due"
    IGNORED = "ignored"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class Reason(Value):
    """A code for programs and a sentence for people."""

    code: ReasonCode
    sentence: str

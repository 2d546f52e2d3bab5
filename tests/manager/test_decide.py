"""Every event in every phase."""

from __future__ import annotations

import itertools

import pytest
from controller_script import Script, script_in
from simulated_job import MANIFEST

from manager.controller.decide import TRANSITIONS, ImpossibleEvent, decide
from manager.controller.state.events import (
    EVENT_TYPES,
    MANIFEST_WRITER,
    CheckpointFailed,
    CheckpointFound,
    CheckpointNotFound,
    ComputeTimesSeen,
    Event,
    ManagerResumed,
    ManifestWritten,
    NobodyHeard,
    NodeAppeared,
    NodesGranted,
    NoticeGiven,
    NoticeWithdrawn,
    PreCopyReported,
    RequestRefused,
    StopRequested,
    Tick,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
    WorkerProbed,
    WorkerTimes,
)
from manager.controller.state.state import Phase
from manager.controller.state.validate import validate
from morph.contract.messages import (
    Aborted,
    Committed,
    Failed,
    PreCopyReport,
    Reshaped,
    UnitWritten,
    WorkerReady,
)

GRID = list(itertools.product(Phase, EVENT_TYPES))
OF_CHECKPOINTS = (UnitsWritten, CheckpointFailed, ManifestWritten, CheckpointFound, CheckpointNotFound)
IMPOSSIBLE = {(Phase.STARTING, event_type) for event_type in OF_CHECKPOINTS}


def events_of(event_type: type[Event], script: Script) -> list[Event]:
    """Return events of one type: fitting ones, late ones, and such of strangers."""
    state = script.state
    everybody = [*state.workers, "stranger"]
    if event_type is NodeAppeared:
        return [NodeAppeared(node=worker) for worker in ("n1", "n9")]
    if event_type is WorkerAnswered:
        answers = [
            lambda worker, old: WorkerReady(worker=worker, pid=1, setup_s=0),
            lambda worker, old: Reshaped(
                worker=worker, generation=state.generation - old, groups_s=0, state_s=0, received_bytes=0
            ),
            lambda worker, old: script.prepared_answer(worker).model_copy(
                update={"generation": state.generation - old}
            ),
            lambda worker, old: Committed(worker=worker, generation=state.generation - old, version=state.version),
            lambda worker, old: Aborted(worker=worker, generation=state.generation - old, peer_lost=True),
            lambda worker, old: Failed(worker=worker, generation=state.generation - old, error="broken"),
            lambda worker, old: Failed(
                worker=worker, generation=state.generation - old, error="damaged", cause="checkpoint"
            ),
        ]
        made = itertools.product(everybody, (0, 1), answers)
        return [WorkerAnswered(worker=worker, answer=make(worker, old)) for worker, old, make in made]
    if event_type is WorkerLost:
        return [WorkerLost(worker=worker, cause="killed") for worker in everybody]
    if event_type is UnitsWritten:
        entry = UnitWritten(worker="n1", version=state.version, unit="s0", file="s0", size_bytes=1, sha256="0" * 64)
        return [UnitsWritten(worker="n1", written=(entry,))]
    if event_type is CheckpointFailed:
        return [CheckpointFailed(worker=worker, error="disk full") for worker in (*everybody, MANIFEST_WRITER)]
    if event_type is ManifestWritten:
        return [ManifestWritten(version=version) for version in (state.version, 99)]
    if event_type is CheckpointFound:
        return [CheckpointFound(manifest=MANIFEST.model_copy(update={"version": version})) for version in (1, 99)]
    if event_type is CheckpointNotFound:
        return [CheckpointNotFound(error="silent", damaged=damaged) for damaged in (False, True)]
    if event_type is PreCopyReported:
        reports = [PreCopyReport(number=1, following=("s0",)), PreCopyReport(number=99, error="broken")]
        return [PreCopyReported(worker=worker, report=report) for worker in everybody for report in reports]
    if event_type is NodesGranted:
        return [NodesGranted(request=request, nodes=("n8",)) for request in ("job-1", "job-9")]
    if event_type is RequestRefused:
        return [RequestRefused(request=request, cause="quota") for request in ("job-1", "job-9")]
    if event_type is NoticeGiven:
        return [NoticeGiven(worker=worker, lead_s=5.0, notice="first") for worker in everybody]
    if event_type is NoticeWithdrawn:
        return [NoticeWithdrawn(worker=worker) for worker in everybody]
    if event_type is WorkerProbed:
        return [WorkerProbed(worker=worker, probe=1, slowdown=slowdown) for worker in everybody for slowdown in (1, 2)]
    if event_type is ManagerResumed:
        return [ManagerResumed(living=living) for living in ((), tuple(state.workers), ("stranger", "n1"))]
    if event_type is ComputeTimesSeen:
        generations = (state.generation, state.generation - 1)
        return [
            ComputeTimesSeen(
                times=tuple(WorkerTimes(worker=name, generation=old, compute_s=(1.0,) * 9) for name in everybody)
            )
            for old in generations
        ]
    if event_type is NobodyHeard:
        return [NobodyHeard(lasted_s=lasted_s) for lasted_s in (0.0, 40.0)]
    if event_type is StopRequested:
        return [StopRequested(reason="asked to")]
    assert event_type is Tick, f"the grid knows no {event_type}"
    return [Tick()]


@pytest.mark.parametrize(("phase", "event_type"), [pair for pair in GRID if pair not in IMPOSSIBLE])
def test_every_event_in_every_phase_keeps_the_state_valid(phase: Phase, event_type: type[Event]) -> None:
    script = script_in(phase)
    for event, later_s in itertools.product(events_of(event_type, script), (0.1, 1000.0)):
        before = script.state.model_dump_json()
        decision = decide(script.state, event, script.now_s + later_s)
        validate(decision.state)
        assert decision.reason.sentence
        assert script.state.model_dump_json() == before, "the state given was changed"
        assert decision == decide(script.state, event, script.now_s + later_s)
        assert decision.wake_at_s is None or decision.state.phase is not Phase.ENDED


@pytest.mark.parametrize(("phase", "event_type"), sorted(IMPOSSIBLE, key=str))
def test_an_impossible_event_is_an_error_with_job_phase_event_and_history(
    phase: Phase, event_type: type[Event]
) -> None:
    script = script_in(phase)
    event = events_of(event_type, script)[0]
    with pytest.raises(ImpossibleEvent, match=rf"job job: {event.kind} cannot happen in phase starting") as caught:
        script.tell(event)
    assert "node_appeared n1 in starting: node_registered" in str(caught.value)
    assert event.model_dump_json() in str(caught.value)


def test_the_table_covers_the_grid_but_for_the_impossible_pairs() -> None:
    assert set(GRID) - set(TRANSITIONS) == IMPOSSIBLE


def test_ended_runs_take_any_event_without_an_action() -> None:
    script = script_in(Phase.ENDED)
    for event_type in EVENT_TYPES:
        for event in events_of(event_type, script):
            again = (script.state.finish,) if event_type is ManagerResumed else ()
            assert script.tell(event) == again
            assert script.state.phase is Phase.ENDED


def test_an_answer_of_every_kind_is_refused_from_a_stranger() -> None:
    script = script_in(Phase.TRAINING)
    for event in events_of(WorkerAnswered, script):
        if isinstance(event, WorkerAnswered) and event.worker == "stranger":
            assert script.tell(event) == ()
            assert script.code == "ignored"

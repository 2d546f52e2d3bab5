"""The journal keeps complete lines, and gives the state back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic_core import PydanticSerializationError
from simulated_cluster import Faults, JournalledCluster
from simulated_job import make_config
from simulated_workers import TIMES

from manager.controller.decide import decide
from manager.controller.state.actions import SendReshape
from manager.controller.state.events import EVENT, NodeAppeared, WorkerAnswered
from manager.controller.state.state import ControllerState, Phase, initial_state
from manager.journal import journal as journal_module
from manager.journal.journal import Journal
from manager.journal.records import TRACE_PLAYED, VM_UP, DecisionRecord, Fact, TraceMoment
from manager.journal.replay import nodes_up, replay, trace_moment
from manager.run_dir import JOURNAL
from morph.contract.errors import RunDirError
from morph.contract.messages import MicroBatchLoss, Prepared

FAULTS = Faults(
    deaths_in=((Phase.TRAINING, 2, 2), (Phase.RESHAPING, 2, 1)),
    joins_after_s=(6.0, 7.0),
    doubled=0.2,
    write_failure=0.1,
)


@pytest.mark.parametrize("seed", range(5))
def test_replaying_the_journal_gives_the_live_state(seed: int, tmp_path: Path) -> None:
    cluster = JournalledCluster(seed, tmp_path, FAULTS)
    cluster.run(5)
    with cluster.journal:
        assert replay(cluster.journal) == cluster.state


def test_replaying_half_a_journal_gives_the_state_of_that_moment(tmp_path: Path) -> None:
    cluster = JournalledCluster(1, tmp_path, FAULTS)
    cluster.run(5)
    half = len(cluster.history) // 2
    with cluster.journal, Journal.open(tmp_path / "half.sqlite") as journal:
        for entry in cluster.journal.read():
            if sum(line.kind == "decision" for line in journal.read()) < half:
                journal.append(entry.time_s, entry.kind, entry.payload_json)
        assert replay(journal) == cluster.history[half - 1][2].state


def test_a_long_journal_is_replayed_from_its_last_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 20)
    cluster = JournalledCluster(2, tmp_path, FAULTS)
    cluster.run(5)
    with cluster.journal as journal:
        snapshot = journal.snapshot()
        left = [entry for entry in journal.read(snapshot[0]) if entry.kind == "decision"]
        assert len(left) < 20 < len(cluster.history)
        assert replay(journal) == cluster.state
        journal._connection.execute('UPDATE snapshots SET digest = NULL, state_json = \'{"phase": "dreaming"}\'')
        with pytest.raises(RunDirError, match=r"snapshot after line .* another version"):
            replay(journal)


def test_a_snapshot_of_an_earlier_session_is_not_used(tmp_path: Path) -> None:
    cluster = JournalledCluster(2, tmp_path, Faults())
    cluster.run(3)
    with cluster.journal as journal:
        assert journal.snapshot() is not None
        journal.append_config(9.0, make_config(num_steps=9))
        assert replay(journal) == initial_state(make_config(num_steps=9))


def test_the_journal_says_where_the_trace_stood_and_which_vms_came_up(tmp_path: Path) -> None:
    def note(time_s: float, clock_s: float, *, runs: bool) -> None:
        moment = TraceMoment(num_played=3, clock_s=clock_s, runs=runs)
        journal.append_fact(time_s, Fact(name=TRACE_PLAYED, detail=moment.model_dump_json()))

    with Journal.open(tmp_path / JOURNAL) as journal:
        assert trace_moment(journal) == TraceMoment()
        journal.append_config(0.0, make_config())
        journal.append_fact(1.0, Fact(name=VM_UP, worker="old"))
        journal.append_config(10.0, make_config())
        assert trace_moment(journal) == TraceMoment()
        note(20.0, 5.0, runs=False)
        journal.append_fact(30.0, Fact(name=VM_UP, worker="n1"))
        assert trace_moment(journal) == TraceMoment(num_played=3, clock_s=5.0)
        note(31.0, 5.0, runs=True)
        journal.append_fact(33.5, Fact(name=VM_UP, worker="n2"))
        assert trace_moment(journal) == TraceMoment(num_played=3, clock_s=7.5, runs=True)
        assert nodes_up(journal) == {"n1", "n2"}


def test_a_resumed_run_is_replayed_from_its_own_configuration(tmp_path: Path) -> None:
    with Journal.open(tmp_path / JOURNAL) as journal:
        for num_steps in (5, 9):
            config = make_config(num_steps=num_steps)
            journal.append_config(0.0, config)
            event = NodeAppeared(node=f"n{num_steps}")
            journal.append_decision(1.0, event, decide(initial_state(config), event, 1.0))
        state = replay(journal)
    assert state.config.num_steps == 9
    assert set(state.workers) == {"n9"}


def test_a_journal_of_another_controller_is_refused_where_it_differs(tmp_path: Path) -> None:
    config = make_config()
    event = NodeAppeared(node="n1")
    decision = decide(initial_state(config), event, 1.0)
    other = decision.model_copy(update={"state": decision.state.model_copy(update={"generation": 3})})
    with Journal.open(tmp_path / JOURNAL) as journal:
        journal.append_config(0.0, config)
        journal.append_decision(1.0, event, other)
        journal._connection.execute("DELETE FROM snapshots")
        with pytest.raises(RunDirError, match="line 3 of the journal was decided by another version"):
            replay(journal)


def test_a_journal_of_before_nodes_had_facts_is_replayed(tmp_path: Path) -> None:
    cluster = JournalledCluster(2, tmp_path, FAULTS, target_nodes=5)
    cluster.run(3)
    with cluster.journal as journal:
        for table, column in (("entries", "payload_json"), ("snapshots", "state_json")):
            empty = '"facts":{}', '"facts":null', '"facts":{"provider":"","size":"","region":"","zone":""}'
            for known in (f",{text}" for text in empty):
                journal._connection.execute(
                    f"UPDATE {table} SET digest = NULL, {column} = replace({column}, ?, '')", (known,)
                )
            kept = journal._connection.execute(f"SELECT count(*) FROM {table} WHERE {column} LIKE '%facts%'")
            assert kept.fetchone() == (0,)
        assert replay(journal) == cluster.state


def test_lines_come_back_in_order_and_outlive_the_process_that_wrote_them(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / JOURNAL)
    journal.append(1.0, "fact", '{"name": "first"}')
    journal.append_fact(0.5, Fact(name="second", worker="n1", detail="why"))
    with Journal.open(tmp_path / JOURNAL, read_only=True) as reader:
        lines = reader.read()
    journal.close()
    assert [(line.sequence, line.time_s, line.kind) for line in lines] == [(1, 1.0, "fact"), (2, 0.5, "fact")]
    assert Fact.model_validate_json(lines[1].payload_json).detail == "why"


def test_an_event_and_its_decision_are_written_both_or_neither(tmp_path: Path) -> None:
    config = make_config()
    event = NodeAppeared(node="n1")
    decision = decide(initial_state(config), event, 1.0)
    with Journal.open(tmp_path / JOURNAL) as journal:
        with pytest.raises(RunDirError, match="cannot be written"):
            journal._write([(1.0, "event", "{}"), (1.0, "nonsense", "{}")])  # type: ignore[list-item]
        assert journal.read() == ()
        journal.append_decision(1.0, event, decision)
        assert [line.kind for line in journal.read()] == ["event", "decision"]


def test_an_interrupt_while_a_decision_is_written_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pydantic takes the interrupt for an error of the value that it serialises."""
    event = NodeAppeared(node="n1")
    decision = decide(initial_state(make_config()), event, 1.0)

    def interrupted(*_: object) -> str:
        raise PydanticSerializationError("Error serializing to JSON: KeyboardInterrupt: ")

    monkeypatch.setattr(DecisionRecord, "model_dump_json", interrupted)
    with Journal.open(tmp_path / JOURNAL) as journal, pytest.raises(KeyboardInterrupt):
        journal.append_decision(1.0, event, decision)


def test_a_reshape_order_is_kept_once_for_all_its_receivers(tmp_path: Path) -> None:
    cluster = JournalledCluster(0, tmp_path, Faults())
    cluster.run(4)
    cluster.journal.close()
    decision = next(made for _, _, made in cluster.history if any(isinstance(act, SendReshape) for act in made.actions))
    record = DecisionRecord.of(decision)
    assert set(record.reshape_receivers) == {slot.worker for slot in record.reshape.slots}
    assert DecisionRecord.model_validate_json(record.model_dump_json()) == record


def test_events_decisions_and_states_survive_json(tmp_path: Path) -> None:
    cluster = JournalledCluster(3, tmp_path, FAULTS)
    cluster.run(5)
    cluster.journal.close()
    for _, event, decision in cluster.history[::7]:
        assert EVENT.validate_json(event.model_dump_json()) == event
        assert ControllerState.model_validate_json(decision.state.model_dump_json()) == decision.state


def test_a_loss_that_is_nan_is_read_back() -> None:
    losses = tuple(MicroBatchLoss(micro_batch=i, loss=loss) for i, loss in enumerate((math.nan, -math.inf)))
    answer = Prepared(worker="a", generation=1, step=0, losses=losses, times=TIMES)
    read = EVENT.validate_json(WorkerAnswered(worker="a", answer=answer).model_dump_json())
    assert isinstance(read, WorkerAnswered)
    assert isinstance(read.answer, Prepared)
    assert [str(loss.loss) for loss in read.answer.losses] == ["nan", "-inf"]


def test_files_that_are_not_journals_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"missing\.sqlite: holds no journal"):
        Journal.open(tmp_path / "missing.sqlite", read_only=True)
    other = tmp_path / "other.sqlite"
    other.write_text("this is a text of some length, and surely not a database")
    with pytest.raises(RunDirError, match=r"other\.sqlite: is not a journal"):
        Journal.open(other)
    with pytest.raises(RunDirError, match="cannot be opened"):
        Journal.open(tmp_path / "nowhere" / "journal.sqlite")


def test_a_journal_without_a_configuration_cannot_be_replayed(tmp_path: Path) -> None:
    with Journal.open(tmp_path / JOURNAL) as journal:
        with pytest.raises(RunDirError, match="no configuration"):
            replay(journal)
        journal.append(0.0, "event", NodeAppeared(node="n1").model_dump_json())
        with pytest.raises(RunDirError, match="before any configuration"):
            replay(journal)

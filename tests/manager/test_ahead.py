"""Pre-copies for planned changes: when they pay, and how they end."""

from __future__ import annotations

from typing import Any

import pytest
from controller_script import Script, receivers
from simulated_job import make_config

from manager.controller.state.actions import Action, SendPreCopy, SendReshape, SendStep
from manager.controller.state.events import (
    ManagerResumed,
    NoticeGiven,
    PreCopyReported,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.state import Phase
from morph.contract.messages import PreCopyReport, Reshaped
from morph.contract.rules import PreCopyRules

SLOW = {"bytes_per_s": 20.0}


def script_with(num_workers: int = 3, **rules: Any) -> Script:
    """Return the script of a job that trains on this many workers and pre-copies units."""
    config = make_config()
    changed = config.policy.rules.model_copy(update={"ahead": PreCopyRules.model_validate({"when": "always", **rules})})
    policy = config.policy.model_copy(update={"rules": changed})
    script = Script(policy=policy, expected_nodes=num_workers, num_steps=40)
    script.ready(*(f"n{index + 1}" for index in range(num_workers)))
    script.reshaped()
    assert script.state.phase is Phase.TRAINING
    return script


def joining(**rules: Any) -> tuple[Script, tuple[Action, ...]]:
    """Return a script in which three workers train, a fourth is ready, and the next boundary comes."""
    script = script_with(3, **rules)
    script.ready("n4")
    return script, script.prepared()


def until_ahead(script: Script) -> tuple[Action, ...]:
    """Do steps until units are pre-copied, or the shape no longer trains."""
    for _ in range(200):
        actions = script.prepared()
        if script.state.pre_copy is not None or script.state.phase is not Phase.TRAINING:
            return actions
    raise AssertionError("nothing is pre-copied")


def report(script: Script, worker: str, *, share: float = 1.0, error: str | None = None) -> tuple[Action, ...]:
    """Report that some units of a receiver have arrived, in the order of the moves."""
    units = [move.unit for move in script.state.pre_copy.moves if move.receiver == worker]
    told = PreCopyReport(
        number=script.state.pre_copy.number, following=tuple(units[: round(share * len(units))]), error=error
    )
    return script.tell(PreCopyReported(worker=worker, report=told))


def all_receivers(script: Script) -> list[str]:
    return list(dict.fromkeys(move.receiver for move in script.state.pre_copy.moves))


def reshape_in(actions: tuple[Action, ...]) -> Any:
    return next((action.order for action in actions if isinstance(action, SendReshape)), None)


def kinds_of(order: Any, worker: str) -> set[str]:
    return {source.kind for source in order.sources if source.worker == worker}


def test_a_newcomers_units_are_sent_ahead_while_the_next_step_runs() -> None:
    script, actions = joining()
    assert receivers(actions, SendReshape) == []
    assert receivers(actions, SendStep) == ["n1", "n2", "n3"]
    orders = {action.worker: action.order for action in actions if isinstance(action, SendPreCopy)}
    assert "n4" in orders
    for worker, order in orders.items():
        assert order.moves
        assert all(worker in (move.sender, move.receiver) for move in order.moves)
    pre_copy = script.state.pre_copy
    for move in pre_copy.moves:
        assert move.unit in script.state.workers[move.sender].holds
        assert move.unit not in script.state.workers[move.receiver].holds
    assert "units are pre-copied to" in script.sentence


def test_the_change_is_formed_at_the_boundary_after_everything_has_arrived() -> None:
    script, _ = joining()
    number = script.state.pre_copy.number  # type: ignore[union-attr]
    first, *others = all_receivers(script)
    for worker in others:
        report(script, worker)
    report(script, first, share=0.5)
    assert reshape_in(script.prepared()) is None
    report(script, first)
    order = reshape_in(script.prepared())
    assert order.ahead == number
    assert order.version == script.state.version == 3
    assert {source.kind for source in order.sources} == {"keep", "ahead"}
    assert script.state.pre_copy is None


def test_units_that_have_not_arrived_in_time_are_sent_in_the_change() -> None:
    script, _ = joining(patience_s=0.5)
    first, *others = all_receivers(script)
    report(script, first)
    script.now_s += 0.6
    order = reshape_in(script.prepared())
    assert kinds_of(order, first) <= {"keep", "ahead"}
    assert "ahead" in kinds_of(order, first)
    for worker in others:
        assert "ahead" not in kinds_of(order, worker)


def test_a_newcomer_that_dies_meanwhile_does_not_disturb_the_step() -> None:
    script, _ = joining()
    parties = set(script.state.pre_copy.parties)  # type: ignore[union-attr]
    actions = script.tell(WorkerLost(worker="n4", cause="killed"))
    assert script.state.phase is Phase.TRAINING
    assert script.state.pre_copy is None
    assert set(receivers(actions, SendPreCopy)) == parties - {"n4"}
    assert all(action.order.moves == () for action in actions if isinstance(action, SendPreCopy))
    assert receivers(script.prepared(), SendStep) == ["n1", "n2", "n3"]


def test_a_noticed_member_drains_ahead_if_time_allows() -> None:
    script = script_with(4, **SLOW)
    script.tell(NoticeGiven(worker="n4", lead_s=20.0))
    assert reshape_in(until_ahead(script)) is None
    assert "n4" not in {slot.worker for slot in script.state.pre_copy.slots}
    hurried = script_with(4, **SLOW)
    hurried.tell(NoticeGiven(worker="n4", lead_s=2.0))
    assert reshape_in(hurried.prepared()) is not None


def test_a_postponed_drain_happens_before_its_time_is_over() -> None:
    script = script_with(4, **SLOW)
    noticed_s = script.now_s
    script.tell(NoticeGiven(worker="n4", lead_s=40.0))
    for _ in range(200):
        if reshape_in(script.prepared()) is not None:
            break
        script.now_s += 1.0
    assert script.state.phase is Phase.RESHAPING
    assert script.now_s < noticed_s + 40.0 - 1.0


@pytest.mark.parametrize(
    "rules",
    [
        {"when": "never"},
        {"when": "if_worth"},  # a small state that takes no time to send
        {"when": "if_worth", "min_saved_s": 0.0, "bytes_per_s": 200.0},  # the gain is worth more than the pause
        {"when": "if_worth", "min_saved_s": 0.0, "bytes_per_s": 1.0},  # the gradients alone take longer than a step
    ],
)
def test_a_change_is_not_put_off_where_that_is_not_worth_it(rules: dict[str, Any]) -> None:
    script, actions = joining(**rules)
    assert reshape_in(actions) is not None
    assert script.state.pre_copy is None


def test_any_shorter_pause_justifies_postponing_a_drain() -> None:
    script = script_with(4, when="if_worth", min_saved_s=0.1, **SLOW)
    script.tell(NoticeGiven(worker="n4", lead_s=20.0))
    assert reshape_in(until_ahead(script)) is None
    assert script.state.pre_copy is not None


def test_transfer_speed_is_measured_where_all_state_came_from_peers() -> None:
    script = script_with(3, when="never")
    script.ready("n4")
    order = reshape_in(script.prepared())
    sizes = script.state.config.unit_bytes
    for worker in script.busy:
        num_bytes = sum(sizes[entry.unit] for entry in order.sources if entry.worker == worker and entry.kind == "peer")
        answer = Reshaped(
            worker=worker, generation=order.generation, groups_s=0, state_s=num_bytes / 50.0, received_bytes=0
        )
        script.tell(WorkerAnswered(worker=worker, answer=answer))
    assert script.state.measured.state_bytes_per_s == pytest.approx(50.0)


def test_a_new_manager_drops_what_its_predecessor_had_sent_ahead() -> None:
    script, _ = joining()
    actions = script.tell(ManagerResumed(living=tuple(script.state.workers)))
    assert script.state.pre_copy is None
    assert "n4" in receivers(actions, SendPreCopy)
    script.prepared()
    assert script.state.pre_copy is not None  # and sends them anew

"""What a draft keeps for the length of a decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from controller_script import Script
from random_history import play_all
from simulated_job import PLANS

from manager.controller.shape import choosing
from manager.controller.state.draft import Draft
from manager.controller.state.state import Phase
from tests.grids import IS_LONG


def test_the_best_shape_is_chosen_once_when_a_planned_change_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(plans={2: PLANS[2], 3: PLANS[3]}, expected_nodes=2)
    script.ready("n1", "n2")
    script.reshaped()
    script.ready("n3")
    script.prepared("n1")
    chosen: list[Phase] = []
    steady = choosing._steady
    monkeypatch.setattr(choosing, "_steady", lambda state, now_s: chosen.append(state.phase) or steady(state, now_s))
    script.prepared("n2")
    assert script.state.generation == 2
    assert chosen == [Phase.TRAINING]


@pytest.mark.slow
def test_what_was_chosen_is_what_would_be_chosen_now_in_every_history(monkeypatch: pytest.MonkeyPatch) -> None:
    once, num_kept = Draft.once, 0

    def checked(draft: Draft, question: Callable[..., Any], *depends_on: object) -> Any:
        nonlocal num_kept
        num_kept += question in draft._known
        kept = once(draft, question, *depends_on)
        assert kept == question(draft.state, draft.now_s)
        return kept

    monkeypatch.setattr(Draft, "once", checked)
    play_all(range(100 if IS_LONG else 40))
    assert num_kept > 100


def test_a_question_is_asked_again_once_what_it_depends_on_was_replaced() -> None:
    draft, asked = Draft(Script().state, 0.0), []

    def num_workers(state: Any, now_s: float) -> int:
        asked.append(now_s)
        return len(state.workers)

    for _ in range(3):
        assert draft.once(num_workers, draft.state.workers) == 0
    draft.change(workers={"n1": None})
    assert draft.once(num_workers, draft.state.workers) == 1
    assert len(asked) == 2

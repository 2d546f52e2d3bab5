"""Every training feature: the final state is the same bytes in every shape and after losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.shapes_crew import ShapesCrew, Trained

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

NUM_STEPS = 6
HISTORIES = {
    "2x2": ((("2x2", NUM_STEPS),), False),
    "4x1": ((("4x1", NUM_STEPS),), False),
    "1x3, then losses": ((("1x3", 2), ("2x1", 4), ("1x1", NUM_STEPS)), True),
}
JOBS = ("clipped", "scheduled", "bf16", "fp16", "scaled", "measured")


@pytest.fixture(scope="module", params=JOBS)
def reference(request: pytest.FixtureRequest, crew: ShapesCrew, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One worker, undisturbed."""
    directory = tmp_path_factory.mktemp(request.param)
    return crew.train(request.param, [("1x1", NUM_STEPS)], directory)


@pytest.mark.parametrize("history", HISTORIES)
def test_a_feature_gives_the_same_bytes_in_every_shape_and_after_losses(
    history: str, reference: Trained, crew: ShapesCrew, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    spans, lose = HISTORIES[history]
    job = request.node.callspec.params["reference"]
    trained = crew.train(job, spans, tmp_path, lose=lose)
    assert trained.digests == reference.digests
    assert trained.decided == reference.decided
    assert trained.scales == reference.scales
    assert trained.losses == reference.losses


def test_the_step_that_breaks_in_one_stage_is_skipped_everywhere(crew: ShapesCrew, tmp_path: Path) -> None:
    whole = crew.train("scaled", [("1x1", 10)], tmp_path / "one")
    split = crew.train("scaled", [("4x1", 10)], tmp_path / "four")
    skipped = [decided.version for decided in whole.decided if decided.skipped]
    breaks = [any(answer.non_finite for answer in answers) for answers in split.answers]
    told = [[answer.non_finite for answer in answers] for answers in split.answers]
    assert 2 <= len(skipped) <= 4
    assert any(some and not all(some) for some in told), "no step broke in some stages alone"
    assert sum(breaks) == len(skipped)
    assert whole.decided == split.decided
    assert whole.digests == split.digests
    scheduler = dict(whole.numbers("s1")["scheduler"]["items"])
    assert scheduler["last_epoch"] == 10 - len(skipped)


def test_floating_point_sums_skip_the_same_steps(crew: ShapesCrew, tmp_path: Path) -> None:
    whole = crew.train("scaled_fast", [("1x1", 6)], tmp_path / "one")
    split = crew.train("scaled_fast", [("2x2", 6)], tmp_path / "four")
    assert [d.skipped for d in whole.decided] == [d.skipped for d in split.decided]
    assert any(d.skipped for d in whole.decided)

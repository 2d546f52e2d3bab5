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
JOBS = ("clipped", "scheduled")


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

"""Every training feature: the final state has the same bytes in every shape and after losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from morph.runtime.state.model_state import export_state
from tests.grids import cells
from tests.training.shapes import ShapesCrew, Trained
from tests.training.training_jobs import Net, Points, evaluated, loss_with_metrics, masters, narrow_net

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NUM_STEPS = 6
HISTORIES = {
    "2x2": ((("2x2", NUM_STEPS),), False),
    "4x1": ((("4x1", NUM_STEPS),), False),
    "1x3, then losses": ((("1x3", 2), ("2x1", 4), ("1x1", NUM_STEPS)), True),
    "3x1+1x1": ((("3x1+1x1", NUM_STEPS),), False),
    "unequal pipelines, then losses": ((("1x1+2x1", 2), ("2x1", 4), ("1x1", NUM_STEPS)), True),
}
JOBS = (
    *("clipped", "scheduled", "bf16", "fp16", "scaled", "evaluated", "evaluated_in_part"),
    *("normed", "normed_fp16", "averaged", "narrow", "masters"),
    *("complex_numbers", "choosing", "choosing_adam", "thawed", "annealed"),
)


LOSSES = "1x3, then losses"
CASES = [*((job, LOSSES) for job in JOBS), *cells(JOBS, [name for name in HISTORIES if name != LOSSES])]
"""Each feature after losses, and in shapes of four workers."""


@pytest.fixture(scope="module")
def reference_of(crew: ShapesCrew, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Return a job's results on one undisturbed worker."""
    return cache(lambda job: crew.train(job, [("1x1", NUM_STEPS)], tmp_path_factory.mktemp(job)))


@pytest.mark.parametrize(("job", "history"), CASES)
def test_a_feature_gives_the_same_bytes_in_every_shape_and_after_losses(
    job: str, history: str, reference_of: Callable[[str], Trained], crew: ShapesCrew, tmp_path: Path
) -> None:
    reference = reference_of(job)
    spans, lose = HISTORIES[history]
    trained = crew.train(job, spans, tmp_path, lose=lose)
    assert trained.digests == reference.digests
    assert trained.decided == reference.decided
    assert trained.scales == reference.scales
    assert trained.losses == reference.losses
    assert trained.evaluations == reference.evaluations
    assert trained.learning_rates == reference.learning_rates


def test_workers_say_with_which_learning_rate_each_step_is_made(
    reference_of: Callable[[str], Trained], crew: ShapesCrew, tmp_path: Path
) -> None:
    told = crew.train("scheduled", [("2x2", 2), ("4x1", NUM_STEPS)], tmp_path).learning_rates
    factors = [1 / 3, 2 / 3, 1.0, *(1 / math.sqrt(step) for step in range(3, NUM_STEPS))]
    assert told == {step: (pytest.approx(0.01 * factor),) * 2 for step, factor in enumerate(factors)}
    assert told == reference_of("scheduled").learning_rates


def test_the_number_of_the_step_is_an_input_of_loss_and_optimizer(
    reference_of: Callable[[str], Trained], tmp_path: Path
) -> None:
    trained = reference_of("annealed")
    told = [{loss.metrics["now"] for answer in answers for loss in answer.losses} for answers in trained.answers]
    assert told == [{float(step)} for step in range(NUM_STEPS)]
    assert [found.metrics["now"] for found in trained.evaluations] == [2.0, 4.0, 6.0]
    (group,) = trained.numbers("s1")["groups"]
    assert group["step_number"] == NUM_STEPS - 1
    assert group["momentum"] == pytest.approx(0.5)


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


def test_an_evaluation_is_the_model_in_evaluation_mode_on_every_sample(crew: ShapesCrew, tmp_path: Path) -> None:
    trained = crew.train("evaluated", [("2x2", 4)], tmp_path)
    assert [found.version for found in trained.evaluations] == [2, 4]
    net = Net().eval()
    state = export_state(evaluated, str(tmp_path), trained.manifest)
    net.load_state_dict(state)
    data = Points(1000, 11)
    batch = {key: torch.stack([data[index][key] for index in range(11)]) for key in ("x", "y")}
    with torch.no_grad():
        loss, metrics = loss_with_metrics(net, batch)
    last = trained.evaluations[-1]
    assert last.loss == pytest.approx(float(loss), rel=1e-6)
    assert last.metrics["close"] == pytest.approx(float(metrics["close"]))


def test_compiled_sections_give_equal_bytes_in_every_shape(crew: ShapesCrew, tmp_path: Path) -> None:
    whole = crew.train("compiled", [("1x1", 4)], tmp_path / "one")
    split = crew.train("compiled", [("2x1", 2), ("1x2", 3), ("1x1", 4)], tmp_path / "split", lose=True)
    assert whole.digests == split.digests
    assert whole.losses == split.losses
    assert whole.digests != crew.train("clipped", [("1x1", 4)], tmp_path / "plain").digests, "nothing was compiled"


def test_weights_in_bf16_are_exported_as_the_model_has_them(crew: ShapesCrew, tmp_path: Path) -> None:
    trained = crew.train("masters", [("2x1", 2)], tmp_path)
    state = export_state(masters, str(tmp_path), trained.manifest)
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    narrow_net().load_state_dict(state)


def test_evaluating_changes_no_weight(crew: ShapesCrew, tmp_path: Path) -> None:
    with_it = crew.train("evaluated", [("2x1", 5)], tmp_path / "with")
    without = crew.train("measured", [("2x1", 5)], tmp_path / "without")
    assert with_it.evaluations
    assert not without.evaluations
    assert with_it.digests == without.digests


def test_random_crops_are_learned_alike_in_one_and_two_stages(crew: ShapesCrew, tmp_path: Path) -> None:
    """Inputs are read by the first stage, labels by the last: both must see the same crop."""
    whole = crew.train("cropped", [("1x2", 30)], tmp_path / "one")
    split = crew.train("cropped", [("2x1", 30)], tmp_path / "more")
    assert split.losses == whole.losses
    assert split.evaluations == whole.evaluations
    assert split.digests == whole.digests
    assert whole.evaluations[-1].loss < 0.6 * whole.evaluations[0].loss


def test_constant_pre_copies_change_no_bit_of_dropout_and_recompute(crew: ShapesCrew, tmp_path: Path) -> None:
    alone = crew.train("tables", [("2x1", 30)], tmp_path / "alone")
    beside = crew.train("tables", [("2x1", 30)], tmp_path / "beside", ahead=True)
    assert beside.losses == alone.losses
    assert beside.digests == alone.digests
    assert beside.num_sent_ahead >= 10

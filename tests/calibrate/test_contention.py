from __future__ import annotations

from pathlib import Path

import pytest
import torch

from calibrate.computing import contention
from calibrate.computing.contention import MAX_ROUNDS, MIN_ROUNDS, Neighbours, busy_counts, factors, measure_contention
from calibrate.computing.subject import Subject, load_subject
from calibrate.helpers.crew import Crew
from morph.contract.errors import ClusterError
from morph.contract.profile import Contention
from tests.forked_modules import SUBPROCESS

pytestmark = pytest.mark.timeout(300)
JOB = f"{Path(__file__).parents[2]}/configs/jobs/tiny_gpt.py:job"


@pytest.mark.parametrize(
    ("num_cores", "counts"),
    [(1, ()), (2, (2,)), (4, (2, 3, 4)), (10, (2, 3, 4, 6, 8, 10)), (96, (2, 3, 4, 6, 8, 12, 16))],
)
def test_more_and_more_compute_at_once_up_to_all_cores(num_cores: int, counts: tuple[int, ...]) -> None:
    assert busy_counts(num_cores) == counts


def test_a_factor_is_the_median_over_rounds_against_the_same_round_alone() -> None:
    alone = iter([1.0, 2.0, 1.0, 1.0, 4.0, 1.0, 1.0])
    together = {2: iter([1.5, 3.2, 9.0, 1.0, 8.0, 1.0, 3.0]), 4: iter([2.0, 4.0, 2.0, 9.0, 4.0, 9.0, 0.5])}
    order: list[int] = []

    def at_once(count: int) -> float:
        order.append(count)
        return next(together[count])

    found = factors((2, 4), lambda: next(alone), at_once)
    assert found == (Contention(num_busy=2, factor=1.6), Contention(num_busy=4, factor=2.0))
    assert order == [2, 4] * MAX_ROUNDS


def test_rounds_end_when_the_factors_are_known() -> None:
    order: list[int] = []

    def at_once(count: int) -> float:
        order.append(count)
        return 1.2 + 0.001 * len(order)

    assert factors((2, 3), lambda: 1.0, at_once) == (
        Contention(num_busy=2, factor=1.203),
        Contention(num_busy=3, factor=1.204),
    )
    assert order == [2, 3] * MIN_ROUNDS


def test_no_process_gets_faster_by_company() -> None:
    assert factors((2,), lambda: 1.0, lambda count: 0.97) == (Contention(num_busy=2, factor=1.0),)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject(JOB, torch.device("cpu"))


def heaviest(subject: Subject) -> str:
    return subject.cut(2).sections[1].signature


@pytest.mark.slow
def test_helpers_compute_beside_this_process_and_are_gone_afterwards(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibrate.helpers.crew.subprocess", SUBPROCESS)
    monkeypatch.setattr(contention, "_WINDOW_S", 0.05)
    monkeypatch.setattr(contention, "_processes_that_fit", lambda: 99)  # other tests leave memory in use
    with Crew("calibrate.computing.helper", 1, "measuring contention") as crew:
        neighbours = Neighbours(crew, num_cores=2)
        neighbours.load(subject)
        neighbours.wait()
        (found,) = measure_contention(subject, heaviest(subject), 2, neighbours)
    assert found.num_busy == 2
    assert 1.0 <= found.factor < 20.0


@pytest.mark.slow
def test_with_one_core_there_is_nothing_to_measure(subject: Subject) -> None:
    with Crew("calibrate.computing.helper", 0, "measuring contention") as crew:
        neighbours = Neighbours(crew, num_cores=1)
        neighbours.load(subject)
        neighbours.wait()
        assert measure_contention(subject, "no section is run", 2, neighbours) == ()


@pytest.mark.slow
def test_a_helper_that_cannot_load_the_job_is_reported(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setattr("calibrate.helpers.crew.subprocess", SUBPROCESS)
    monkeypatch.setattr(contention, "_processes_that_fit", lambda: 99)
    missing = replace(subject, job_path="nowhere.py:job")
    with Crew("calibrate.computing.helper", 1, "measuring contention") as crew:
        neighbours = Neighbours(crew, num_cores=2)
        neighbours.load(missing)
        with pytest.raises(ClusterError, match=r"measuring contention failed in process 0: .*nowhere\.py"):
            neighbours.wait()

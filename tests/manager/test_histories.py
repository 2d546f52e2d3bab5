"""Seeded histories with faults of every kind, driven by the live ``decide`` in virtual time.

``NUM_HISTORIES`` of them run by default; the environment variable ``MORPH_HISTORIES=10000`` sets another number. A
failing seed prints its history and the command that plays it again.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
from cluster_invariants import INVARIANTS
from random_history import AHEAD, FATAL_ACTIONS, Reached, play, play_all, reached_by
from simulated_cluster import BrokenHistoryError, Faults, SimulatedCluster
from simulated_job import make_config
from simulated_workers import score_of

from manager.controller.state.actions import EndWorker, ReasonCode, ReleaseNodes
from manager.controller.state.events import CheckpointFound, CheckpointNotFound
from manager.controller.state.state import Phase
from manager.controller.state.transition import Transition
from morph.contract.evaluation import Best, BestRule, EvaluationSize, Judged
from tests.grids import IS_LONG

pytestmark = pytest.mark.slow

NUM_HISTORIES = int(os.environ.get("MORPH_HISTORIES", "200"))
SEEDS_AT_ONCE = 50
REACHING = 200
"""The number of histories of which the reached phases and decisions are counted."""


@pytest.fixture(scope="module")
def played() -> list[Reached]:
    """Return the results of chunks of histories, each in its own process; a broken history raises."""
    seeds = range(0, max(NUM_HISTORIES, REACHING), SEEDS_AT_ONCE)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(reached_by, [range(first, first + SEEDS_AT_ONCE) for first in seeds]))


@pytest.mark.timeout(1200)
def test_every_history_keeps_the_invariants_and_ends(played: list[Reached]) -> None:
    assert {chunk.num_histories for chunk in played} == {SEEDS_AT_ONCE}
    assert len(played) * SEEDS_AT_ONCE >= NUM_HISTORIES


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED])
def test_deaths_in_any_phase_lose_no_step_silently(phase: Phase, count: int) -> None:
    seeds = range(12 if IS_LONG or phase is Phase.HOLDING else 4)  # few histories reach a holding
    reached = sum(play_deaths(phase, count, seed).entered[phase] > 0 for seed in seeds)
    assert reached >= (1 if phase is Phase.HOLDING else len(seeds))


BY_LOSS = EvaluationSize(every_steps=3, num_micro_batches=2, best=BestRule())
BY_SCORE = EvaluationSize(
    every_samples=10,
    batch_size=5,
    num_micro_batches=2,
    best=BestRule(metric="score", mode="max", patience=2),
    finishes=True,
)
"""Evaluations at every second version; their scores are 7, 13, 5, 11, and 3 at the end, two steps after the second
worse one."""


@pytest.mark.parametrize("size", [BY_LOSS, BY_SCORE])
@pytest.mark.parametrize("seed", range(40 if IS_LONG else 8))
def test_evaluations_find_the_same_best_version_whatever_is_lost(size: EvaluationSize, seed: int) -> None:
    cluster = play(seed, num_steps=12, evaluation=size)
    assert cluster.finish is not None
    state = cluster.state
    if cluster.finish.outcome == "stopped":
        assert state.judged.last_version <= state.version
        return
    if size is BY_LOSS:
        assert state.version == 12
        assert state.judged == Judged(last_version=12, best=Best(version=12, metric="loss", value=2 / 12))
    else:
        best = Best(version=4, metric="score", value=score_of(4))
        told = "score did not improve in 3 evaluations: the best is 13, at version 4; version 10 is saved"
        assert cluster.finish.sentence == told
        assert state.judged == Judged(last_version=10, best=best, num_worse=3)
        assert state.version == 10
    assert cluster.judged[state.version] == state.judged
    marked = state.saving.marked
    assert marked is None or marked.value == (2 / marked.version if size is BY_LOSS else score_of(marked.version))


@pytest.mark.parametrize("size", [BY_LOSS, BY_SCORE])
def test_the_best_of_the_evaluated_versions_that_were_saved_is_marked(size: EvaluationSize) -> None:
    cluster = SimulatedCluster(3, make_config(num_steps=12), Faults(), observers=INVARIANTS)
    cluster.crew.evaluation = size
    assert cluster.run(4).outcome == "finished"
    due = {version for version in cluster.checkpoints if size.is_due(version)}
    best = max(due) if size is BY_LOSS else max(due, key=score_of)
    assert cluster.marked == best
    assert cluster.state.saving.candidates == ()


def play_deaths(phase: Phase, count: int, seed: int) -> SimulatedCluster:
    """Play a history in which workers die just after the phase is entered."""
    before: dict[Phase, tuple[tuple[Phase, int, int], ...]] = {
        Phase.ABORTING: ((Phase.TRAINING, 0, 1),),
        Phase.HOLDING: ((Phase.TRAINING, 0, 1), (Phase.TRAINING, 1, 1)),
        Phase.WAITING: ((Phase.TRAINING, 0, 5),),
        Phase.RESTING: ((Phase.TRAINING, 0, 1),),
    }
    faults = Faults(
        deaths_in=(*before.get(phase, ()), (phase, seed % 2 and phase is Phase.TRAINING, count)),
        deaths_after_s=((1.2, count),) if phase is Phase.STARTING else (),
        comeback=1.0 if phase is Phase.HOLDING else 0.0,
        quiet_after_s=16.0,
    )
    config = make_config(num_steps=6)
    if phase is Phase.RESTING:
        policy = config.policy.model_copy(update={"max_fruitless_generations": 1})
        config = config.model_copy(update={"policy": policy})
    cluster = SimulatedCluster(seed, config, faults, observers=INVARIANTS)
    cluster.entered[Phase.STARTING] += 1
    cluster.check(cluster.run(4 if phase is Phase.HOLDING else 6).outcome == "finished", "did not finish")
    return cluster


def play_failed_loads(seed: int, dies_before: str = "") -> SimulatedCluster:
    """Play a history in which all VMs are replaced, and saved state cannot always be loaded."""
    gone_s = 13.0 + seed % 5
    faults = Faults(
        deaths_after_s=((gone_s, 20), (gone_s + 9.0, 1)),
        joins_after_s=tuple(gone_s + 0.2 + index / 10 for index in range(6)),
        load_failure=0.7,
        lost_message=0.01 if seed % 3 == 0 else 0.0,
        stuck=0.05 if seed % 3 == 1 else 0.0,
        restarts_after_s=(gone_s + 5.0,) if seed % 2 else (),
        dies_before=dies_before,
        quiet_after_s=gone_s + 30.0,
    )
    cluster = SimulatedCluster(seed, make_config(num_steps=24), faults, observers=INVARIANTS)
    cluster.check(cluster.run(4).outcome == "finished", "did not finish")
    return cluster


def test_an_unreadable_checkpoint_is_skipped_or_reloaded_by_the_same_workers() -> None:
    found: Counter[str] = Counter()
    for seed in range(20):
        for _, event, decision in play_failed_loads(seed).history:
            if isinstance(event, CheckpointFound | CheckpointNotFound):
                found[f"{event.kind}, {decision.reason.code}"] += 1
                assert not any(isinstance(action, EndWorker | ReleaseNodes) for action in decision.actions)
    assert found["checkpoint_found, set_back"] >= 5
    assert found["checkpoint_found, formed"] >= 5
    assert found["checkpoint_not_found, resting"] >= 5


def test_a_manager_killed_while_it_seeks_a_checkpoint_is_succeeded() -> None:
    assert sum(play_failed_loads(seed, "find_checkpoint").died_before for seed in range(10)) >= 5


@pytest.mark.parametrize("kind", sorted({*FATAL_ACTIONS} - {"probe_worker", "finish"}))
def test_a_manager_killed_before_it_acts_is_succeeded(kind: str) -> None:
    died, seeds = 0, range(10 if IS_LONG else 4)
    for seed in seeds:
        faults = Faults(
            dies_before=kind,
            deaths_after_s=((3.5, 1),),
            stuck=0.3 if kind == "end_worker" else 0.0,
            restarts_after_s=(4.5,) if seed % 2 else (),
            joins_after_s=(5.0, 5.5) if kind == "send_ahead" else (),
            quiet_after_s=12.0,
        )
        num_steps = 12 if kind == "send_ahead" else 6
        config = make_config(num_steps=num_steps, target_nodes=5 if kind == "request_nodes" else 0)
        if kind == "send_ahead":
            rules = config.policy.rules.model_copy(update={"ahead": AHEAD[0]})
            config = config.model_copy(update={"policy": config.policy.model_copy(update={"rules": rules})})
        cluster = SimulatedCluster(seed, config, faults, observers=INVARIANTS)
        cluster.check(cluster.run(5).outcome == "finished", "did not finish")
        died += cluster.died_before
    assert died >= (1 if kind in ("abort", "end_worker") else len(seeds))


def test_the_histories_reach_every_phase_and_every_kind_of_decision(played: list[Reached]) -> None:
    deaths = Reached()
    for seed in range(5):
        deaths.add(play_deaths(Phase.SEALING, 1, seed))
    all_of_them = [*played[: REACHING // SEEDS_AT_ONCE], deaths]
    lost_in = {phase for phase in Phase if any(chunk.lost_in[phase] for chunk in all_of_them)}
    resumed_in = {phase for phase in Phase if any(chunk.resumed_in[phase] for chunk in all_of_them)}
    assert {phase for chunk in all_of_them for phase in chunk.phases} == set(Phase)
    assert set(ReasonCode) - {code for chunk in all_of_them for code in chunk.codes} <= {ReasonCode.FAILED}
    assert set(Phase) - lost_in <= {Phase.ENDED}
    assert set(Phase) - resumed_in <= {Phase.HOLDING, Phase.SEALING, Phase.ENDED}


def test_the_same_seed_gives_the_same_history() -> None:
    first, second = play(7), play(7)
    assert first.told() == second.told()
    assert first.state == second.state


def test_an_undisturbed_run_forms_one_generation_and_decides_each_step_once() -> None:
    cluster = SimulatedCluster(0, make_config(), observers=INVARIANTS)
    assert cluster.run(4).outcome == "finished"
    decided = [decision.state.version for _, _, decision in cluster.history]
    assert cluster.state.generation == 1
    assert sorted(set(decided)) == list(range(13))
    assert cluster.checkpoints >= {3, 12}


def test_a_broken_history_prints_seed_events_and_how_to_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transition, "answered", lambda transition, worker: None)
    with pytest.raises(BrokenHistoryError, match=r"seed \d+: (.|\n)*worker_answered(.|\n)*random_history\.py \d+"):
        play_all(range(20))

"""Seeded histories with faults of every kind, driven by the live ``decide`` in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from cluster_invariants import INVARIANTS
from simulated_cluster import BrokenHistoryError, Faults, SimulatedCluster
from simulated_job import make_config

from manager.controller import answering, changes, decide, forming, losing, saving, stepping, waking
from manager.controller.reasons import ReasonCode
from manager.controller.state import Phase
from morph.contract.messages import ReshapeOrder

NUM_HISTORIES = 1000
SEEDS_PER_TEST = 100


def random_faults(seed: int) -> tuple[Faults, int]:
    """Draw what goes wrong in one history, and its number of VMs."""
    draw = random.Random(f"faults {seed}")
    faults = Faults(
        death_per_order=draw.choice([0, 0.02, 0.06]),
        deaths_after_s=((draw.uniform(1, 12), draw.choice([1, 2, 3])),),
        joins_after_s=tuple(draw.uniform(1, 12) for _ in range(draw.randrange(4))),
        silent_death=draw.choice([0, 0.3]),
        late_loss=draw.choice([0, 0.3]),
        doubled=draw.choice([0, 0.2]),
        overflow=draw.choice([0, 0.1]),
        non_finite=draw.choice([0, 0.2]),
        stuck=draw.choice([0, 0.01]),
        spurious_abort=draw.choice([0, 0.02]),
        write_failure=draw.choice([0, 0.1]),
        stop_after_s=draw.choice([None, None, None, draw.uniform(0, 12)]),
        quiet_after_s=16.0,
    )
    return faults, draw.randrange(2, 8)


def play(seed: int, num_steps: int = 8) -> SimulatedCluster:
    """Play one history to its end, every invariant checked after every event."""
    faults, num_nodes = random_faults(seed)
    cluster = SimulatedCluster(seed, make_config(num_steps=num_steps), faults, observers=INVARIANTS)
    finish = cluster.run(num_nodes)
    allowed = {"finished"} if faults.stop_after_s is None else {"finished", "stopped"}
    cluster.check(finish.outcome in allowed, f"ended as {finish.outcome}: {finish.sentence}")
    return cluster


@pytest.mark.parametrize("first", range(0, NUM_HISTORIES, SEEDS_PER_TEST))
def test_every_history_keeps_the_invariants_and_ends(first: int) -> None:
    play_all(range(first, first + SEEDS_PER_TEST))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED])
def test_workers_dying_at_once_in_any_phase_cost_no_step_without_a_word(phase: Phase, count: int) -> None:
    for seed in range(12):
        play_deaths(phase, count, seed)


def play_deaths(phase: Phase, count: int, seed: int) -> SimulatedCluster:
    """Play a history in which workers die just after the phase is entered."""
    first = ((Phase.TRAINING, 0, 1),) if phase is Phase.ABORTING else ()
    first = ((Phase.TRAINING, 0, 5),) if phase is Phase.WAITING else first
    faults = Faults(
        deaths_in=(*first, (phase, seed % 2 and phase is Phase.TRAINING, count)),
        deaths_after_s=((1.2, count),) if phase is Phase.STARTING else (),
        quiet_after_s=16.0,
    )
    cluster = SimulatedCluster(seed, make_config(num_steps=6), faults, observers=INVARIANTS)
    cluster.entered[Phase.STARTING] += 1
    cluster.check(cluster.run(6).outcome == "finished", "did not finish")
    cluster.check(cluster.entered[phase] > 0, f"never in {phase}")
    return cluster


def test_the_histories_reach_every_phase_and_every_kind_of_decision() -> None:
    phases: Counter[Phase] = Counter()
    codes: Counter[ReasonCode] = Counter()
    lost_in: Counter[Phase] = Counter()
    clusters = [play(seed) for seed in range(150)]
    clusters += [play_deaths(Phase.SEALING, 1, seed) for seed in range(5)]
    for cluster in clusters:
        for entry in cluster.log:
            if isinstance(entry, tuple):
                _, before, event, decision = entry
                phases[decision.state.phase] += 1
                codes[decision.reason.code] += 1
                lost_in[before.phase] += event.kind == "worker_lost"
    assert set(phases) == set(Phase)
    assert set(codes) == set(ReasonCode) - {ReasonCode.FAILED}
    assert {phase for phase in Phase if lost_in[phase]} == set(Phase) - {Phase.ENDED}


def test_the_same_seed_gives_the_same_history() -> None:
    first, second = play(7), play(7)
    assert first.told() == second.told()
    assert first.state == second.state


def play_all(seeds: range) -> None:
    """Play several histories."""
    for seed in seeds:
        play(seed)


def test_an_undisturbed_run_forms_one_generation_and_decides_each_step_once() -> None:
    cluster = SimulatedCluster(0, make_config(), observers=INVARIANTS)
    assert cluster.run(4).outcome == "finished"
    decided = [decision.state.version for _, _, decision in cluster.history]
    assert cluster.state.generation == 1
    assert sorted(set(decided)) == list(range(13))
    assert cluster.checkpoints >= {3, 12}


def _everything_is_kept(*arguments: Any) -> Any:
    sources = forming_choose_sources(*arguments)
    return tuple(source.model_copy(update={"kind": "keep", "peer": None}) for source in sources)


def _nobody_is_forgotten(state: Any, lost: Any) -> Any:
    workers = {
        worker: entry.model_copy(update={"order": None}) if worker in lost else entry
        for worker, entry in state.workers.items()
    }
    return changes.changed(state, workers=workers)


def _overflow_is_overlooked(state: Any, now_s: float) -> Any:
    workers = {worker: entry.model_copy(update={"overflowed": False}) for worker, entry in state.workers.items()}
    return stepping_decide_step(changes.changed(state, workers=workers), now_s)


def _version_is_decided_on_reshape(state: Any, now_s: float) -> Any:
    return stepping_begin(changes.changed(state, version=state.version + 1), now_s)


def _version_stays(state: Any) -> tuple[Any, str]:
    return state.model_copy(update={"version": (state.checkpoint.version if state.checkpoint else 0)}), ""


def _another_norm_is_decided(*arguments: Any) -> Any:
    facts = stepping_decided_step(*arguments)
    return facts.model_copy(update={"gradient_norm": 1.0}) if facts.version > 3 else facts


def _first_member_alone_is_asked(version: int, norms_sq: Any, non_finite: Any, units: Any) -> Any:
    return stepping_decided_step(version, norms_sq[:1], non_finite[:1], norms_sq[0])


def _survivors_are_told_no_facts(**fields: Any) -> Any:
    return ReshapeOrder(**{**fields, "decided": None})


stepping_decided_step = stepping.decided_step
forming_choose_sources = forming.choose_sources
stepping_decide_step = stepping.decide_step
stepping_begin = stepping.begin

MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "every source is said to be kept": (forming, "choose_sources", _everything_is_kept),
    "a step is decided at the first answer": (answering, "busy_workers", lambda state: ()),
    "orders are not aborted before the next generation": (losing, "busy_workers", lambda state: ()),
    "late answers are taken for present ones": (answering, "_fits", lambda answer, order: True),
    "lost workers stay known": (losing, "without_workers", _nobody_is_forgotten),
    "overflowed gradients are applied": (answering, "decide_step", _overflow_is_overlooked),
    "a reshape counts as a step": (answering, "begin", _version_is_decided_on_reshape),
    "lost state goes back without a word": (forming, "_with_living_state", _version_stays),
    "nobody is ever late": (waking, "worker_deadlines", lambda state: {}),
    "a manifest counts before it is asked for": (saving, "seal_if_complete", lambda state, now_s: stepping._end(state)),
    "a member's loss changes nothing": (losing, "_is_needed", lambda state, worker: False),
    "a norm is not the step's": (stepping, "decided_step", _another_norm_is_decided),
    "facts are those of one stage": (stepping, "decided_step", _first_member_alone_is_asked),
    "survivors roll forward without facts": (forming, "ReshapeOrder", _survivors_are_told_no_facts),
    "a stop is forgotten": (stepping, "_is_last", lambda state: False),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_histories_catch_a_broken_controller(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, broken = MUTATIONS[name]
    monkeypatch.setattr(module, attribute, broken)
    with pytest.raises((BrokenHistoryError, AssertionError, KeyError, decide.ImpossibleEvent)):
        play_all(range(200))


def test_a_broken_history_prints_its_seed_and_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "busy_workers", lambda state: ())
    with pytest.raises(BrokenHistoryError, match=r"seed \d+: (.|\n)*worker_answered(.|\n)*reshaping"):
        play_all(range(20))

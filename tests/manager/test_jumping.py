"""Skipping over equal steps has the same result as playing each: every later event and decision is the same."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import simulated_job as jobs
from simulated_job import SIZES, UNITS, plan_of

from manager.controller.decide import ImpossibleEvent
from manager.controller.state.events import AnsweredAlike, Event
from manager.controller.state.state import Decision
from manager.simulation.spot.cluster import SpotCluster
from manager.simulation.spot.job import Durations, SpotJob
from morph.contract.cluster import Policy
from morph.contract.messages import Prepared
from tests.grids import cells

EXACT = Durations(  # their sums are exact in any order
    noticed_s=0.125,
    aborted_s=0.0625,
    groups_s=0.25,
    setup_s=8.0,
    order_s=0.0625,
    link_bytes_per_s=64.0,
    storage_bytes_per_s=64.0,
    copy_bytes_per_s=1024.0,
    manifest_s=0.5,
)
HOURS = 1


PLANS = {2: plan_of(2, 1, 4.0), 3: plan_of(3, 1, 3.0), 4: plan_of(2, 2, 2.0), 6: plan_of(3, 2, 1.5)}


UNEQUAL = {
    count: plan.model_copy(update={"expected": PLANS[count].expected})
    for count, plan in jobs.UNEQUAL.items()
    if count < 5
}
"""Used in addition to the fixed pipelines of other tests."""


def history_of(seed: int, *, jumps: bool, every: int | None) -> tuple[SpotCluster, list[tuple[float, Event, Decision]]]:
    """Play some hours in which VMs come, get notices and go."""
    told: list[tuple[float, Event, Decision]] = []
    job = SpotJob(
        name="job",
        batch_size=8,
        plans=PLANS | UNEQUAL if seed % 2 else PLANS,
        units=UNITS,
        unit_bytes=SIZES,
        durations=EXACT,
        policy=Policy(checkpoint_every_steps=every),
    )
    cluster = SpotCluster(
        job,
        num_steps=10**6,
        num_expected=5,
        jumps=jumps,
        watcher=lambda now_s, event, decision: told.append((now_s, event, decision)),
    )
    draw, living = random.Random(seed), []

    def come() -> tuple[()]:
        living.append(cluster.vm_came())
        return ()

    def go(lead_s: int | None) -> tuple[()]:
        if len(living) > 2:
            name = living.pop(draw.randrange(len(living)))
            if lead_s is not None:
                cluster.vm_noticed(name, lead_s)
            cluster.after(lead_s or 0, lambda: cluster.vm_taken(name) or ())
        return ()

    for _ in range(5):
        cluster.after(0, come)
    for _ in range(12 * HOURS):
        time_s, lead_s = draw.randrange(60, HOURS * 3600), draw.choice([None, 30])
        cluster.after(time_s, lambda lead_s=lead_s: go(lead_s))
        cluster.after(time_s + draw.randrange(60, 900), come)
    cluster.play(HOURS * 3600)
    return cluster, told


def test_an_error_of_the_controller_comes_out_as_it_was_raised() -> None:
    raised: list[Exception] = []

    def watch(_now_s: float, event: Event, decision: Decision) -> None:
        raised.append(ImpossibleEvent(decision.state, event))
        raise raised[0]

    job = SpotJob(name="job", batch_size=8, plans=PLANS, units=UNITS, unit_bytes=SIZES)
    cluster = SpotCluster(job, num_steps=10, watcher=watch)
    cluster.vm_came()
    with pytest.raises(ImpossibleEvent) as caught:
        cluster.play()
    assert caught.value is raised[0]


def is_step(event: Event) -> bool:
    return isinstance(event, AnsweredAlike) and isinstance(event.answer, Prepared)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "every"), cells(range(4), [None, 200]))
def test_every_later_event_and_decision_is_the_same(seed: int, every: int | None) -> None:
    slow, all_told = history_of(seed, jumps=False, every=every)
    fast, told = history_of(seed, jumps=True, every=every)
    assert fast.num_decisions < slow.num_decisions / 2
    by_time = {(now_s, event.kind): decision for now_s, event, decision in all_told}
    for now_s, event, decision in told:
        slowly = by_time[now_s, event.kind]
        assert slowly.actions == decision.actions, (seed, now_s)
        assert slowly.state.model_copy(update={"recent": ()}) == decision.state.model_copy(update={"recent": ()})
    assert [now_s for now_s, event, _ in told if not is_step(event)] == [
        now_s for now_s, event, _ in all_told if not is_step(event)
    ]
    assert fast.state.version == slow.state.version > 500
    assert fast.account == slow.account
    assert fast.moments == slow.moments
    assert fast.num_lost > 3


IN_A_PROCESS = """
from pathlib import Path

from manager.simulation.policies import morph
from manager.simulation.spot import cluster
from manager.simulation.spot.job import job_from_profile
from manager.simulation.spot.run_end import Until
from morph.contract.profile import load_profile
from simulator import spot_model

def decided(state, event, now_s, decide=cluster.decide):
    decision = decide(state, event, now_s)
    notes = [action for action in decision.actions if action.kind == "note_next_save"]
    print(now_s, event.model_dump_json(), decision.reason, notes)
    return decision

cluster.decide = decided
job = job_from_profile(load_profile(Path("configs/profiles/gpt2-2.5b.json")), 12)
trace = spot_model(12, losses_per_vm_h=1.0, replacement_s=600, noticed=0.5, notice_s=300).draw(1, 5400)
morph.play_morph(job, trace, until=Until(kind="hours", amount=1.5))
"""


@pytest.mark.slow
def test_every_process_gives_the_identical_log_whatever_it_hashes_words_to() -> None:
    logs = [
        subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert logs[0].count("\n") > 100
    assert logs[0] == logs[1]

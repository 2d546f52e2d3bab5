"""Policies on spot VMs: computed by hand on small traces, and general properties on any trace."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from simulated_job import MIXED, SIZES, UNEQUAL, UNITS, make_plan, plan_of

from manager.accounting.account import TimeUse
from manager.simulation.policies.bounds import Bound, play_ideal, play_on_demand
from manager.simulation.policies.morph import play_mix, play_morph
from manager.simulation.policies.pipelines import play_pipelines
from manager.simulation.policies.restart import play_restart
from manager.simulation.replay import (
    BOUND,
    OTHER_BATCHES,
    POLICIES,
    Replay,
    advice,
    by_controller,
    frame_of,
    interval,
    play_of,
    policies_of,
    types_of,
)
from manager.simulation.spot.job import (
    PUBLISHED,
    Durations,
    RedundantCost,
    SpotJob,
    job_from_profile,
    with_redundant_costs,
)
from manager.simulation.spot.run_end import PolicyOutcome, SpotPrices, Until
from morph.contract.errors import ConfigError, InputError, TraceError
from morph.contract.trace import Trace, TraceEvent, TracePrice, load_trace
from simulator import PlanRequest, spot_model, synthetic_profile
from simulator.traces.fitting import fit
from simulator.traces.importers import part_of
from tests.grids import IS_LONG

TIMES = Durations(
    noticed_s=0.5,
    aborted_s=0.5,
    groups_s=1.0,
    setup_s=10.0,
    order_s=0.0,
    stall_s=1.0,
    durable_s=4.0,
    manifest_s=1.0,
    storage_bytes_per_s=100.0,
    link_bytes_per_s=1000.0,
    restart_s=20.0,
)
PRICES = SpotPrices(spot_usd_per_h=1.0, on_demand_usd_per_h=3.0)


JOB = SpotJob(
    name="job",
    batch_size=8,
    plans={2: plan_of(2, 1, 4.0), 4: plan_of(2, 2, 2.0)},
    units=UNITS,
    unit_bytes=SIZES,
    durations=TIMES,
)


def trace_of(*events: tuple[float, str]) -> Trace:
    """Return a trace: "+a" means that VM a comes, "-a" that it is lost."""
    return Trace(
        events=tuple(
            TraceEvent(time_s=time_s, event="add" if what[0] == "+" else "remove", node_id=what[1:])
            for time_s, what in events
        )
    )


NOON = datetime(2027, 1, 30, 12, tzinfo=timezone(timedelta(hours=1)))
FOUR = [(0.0, f"+{name}") for name in "abcd"]
HOUR = Until(kind="hours", amount=1.0)
FIVE_MINUTES = Until(kind="hours", amount=1 / 12)


def test_the_ideal_trains_all_of_the_time_in_the_best_shape() -> None:
    trace = trace_of(*FOUR, (100.0, "-a"), (100.0, "-b"), (200.0, "+e"), (200.0, "+f"), (300.0, "-c"))
    outcome = play_ideal(JOB, trace, until=FIVE_MINUTES, prices=PRICES)
    # nothing prevents a worker from computing both stages: two such workers have 4 micro-batches each and take 3.6 s
    # (2.0 s * (2 * 4 + 1) / (4 + 1)), four have 2 each and take half of it, whereas whole pipelines take 4 s and 2 s
    assert outcome.steps == math.floor(100 / 1.8 + 100 / 3.6 + 100 / 1.8)
    assert outcome.examples == 8 * 138
    assert [moment.shape for moment in outcome.moments] == ["1x4", "1x2", "1x4"]
    assert outcome.usd == pytest.approx((400 + 200 + 400) / 3600)
    assert (outcome.num_losses, outcome.num_changes, outcome.lost_steps) == (2, 3, 0)
    assert outcome.parts_s[TimeUse.COMPUTE] == pytest.approx(1000)


def test_on_demand_vms_train_undisturbed_at_their_price() -> None:
    outcome = play_on_demand(JOB, trace_of(*FOUR, (3600.0, "-a")), until=HOUR, prices=PRICES)
    assert (outcome.steps, outcome.usd) == (1800, 12.0)
    steps = play_on_demand(JOB, trace_of(*FOUR, (3600.0, "-a")), until=Until(kind="steps", amount=90), prices=PRICES)
    assert (steps.hours, steps.finished) == (0.05, True)


def test_a_loss_sends_a_job_that_restarts_back_to_what_was_durable() -> None:
    # ready at 10 s, begun at 30 s; steps take 2 s, a save of 1 s follows every 10 steps, and is durable 5 s later. Step
    # 30 is durable at 98 s; three more steps are done at 99 s, and one is under way at 100 s, when a and b are lost.
    trace = trace_of(*FOUR, (100.0, "-a"), (100.0, "-b"), (300.0, "-c"))
    outcome = play_restart(JOB, trace, until=FIVE_MINUTES, every_steps=10)
    load_s = sum(SIZES.values()) / 2 / TIMES.storage_bytes_per_s
    begun_s = 100 + TIMES.restart_s + load_s
    again = 0
    now_s = begun_s
    while now_s + 4 <= 300:
        now_s, again = now_s + 4, again + 1
        if again % 10 == 0:
            now_s += 1
    assert outcome.lost_steps == 3
    assert outcome.steps == 30 + again
    assert outcome.num_fatal == 1
    assert outcome.parts_s[TimeUse.LOST] > 0
    assert outcome.parts_s[TimeUse.MORPH] == pytest.approx(4 * 20 + 2 * (TIMES.restart_s + load_s))


def test_morph_loses_the_step_under_way_and_no_other() -> None:
    trace = trace_of(*FOUR, (100.0, "-a"))
    outcome = play_morph(JOB, trace, until=FIVE_MINUTES, prices=PRICES)
    restarted = play_restart(JOB, trace, until=FIVE_MINUTES, prices=PRICES)
    assert (outcome.lost_steps, outcome.num_fatal, outcome.num_losses) == (0, 0, 1)
    assert 0 < outcome.parts_s[TimeUse.LOST] <= 4 * (2.0 + TIMES.noticed_s)
    assert outcome.steps > restarted.steps > 0
    assert outcome.usd == pytest.approx(outcome.vm_s / 3600)


def test_a_notice_lets_a_job_that_restarts_save_what_it_has() -> None:
    told = trace_of(*FOUR, (100.0, "-a"))
    noticed = told.model_copy(
        update={"events": (*told.events[:-1], told.events[-1].model_copy(update={"notice_s": 12.0}))}
    )
    late = told.model_copy(update={"events": (*told.events[:-1], told.events[-1].model_copy(update={"notice_s": 3.0}))})
    without, early, too_late = (play_restart(JOB, trace, until=FIVE_MINUTES) for trace in (told, noticed, late))
    assert without.lost_steps > early.lost_steps
    assert too_late == without
    assert early.steps > without.steps
    assert play_restart(JOB, noticed, until=FIVE_MINUTES, every_steps=10) == play_restart(
        JOB, told, until=FIVE_MINUTES, every_steps=10
    )


def test_morph_trains_with_a_noticed_vm_until_it_must_leave() -> None:
    told = trace_of(*FOUR, (100.0, "-a"))
    noticed = told.model_copy(
        update={"events": (*told.events[:-1], told.events[-1].model_copy(update={"notice_s": 30.0}))}
    )
    surprised, warned = (play_morph(JOB, trace, until=FIVE_MINUTES) for trace in (told, noticed))
    assert surprised.parts_s[TimeUse.LOST] > 0
    assert warned.parts_s[TimeUse.LOST] == 0
    assert 90 < warned.moments[2].time_s < 98  # noticed at 70 s, taken at 100 s; steps take 2 s, a change 1 s


def test_vms_cost_what_the_trace_says_when_they_come() -> None:
    told = trace_of(*FOUR, (100.0, "-a"), (200.0, "+e"))
    prices = (TracePrice(time_s=0, usd_per_h=1.0), TracePrice(time_s=150, usd_per_h=5.0))
    trace = told.model_copy(update={"prices": prices})
    usd = (4 * 100 + 3 * 200 + 5 * 100) / 3600
    for policy in ("ideal", "restart", "drop", "bamboo", "morph"):
        play, _ = POLICIES[policy]
        outcome = play(JOB, trace, until=FIVE_MINUTES, seed=0, prices=None, name="")
        assert outcome.usd == pytest.approx(usd, rel=1e-3), policy  # a loss is detected half a second later
        given = play(JOB, trace, until=FIVE_MINUTES, seed=0, prices=PRICES, name="")
        assert given.usd == pytest.approx(given.vm_s / 3600), policy


def test_a_pipeline_without_a_vm_drops_samples_until_completed() -> None:
    # two pipelines of two stages, steps of 2 s; ready at 10 s, set up by 11 s plus the time of a stage's state
    trace = trace_of(*FOUR, (100.0, "-a"), (200.0, "+e"))
    outcome = play_pipelines(JOB, trace, until=FIVE_MINUTES, redundant=None)
    set_up_s = TIMES.groups_s + sum(SIZES.values()) / 2 / TIMES.link_bytes_per_s
    both_s = (100 - 10 - set_up_s) + (300 - 210 - set_up_s)
    one_s = 210 - 100
    every_s = math.sqrt(2 * 1.0 * 86_400)
    batches = (both_s / 2 + one_s / 2 / 2) / (1 + 1.0 / every_s)
    assert outcome.steps == math.floor(batches)
    assert (outcome.num_fatal, outcome.lost_steps, outcome.num_changes) == (0, 0, 2)


def test_a_neighbour_computes_for_one_lost_vm_but_not_for_two() -> None:
    alone = trace_of(*FOUR, (100.0, "-a"))
    outcome = play_pipelines(JOB, alone, until=FIVE_MINUTES, redundant="eflb")
    dropped = play_pipelines(JOB, alone, until=FIVE_MINUTES, redundant=None)
    assert (outcome.num_fatal, outcome.num_changes) == (0, 1)
    undisturbed = play_pipelines(JOB, trace_of(*FOUR, (300.0, "-a")), until=FIVE_MINUTES, redundant="eflb")
    plain = play_pipelines(JOB, trace_of(*FOUR, (300.0, "-a")), until=FIVE_MINUTES, redundant=None)
    # the gradients of the first of two stages
    gradients_s = sum(SIZES.values()) / JOB.state_copies / 2 / TIMES.link_bytes_per_s
    step_s = 2 * (1 + JOB.redundant["eflb"].overhead) + gradients_s
    assert undisturbed.steps == pytest.approx(plain.steps * 2 / step_s, abs=1)
    num, depth = max(JOB.plans[4].micro_batches_per_replica), 2
    slower = (2 * num + depth - 1) / (num + depth - 1)
    per_s = 1 / step_s
    assert outcome.steps == pytest.approx(undisturbed.steps - 200 * per_s * (1 - 1 / slower), abs=2)
    assert dropped.steps < plain.steps
    ended = play_pipelines(JOB, trace_of(*FOUR, (100.0, "-a"), (100.0, "-b")), until=FIVE_MINUTES, redundant="eflb")
    assert (ended.num_fatal, ended.num_changes) == (0, 2)
    assert ended.moments[-1].num_vms == 2
    lost = play_pipelines(
        JOB, trace_of(*FOUR, *((100.0, f"-{vm}") for vm in "abc"), (150.0, "+e")), until=FIVE_MINUTES, redundant=None
    )
    assert lost.num_fatal == 1
    assert lost.lost_steps > 0


def test_computing_only_after_a_loss_costs_pauses_instead_of_steps() -> None:
    costs = {"eflb": RedundantCost(overhead=0.5, pause=0.1), "lflb": RedundantCost(overhead=0.0, pause=10.0)}
    times = TIMES.model_copy(update={"link_bytes_per_s": 1e9})
    job = JOB.model_copy(update={"redundant": costs, "durations": times})
    alone = trace_of(*FOUR, (300.0, "-a"))
    eager, lazy, plain = (
        play_pipelines(job, alone, until=FIVE_MINUTES, redundant=mode) for mode in ("eflb", "lflb", None)
    )
    assert lazy.steps == plain.steps == pytest.approx(1.5 * eager.steps, abs=2)
    assert [eager.policy, lazy.policy] == ["bamboo", "bamboo-lflb"]
    hit = trace_of(*FOUR, (100.0, "-a"))
    pauses_s = [
        play_pipelines(job, hit, until=FIVE_MINUTES, redundant=mode).parts_s[TimeUse.MORPH] for mode in ("eflb", "lflb")
    ]
    step_s = job.plans[4].expected.mini_batch_s
    assert pauses_s[1] - pauses_s[0] == pytest.approx(3 * 9.9 * step_s)  # with three VMs


def test_neighbours_that_are_lost_at_once_have_the_step_begun_anew() -> None:
    step_s = 50.0
    plans = {2: plan_of(2, 1, 2 * step_s), 4: plan_of(2, 2, step_s)}
    job = JOB.model_copy(update={"plans": plans, "redundant": {"lflb": RedundantCost(overhead=0.0, pause=0.0)}})
    ended = play_pipelines(job, trace_of(*FOUR, (140.0, "-a"), (140.0, "-b")), until=FIVE_MINUTES, redundant="lflb")
    assert ended.lost_steps == 1
    assert ended.num_fatal == 0
    assert 0 < ended.parts_s[TimeUse.LOST] < 4 * step_s


@pytest.mark.slow
def test_redundant_computation_is_simulated_for_the_jobs_shape() -> None:
    profile = synthetic_profile(num_sections=6, batch_size=32, micro_batch_size=2, parameter_bytes=10**9)
    job = job_from_profile(profile, 6, PlanRequest(memory_bytes=20 * 10**9, recompute=False, changes=False))
    assert job.redundant == PUBLISHED
    assert job.best_plan(6).pipeline_depth > 1  # type: ignore[union-attr]
    costs = with_redundant_costs(job, profile, 6).redundant
    assert costs["lflb"].overhead == 0.0
    assert 0 < costs["eflb"].overhead < 1 / 3
    assert 0 < costs["eflb"].pause < costs["lflb"].pause < 1


def test_half_of_the_vms_may_be_on_demand() -> None:
    trace = trace_of(*FOUR, *((100.0, f"-{vm}") for vm in "abcd"))
    outcome = play_mix(JOB, trace, until=FIVE_MINUTES, prices=PRICES, on_demand_share=0.5)
    assert outcome.policy == "mix-50"
    assert outcome.num_losses == 2
    assert outcome.usd == pytest.approx((2 * 300 * 3 + 2 * 100) / 3600, rel=0.01)
    assert outcome.moments[-1].shape == "2x1"


def drawn(seed: int, every_s: float) -> Trace:
    model = spot_model(6, losses_per_vm_h=3600 * 1.8 / every_s / 6, bulk_share=0.4, replacement_s=120)
    return model.draw(seed, 7200)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_parts_add_up_bounds_hold_and_seeds_repeat(policy: str) -> None:
    play, _ = POLICIES[policy]
    for seed in range(6 if IS_LONG else 2):
        trace = drawn(seed, 300)
        until = Until(kind="hours", amount=trace.duration_s / 3600)
        one, two = (play(JOB, trace, until=until, seed=seed, prices=PRICES, name="t") for _ in range(2))
        assert one == two
        assert sum(one.parts_s.values()) == pytest.approx(one.vm_s)
        assert min(one.parts_s.values()) >= -1e-6
        usd_per_h = {"on-demand": 3.0, "mix-50": 2.0}.get(policy, 1.0)
        assert one.usd == pytest.approx(one.vm_s / 3600 * usd_per_h, rel=0.1 if policy == "mix-50" else 1e-6)
        assert one.steps > 0
        assert one.lost_steps >= 0
        if policy not in ("on-demand", "mix-50"):
            bound = play_ideal(JOB, trace, until=until)
            assert one.steps <= bound.steps
            assert one.vm_s == pytest.approx(bound.vm_s, rel=2e-3)  # a loss is detected a little later


BOUND_OF_JOB = Bound(JOB)
REPLICAS = JOB.model_copy(
    update={
        "plans": {num: plan_of(1, num, math.ceil(8 / num)) for num in (1, 2, 3, 4)},
        "durations": TIMES.model_copy(update={"setup_s": 0.0, "groups_s": 0.0, "stall_s": 0.0}),
    }
)
"""Three of four replicas that continue with two micro-batches each do more than three that share all eight."""
UNSURPASSED = [name for name in POLICIES if name not in ("ideal", "on-demand", "mix-50")]
QUICK = [name for name in UNSURPASSED if not by_controller(name)]


def limited(num_sections: int, batch_size: int, memory_bytes: float, gpus_per_vm: int = 1, *, num_vms: int) -> SpotJob:
    """Return a job with sections of 100 MB on devices with this much memory, planned for at most this many VMs."""
    profile = synthetic_profile(
        num_sections=num_sections, forward_s=0.05, batch_size=batch_size, micro_batch_size=1, parameter_bytes=10**8
    )
    nodes, most = (gpus_per_vm if gpus_per_vm > 1 else None), gpus_per_vm * num_vms
    request = PlanRequest(memory_bytes=int(memory_bytes), num_gpus_per_node=nodes)
    return with_redundant_costs(job_from_profile(profile, most, request), profile, most)


@pytest.mark.parametrize(
    ("given", "num_vms"),
    [(JOB, 6), (REPLICAS, 4), ((12, 24, 6e9), 11), ((5, 7, 5e9), 9), ((6, 16, 6e9, 4), 3)],
    ids=["by hand", "replicas only", "deep pipelines", "few micro-batches", "VMs of four GPUs"],
)
def test_no_policy_surpasses_the_bound(given: SpotJob | tuple[int, int, float], num_vms: int) -> None:
    job = given if isinstance(given, SpotJob) else limited(*given, num_vms=num_vms)
    for seed in range(200 if IS_LONG else 18):
        rate, pause_s = [0.3, 3, 12][seed % 3], [400, 3600][seed % 2]
        model = spot_model(num_vms, losses_per_vm_h=rate, bulk_share=0.4, replacement_s=pause_s)
        trace = model.draw(seed, 7200)
        until = Until(kind="hours", amount=2)
        bound = play_ideal(job, trace, until=until)
        for policy in UNSURPASSED if IS_LONG and seed < 3 else QUICK:
            outcome = play_of(policy)(job, trace, until=until, seed=seed, prices=None, name="")
            assert outcome.steps <= bound.steps, (policy, seed)


def test_the_bound_is_the_best_of_unequal_pipelines() -> None:
    """Compare with all sets of pipelines, whose shares are such that all pipelines finish at the same time."""
    plans = {2: plan_of(2, 1, 5.0)}
    times = {1: ((1, 1.6), (8, 9.0)), 2: ((2, 2.0), (8, 5.0)), 5: ((8, 1.5),)}
    job = JOB.model_copy(update={"plans": plans, "pipelines": times})
    per_micro_batch = {1: [(1, 1.6), (8, 9.0)], 2: [(2, 2.0), (8, 5.0)], 5: [(8, 1.5)]}

    def share(depth: int, time_s: float) -> float:
        (first, first_s), (last, last_s) = per_micro_batch[depth][0], per_micro_batch[depth][-1]
        if time_s <= first_s:
            found = time_s / first_s * first
        else:
            found = min(last, first + (time_s - first_s) / ((last_s - first_s) or 1) * (last - first))
        return found if found >= 1 else 0.0

    for num in range(1, 12):
        least_s = math.inf
        for ones, twos, fives in itertools.product(range(num + 1), range(num // 2 + 1), range(num // 5 + 1)):
            if 0 < ones + 2 * twos + 5 * fives <= num:
                low_s, high_s = 0.0, 20.0
                for _ in range(60):
                    middle_s = (low_s + high_s) / 2
                    done = ones * share(1, middle_s) + twos * share(2, middle_s) + fives * share(5, middle_s)
                    low_s, high_s = (low_s, middle_s) if done >= 8 else (middle_s, high_s)
                least_s = min(least_s, high_s)
        found = Bound(job).fastest(num)
        assert found.step_s == pytest.approx(least_s)
        assert found.num_workers <= num
    deep = job.model_copy(update={"pipelines": {5: times[5]}, "plans": {5: plan_of(5, 1, 1.5)}})
    assert Bound(deep).fastest(4) is None


def test_all_gpus_of_a_vm_come_and_go_together() -> None:
    """There are two VMs with two GPUs; without one of them, one of two pipelines is left.

    Times and losses are per VM.
    """
    job = JOB.model_copy(update={"gpus_per_vm": 2})
    trace = trace_of((0.0, "+a"), (0.0, "+b"), (100.0, "-b"), (300.0, "-a"))
    alike = trace_of(*FOUR, (100.0, "-a"), (100.0, "-b"), (300.0, "-c"))
    for policy, play in ((name, play_of(name)) for name in UNSURPASSED):
        one = play(job, trace, until=FIVE_MINUTES, seed=0, prices=PRICES, name="")
        other = play(JOB, alike, until=FIVE_MINUTES, seed=0, prices=PRICES, name="")
        assert sum(one.parts_s.values()) == pytest.approx(one.vm_s)
        assert one.usd == pytest.approx(one.vm_s / 3600, rel=1e-3), policy
        assert max((moment.num_vms for moment in one.moments), default=0) == 2
        if not by_controller(policy):  # it has no follower on the same VM
            assert one.steps == other.steps, policy
            assert one.vm_s == pytest.approx(other.vm_s / 2)
    outcome = play_morph(job, trace, until=FIVE_MINUTES, prices=PRICES)
    assert outcome.num_losses == 2  # the other one at the end
    shapes = list(dict.fromkeys(moment.shape for moment in outcome.moments if moment.shape))
    assert shapes == ["2x2", "2x1"]


def test_the_bound_is_met_where_equal_pipelines_are_the_best() -> None:
    job = limited(12, 96, 6e9, num_vms=12)
    plan = job.best_plan(12)
    assert plan is not None
    best = Bound(job).fastest(12)
    assert 0.99 * plan.expected.mini_batch_s <= best.step_s <= plan.expected.mini_batch_s * (1 + 1e-9)


def random_trace(seed: int) -> str:
    """Return a file that a user might have: unsorted, with equal times, no end, one row, or ends before adds."""
    draw, now_s, alive, rows = random.Random(seed), 0.0, list[str](), ["time_s,event,node_id,notice_s,usd_per_h"]
    for number in range(draw.choice([0, 1, 2, 5, 20])):
        now_s += draw.choice([0, 0, 1e-9, 0.5, 60, 600, 1e5]) - (draw.random() < 0.02)
        if draw.random() < 0.1:
            rows.append(f"{now_s!r},price,,,{draw.choice([0, 1, 1e9])}")
        elif draw.random() < 0.6 or not alive:
            alive.append(f"v{number}")
            rows.append(f"{now_s!r},add,{alive[-1]},,")
        else:
            rows.append(f"{now_s!r},remove,{alive.pop(draw.randrange(len(alive)))},{draw.choice(['', '1e-9', '1'])},")
        if draw.random() < 0.01:
            rows[-1] = draw.choice(["nan", "inf", "-1", "", "1e308"]) + rows[-1][rows[-1].index(",") :]
    if draw.random() < 0.3:
        rows.append(f"{now_s + draw.choice([0, 1, 1000])!r},end,,,")
    return "\n".join(rows)


def test_any_trace_is_played_or_refused_by_a_typed_error(tmp_path: Path) -> None:
    path, num_played = tmp_path / "trace.csv", 0
    for seed in range(1000 if IS_LONG else 75):
        path.write_text(random_trace(seed), encoding="utf-8")
        try:
            trace = load_trace(path).from_first_event()
        except TraceError:
            continue
        until = [Until(kind="hours", amount=max(trace.duration_s, 1) / 3600), Until(kind="steps", amount=20)][seed % 2]
        policies = [*POLICIES] if trace.duration_s else ["ideal", *QUICK]
        outcomes = {
            name: play_of(name)(JOB, trace, until=until, seed=seed, prices=PRICES, name="")
            for name in policies
            if trace.duration_s < 5e4 or not by_controller(name)
        }
        for name, outcome in outcomes.items():
            assert sum(outcome.parts_s.values()) == pytest.approx(outcome.vm_s), (name, seed)
            assert name not in UNSURPASSED or outcome.steps <= outcomes["ideal"].steps, (name, seed)
        with contextlib.suppress(TraceError):
            fit(trace)
        with contextlib.suppress(TraceError):
            part_of(trace, 100, 1000)
        num_played += 1
    assert num_played > 25


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["morph", "restart", "restart-100", "drop", "bamboo"])
def test_more_losses_mean_less_progress(policy: str) -> None:
    def steps(every_s: float) -> int:
        cases = [(f"{seed}", seed, drawn(seed, every_s)) for seed in range(2)]
        replay = Replay(JOB, (policy,), tuple(cases), Until(kind="hours", amount=2), None)
        return sum(outcome.steps for outcome in replay.run(1))

    assert steps(60) < steps(200) < steps(2000)


def test_a_job_ends_with_its_steps_or_its_dollars() -> None:
    trace = drawn(1, 300)
    for policy, (play, _) in POLICIES.items():
        steps = play(JOB, trace, until=Until(kind="steps", amount=300), seed=0, prices=PRICES, name="")
        assert steps.finished, policy
        assert steps.steps == 300
        assert 300 * BOUND_OF_JOB.fastest(6).step_s <= steps.hours * 3600 + 1e-6 < 2000, policy  # before the trace ends
        assert steps.vm_s <= 6 * steps.hours * 3600
        spent = play(JOB, trace, until=Until(kind="usd", amount=2), seed=0, prices=PRICES, name="")
        assert spent.usd is not None
        assert 2 - 1e-6 <= spent.usd < 4.1, policy
        assert not spent.finished


def test_a_run_that_gives_up_says_so_and_is_compared_over_equal_hours() -> None:
    """One VM alone holds no plan of this job, and the second comes after two days."""
    rules = JOB.policy.rules
    rules = rules.model_copy(update={"wait": rules.wait.model_copy(update={"vms_patience_s": 3600.0})})
    job = JOB.model_copy(update={"policy": JOB.policy.model_copy(update={"rules": rules})})
    trace, until = trace_of((0.0, "+a"), (2 * 86400.0, "+b")), Until(kind="hours", amount=83)
    gone, other = (play(job, trace, until=until, seed=0, prices=PRICES, name="") for play in (play_morph, play_restart))
    assert gone.gave_up == "gave up after 1 of 83 hours: there were never 2 ready workers within 3600 s"
    assert (gone.hours, gone.steps, gone.finished) == (83, 0, False)
    assert other.hours == 83
    assert other.steps > 0
    assert not other.gave_up
    assert list(frame_of([gone, other])["gave_up"]) == [gone.gave_up, ""]


@pytest.mark.slow
def test_processes_give_what_one_gives_in_the_same_order() -> None:
    cases = tuple((f"{seed}", seed, drawn(seed, 300)) for seed in range(2))
    replay = Replay(JOB, ("ideal", "restart"), cases, HOUR, PRICES)
    told: list[float] = []
    assert replay.run(2, told.append) == replay.run(1)
    assert told == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_the_frame_has_a_row_each_and_the_advice_names_the_best() -> None:
    cases = (("t", 0, drawn(3, 200)),)
    outcomes = Replay(JOB, tuple(POLICIES), cases, HOUR, PRICES).run(1)
    frame = frame_of(outcomes)
    assert list(frame["policy"]) == [outcome.policy for outcome in outcomes]
    shares = frame[[column for column in frame if column.startswith("share_")]].sum(axis=1)
    assert all(math.isclose(share, 1.0) for share in shares)
    worth = {one.policy: one.examples_per_usd or 0.0 for one in outcomes if one.policy not in (BOUND, *OTHER_BATCHES)}
    assert advice(outcomes).startswith(f"Take {max(worth, key=lambda policy: worth[policy])}: ")
    assert "ideal" not in advice(outcomes)
    alone: list[PolicyOutcome] = [outcome for outcome in outcomes if outcome.policy == "ideal"]
    assert advice(alone) == ""


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    draw = random.Random(5)
    covered = 0
    for seed in range(200):
        values = [draw.gauss(10, 2) for _ in range(30)]
        _, low, high = interval(values, seed)
        covered += low <= 10 <= high
    assert 0.88 <= covered / 200 <= 0.99
    assert interval([3.0]) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("100000", "steps", 1e5),
        ("48h", "hours", 48),
        ("2d", "hours", 48),
        ("300usd", "usd", 300),
        ("1.5h", "hours", 1.5),
        ("2027-01-31T18:00", "hours", 30),
        ("2027-01-31T18:00+02:00", "hours", 29),
        ("2027-02-01", "hours", 36),
    ],
)
def test_bounds_are_read(text: str, kind: str, amount: float) -> None:
    assert Until.parse(text, NOON) == Until(kind=kind, amount=amount)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "soon", "3x", "h", "2027-01-30", "2027-13-01"])
def test_invalid_bounds_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--until"):
        Until.parse(text, NOON)


def test_policies_are_read() -> None:
    assert policies_of("all") == tuple(POLICIES)
    assert policies_of("morph, ideal,morph") == ("morph", "ideal")
    with pytest.raises(ConfigError, match="restart-0"):
        policies_of("morph,restart-0")


def test_a_trace_of_two_types_trains_on_the_types_present() -> None:
    job = SpotJob(
        name="job",
        batch_size=8,
        plans=MIXED,
        units=UNITS,
        unit_bytes=SIZES,
        node_types={"p3": "fast", "g4": "slow"},
        type_compute_s={"fast": (1.0,) * 6, "slow": (2.5,) * 6},
        durations=TIMES,
    )
    came = [TraceEvent(time_s=0, event="add", node_id=f"v{n}", instance_type="p3" if n < 2 else "g4") for n in range(4)]
    gone = TraceEvent(time_s=1800, event="remove", node_id="v1", instance_type="p3")
    back = TraceEvent(time_s=2700, event="add", node_id="v4", instance_type="g4")
    until = Until(kind="hours", amount=1)
    both = play_morph(job, Trace(events=(*came, gone, back), end_s=3600), until=until)
    shapes = [moment.shape for moment in both.moments if moment.shape]
    assert list(dict.fromkeys(shapes)) == ["2x1 + 2x1", "1x1 + 2x1", "1x1 + 2x1 + 1x1"]
    fast = play_morph(job, Trace(events=(*came[:2], gone), end_s=3600), until=until)
    assert both.steps > 1.3 * fast.steps > 0
    assert both.num_fatal == 0


@pytest.mark.parametrize(
    ("text", "gpus", "policies", "problem"),
    [
        ("p3", 1, ("morph",), "are not types"),
        ("p3=v100,p3=t4", 1, ("morph",), "are not types"),
        ("p3=v100,g4=t4", 4, ("morph",), "is for VMs with one GPU"),
        ("p3=v100,g4=t4", 1, ("morph", "drop"), "is not supported by drop"),
    ],
)
def test_types_that_mean_nothing_or_that_a_policy_does_not_know_are_refused(
    text: str, gpus: int, policies: tuple[str, ...], problem: str
) -> None:
    assert types_of("p3=v100, g4=t4", 1, ("morph", "morph-off")) == {"p3": "v100", "g4": "t4"}
    with pytest.raises(ConfigError, match=f"--node-types: {problem}"):
        types_of(text, gpus, policies)


def test_policies_of_fixed_pipelines_take_equal_ones_where_unequal_ones_are_faster() -> None:
    job = SpotJob(name="job", batch_size=8, plans=UNEQUAL, units=UNITS, unit_bytes=SIZES, durations=TIMES)
    equal = job.model_copy(update={"equal_plans": {4: make_plan(2, 2), 6: make_plan(3, 2)}})
    assert [one.best_plan(6).shape for one in (job, equal)] == ["4x1 + 1x2"] * 2  # type: ignore[union-attr]
    assert [one.best_plan(6, equal=True).shape for one in (job, equal)] == ["1x2", "3x2"]  # type: ignore[union-attr]
    trace = Trace(events=tuple(TraceEvent(time_s=0, event="add", node_id=f"v{n}") for n in range(6)), end_s=600)
    dropped = play_pipelines(equal, trace, until=Until(kind="hours", amount=1 / 6), redundant=None)
    assert {moment.shape for moment in dropped.moments if moment.shape} == {"3x2"}

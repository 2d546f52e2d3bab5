"""The choice of followers, and when followers pay."""

from __future__ import annotations

import random
from functools import partial

import pytest
from cluster_invariants import INVARIANTS
from controller_script import Script, changed, formed
from simulated_cluster import SimulatedCluster
from simulated_job import SIZES, UNITS, make_config, make_plan
from simulated_workers import Faults

from manager.controller.shape import followers
from manager.controller.shape.followers import choose_followers, redundancy_of
from manager.controller.shape.placement import place
from manager.controller.shape.risk import holders_of, mean_s_to_fatal_loss
from manager.controller.shape.salvage import losses_of
from manager.controller.state.config import ControllerConfig, ExpectedLosses, units_by_stage
from manager.controller.state.events import ManifestWritten, WorkerAnswered, WorkerLost
from manager.controller.state.state import ControllerState, Decision, Phase, initial_state
from morph.contract.cluster import Policy
from morph.contract.messages import Slot
from morph.contract.plan import Plan
from morph.contract.salvage import LOSSES, Follow, Salvage, SalvagedSum, partial_sum
from morph.contract.vm_names import vm_of, workers_of

VMS = ("n1", "n2", "n3", "n4", "n5", "n6")


def shape(depth: int, replicas: int, workers: tuple[str, ...]) -> tuple[tuple[Slot, ...], list[tuple[str, ...]]]:
    plan = make_plan(depth, replicas)
    needed = list(units_by_stage(plan, UNITS))
    return place(plan, workers, {}, needed, SIZES), needed


def follows_of(depth: int, replicas: int, workers: tuple[str, ...]) -> tuple[Follow, ...]:
    slots, needed = shape(depth, replicas, workers)
    sole = frozenset(UNITS) if replicas == 1 else frozenset()
    return choose_followers(slots, needed, {}, SIZES, sole, {})


def test_a_worker_follows_none_on_its_own_vm() -> None:
    assert follows_of(2, 1, workers_of("n1", 2)) == ()


@pytest.mark.parametrize("seed", range(12))
def test_the_follower_is_the_best_of_all_workers(seed: int) -> None:
    draw = random.Random(seed)
    workers = tuple(worker for vm in range(9) for worker in workers_of(f"n{vm}", draw.choice((1, 1, 2))))
    depth = draw.choice((2, 3, 6))
    slots, needed = shape(depth, min(4, len(workers) // depth), workers)
    held = {worker: set(draw.sample(list(UNITS), draw.randrange(len(UNITS)))) for worker in draw.sample(workers, 5)}
    zones = {worker: draw.choice("ab") for worker in workers}
    own = {slot.worker: set(needed[slot.stage]) for slot in slots}
    load = dict.fromkeys(own, 0)
    chosen: dict[str, str] = {}
    for me in own:

        def rank(other: str, me: str = me) -> tuple[int, bool, int, int]:
            shared = sum(SIZES[unit] for unit in own[me] & (own[other] | held.get(other, set())))
            pairs = 0 if chosen.get(other) == me else 2 if other in chosen else 1
            return -shared, zones[other] == zones[me], pairs, load[other]

        chosen[me] = min((other for other in own if vm_of(other) != vm_of(me)), key=rank)
        load[chosen[me]] += sum(SIZES[unit] for unit in own[me])
    follows = choose_followers(slots, needed, held, SIZES, frozenset(), zones)
    assert {follow.worker: follow.follower for follow in follows} == chosen


def test_of_replicas_one_follows_the_other_with_sums_alone() -> None:
    slots, needed = shape(2, 2, VMS[:4])
    stage_of = {slot.worker: slot.stage for slot in slots}
    follows = choose_followers(slots, needed, {}, SIZES, frozenset(), {})
    assert all(stage_of[follow.worker] == stage_of[follow.follower] for follow in follows)
    assert not any(follow.units for follow in follows)


def test_a_follower_keeps_following_and_is_sent_nothing() -> None:
    slots, needed = shape(3, 1, VMS[:3])
    stage_of = {slot.worker: slot.stage for slot in slots}
    last = next(worker for worker, stage in stage_of.items() if stage == 2)
    first = next(worker for worker, stage in stage_of.items() if stage == 0)
    middle = next(worker for worker, stage in stage_of.items() if stage == 1)
    held = {last: frozenset(needed[2]) | frozenset(needed[1])}
    follows = {follow.worker: follow for follow in choose_followers(slots, needed, held, SIZES, frozenset(UNITS), {})}
    assert follows[middle].follower == last
    assert set(follows[middle].known) == set(needed[1])
    assert not follows[first].known


def test_units_shared_by_a_vms_workers_are_sent_by_one() -> None:
    plan = make_plan(3, 1)
    needed = list(units_by_stage(plan, UNITS))  # the first and the last stage have a unit in common
    first, last = workers_of("n1", 2)
    slots = tuple(Slot(worker=worker, stage=stage, replica=0) for stage, worker in enumerate((first, "n2", last)))
    follows = choose_followers(slots, needed, {}, SIZES, frozenset(UNITS), {})
    sent = [(follow.follower, unit) for follow in follows for unit in follow.units]
    assert len(sent) == len(set(sent))
    assert ("n2", "s0+s5") in sent


def test_losses_known_to_other_workers_are_not_sent_twice() -> None:
    plan = make_plan(2, 2)
    slot = Slot(worker="n1", stage=1, replica=0)
    mine = SalvagedSum(holder="n1", receiver="n1", sum=partial_sum(LOSSES, {5: 0b111}))
    others = SalvagedSum(holder="n2", receiver="n2", sum=partial_sum(LOSSES, {5: 0b1110000}))
    remaining = (3, 4), (5, 8)  # of these, 3 and 5 belong to this replica
    salvage = Salvage(sums=(mine, others), remaining=remaining, num_spared=4)
    assert losses_of(plan, slot, salvage, 8) == {5: 0b1111}


def state_with(plan: Plan, policy: Policy, num: int, *, unit_bytes: int = 10) -> ControllerState:
    config = make_config().model_copy(
        update={
            "policy": policy,
            "plans": {num: plan},
            "unit_bytes": dict.fromkeys(UNITS, unit_bytes),
            "state_copies": 3,
        }
    )
    return initial_state(config)


@pytest.mark.parametrize(
    ("redundancy", "unit_bytes", "followed"),
    [
        ("off", 10, False),
        ("state", 10**12, True),
        ("salvage", 10**12, True),
        ("auto", 10, True),
        ("auto", 10**12, False),  # hours on a link of 1 Gb/s, in each step
    ],
)
def test_auto_follows_where_that_loses_less_than_it_costs(redundancy: str, unit_bytes: int, followed: bool) -> None:
    plan = make_plan(3, 1)
    slots, _ = shape(3, 1, VMS[:3])
    state = state_with(plan, Policy(redundancy=redundancy), 3, unit_bytes=unit_bytes)  # type: ignore[arg-type]
    found = redundancy_of(state, plan, slots, {}, 0.0)
    assert any(follow.units for follow in found.follows) == followed


@pytest.mark.parametrize(("redundancy", "followed"), [("auto", False), ("state", True)])
def test_auto_follows_only_where_devices_have_the_room(redundancy: str, followed: bool) -> None:
    plan = make_plan(3, 1)
    expected = plan.expected.model_copy(update={"followed_memory_bytes": 1001})
    slots, _ = shape(3, 1, VMS[:3])
    state = state_with(plan, Policy(redundancy=redundancy), 3, unit_bytes=10)  # type: ignore[arg-type]
    for room, fits in ((1000, followed), (1001, True)):
        there = state.model_copy(update={"config": state.config.model_copy(update={"device_memory_bytes": room})})
        found = redundancy_of(there, plan.model_copy(update={"expected": expected}), slots, {}, 0.0)
        assert any(follow.units for follow in found.follows) == fits
        assert ("do not fit" in found.why) == (not fits)


def test_the_rarer_checkpoints_are_the_more_a_follower_saves() -> None:
    plan = make_plan(3, 1)
    slots, _ = shape(3, 1, VMS[:3])
    followed = []
    for every in (1, 100_000):
        policy = Policy(checkpoint_every_steps=every)
        state = state_with(plan, policy, 3, unit_bytes=10**8)  # a step's gradients take as long as a tenth of it
        followed.append(any(follow.units for follow in redundancy_of(state, plan, slots, {}, 0.0).follows))
    assert followed == [False, True]


def test_sums_are_copied_in_long_steps_alone() -> None:
    slots, _ = shape(2, 2, VMS[:4])
    short = make_plan(2, 2, num_micro_batches=64)
    hours = short.expected.model_copy(update={"mini_batch_s": 3600.0})
    long = short.model_copy(update={"expected": hours})
    policy = Policy(redundancy="auto")
    of_short = redundancy_of(state_with(short, policy, 4, unit_bytes=10**9), short, slots, {}, 0.0)
    of_long = redundancy_of(state_with(long, policy, 4, unit_bytes=10**9), long, slots, {}, 0.0)
    assert of_short.copy_sums_every == 0
    assert 1 <= of_long.copy_sums_every <= 16
    assert len(of_long.follows) == 4


def test_followers_make_fatal_losses_rarer() -> None:
    plan = make_plan(6, 1)
    slots, needed = shape(6, 1, VMS)
    state = state_with(plan, Policy(), 6)
    follows = follows_of(6, 1, VMS)
    without = mean_s_to_fatal_loss(state, 0.0, holders_of(slots, needed, ()))
    followed = mean_s_to_fatal_loss(state, 0.0, holders_of(slots, needed, follows))
    assert followed > 2 * without


def test_a_follower_counts_once_it_has_a_decided_steps_gradients() -> None:
    script = formed(3, plans={2: make_plan(2, 1), 3: make_plan(3, 1)}, expected_nodes=3)
    follows = {follow.worker: follow for follow in script.state.reshape.follows}
    lost = script.members[0]
    mine, keeper = script.state.member_units[lost], follows[lost].follower

    script.prepared()  # no follower has caught up
    assert not mine <= script.state.workers[keeper].holds
    for worker in script.busy:
        answer = script.prepared_answer(worker).model_copy(update={"followed": True})
        script.tell(WorkerAnswered(worker=worker, answer=answer))
    assert mine <= script.state.workers[keeper].holds
    version = script.state.version
    script.tell(WorkerLost(worker=lost, cause="killed"))
    script.aborted()
    assert script.state.version == version
    assert {source.kind for source in script.state.reshape.sources} <= {"keep", "peer"}


def test_a_follower_that_misses_a_step_does_not_count() -> None:
    script = formed(2, plans={2: make_plan(2, 1)}, expected_nodes=2)
    for followed in (True, False):
        for worker in script.busy:
            answer = script.prepared_answer(worker).model_copy(update={"followed": followed})
            script.tell(WorkerAnswered(worker=worker, answer=answer))
        held = {unit for worker in script.state.workers.values() for unit in worker.holds}
        twice = sum(len(entry.holds) for entry in script.state.workers.values()) > len(held) + 1
        assert twice == followed


def test_auto_follows_only_while_that_pays() -> None:
    script = Script(
        plans={3: make_plan(3, 1)},
        expected_nodes=3,
        unit_bytes=dict.fromkeys(UNITS, 3_000_000),
        state_copies=3,
        num_steps=100,
        policy=Policy(checkpoint_every_steps=3, redundancy="auto"),
    )

    def followed() -> bool:
        return any(follow.units for follow in script.state.reshape.follows)

    def train_through_a_save(durable_s: float) -> None:
        while script.state.saving.pending is None:
            script.prepared()
        script.written(script.state.saving.pending.version)
        script.now_s += durable_s
        script.tell(ManifestWritten(version=script.state.saving.sealing[0].version))
        generation = script.state.generation
        script.prepared()
        if script.state.generation > generation:
            script.reshaped()

    script.ready("n1", "n2", "n3")
    script.reshaped()
    assert not followed()
    version = script.state.version
    train_through_a_save(durable_s=60.0)
    assert followed()
    assert script.state.version > version  # at a boundary: no step was given up
    generation = script.state.generation
    train_through_a_save(durable_s=60.0)
    assert (followed(), script.state.generation) == (True, generation)
    saves = script.state.saving.save_times.model_copy(update={"vm_s": 1e9})  # no VM was lost for this long
    script.state = changed(script.state, save_times=saves)
    train_through_a_save(durable_s=60.0)
    assert not followed()


def small_job(**fields: object) -> ControllerConfig:
    """Return a job with one replica at most and almost no losses, whose gradients take 0.6 ms to send."""
    per_unit = 3 * 10_000
    return make_config(
        plans={2: make_plan(2, 1), 3: make_plan(3, 1)},
        expected_nodes=3,
        unit_bytes=dict.fromkeys(UNITS, per_unit),
        state_copies=3,
        link_bytes_per_s=5e7,
        expected_losses=ExpectedLosses(per_vm_h=1e-4, weight_vm_h=1e6),
        policy=make_config().policy.model_copy(update={"redundancy": "auto", "checkpoint_every_steps": 5}),
        **fields,
    )


@pytest.mark.parametrize(
    ("larger", "shorter", "kept"),
    [(1, 1, True), (4, 1, False), (1, 200, False)],
    ids=["small", "gradients of 2 ms", "a tenth of a step"],
)
def test_followers_of_a_small_state_cost_nothing_and_are_always_kept(larger: int, shorter: int, kept: bool) -> None:
    plan, config = make_plan(3, 1), small_job()
    expected = plan.expected.model_copy(update={"mini_batch_s": plan.expected.mini_batch_s / shorter})
    sizes = {unit: size * larger for unit, size in config.unit_bytes.items()}
    state = initial_state(config.model_copy(update={"unit_bytes": sizes}))
    slots, _ = shape(3, 1, VMS[:3])
    found = redundancy_of(state, plan.model_copy(update={"expected": expected}), slots, {}, 0.0)
    assert any(follow.units for follow in found.follows) == kept
    assert (found.worth < 0) == (not kept), "no shape is formed anew for what costs and saves next to nothing"


@pytest.mark.parametrize("always_kept", [True, False])
def test_a_small_job_of_one_replica_goes_back_to_no_checkpoint(
    always_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five VMs are lost one after the other, each once the new shape's followers are in step.

    The state is so small that its transfers say nothing about the link.
    """
    monkeypatch.setattr(followers, "FREE_S", followers.FREE_S if always_kept else -1.0)
    versions, lost = [0], list[str]()

    def lose(cluster: SimulatedCluster, _before: ControllerState, _event: object, decision: Decision) -> None:
        state = decision.state
        versions.append(state.version)
        holders = [sum(unit in worker.holds for worker in state.workers.values()) for unit in UNITS]
        is_next = len(lost) < 5 and state.version >= 4 * len(lost) + 3
        if state.phase is Phase.TRAINING and is_next and (min(holders) > 1 or not always_kept):
            lost.append(state.slots[0].worker)
            cluster.at(0.1, partial(cluster.kill, lost[-1]))

    cluster = SimulatedCluster(0, small_job(num_steps=40), Faults(comeback=1.0), observers=(lose, *INVARIANTS))
    assert cluster.run(3, limit_events=20_000).outcome == "finished"
    assert len(lost) == 5
    assert (versions == sorted(versions)) == always_kept

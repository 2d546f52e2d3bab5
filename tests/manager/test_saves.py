"""When the next checkpoint comes: by the rate of fatal losses, the cost of a save, and notices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from controller_script import Script, changed, formed
from simulated_job import PLANS, UNITS, make_config

from manager.controller.shape.risk import losses_per_vm_s, mean_s_to_fatal_loss
from manager.controller.state.actions import (
    Action,
    MarkBest,
    NoteNextSave,
    SendCommit,
    SendReshape,
    SendStep,
    WriteManifest,
)
from manager.controller.state.config import ExpectedLosses
from manager.controller.state.events import (
    CheckpointFailed,
    ManagerResumed,
    ManifestWritten,
    NodeAppeared,
    NodeFacts,
    NodesGranted,
    NoticeGiven,
    UnitsWritten,
    WorkerLost,
)
from manager.controller.state.state import ControllerState, Phase
from manager.controller.steps.save_timing import cheapest_interval, insurance_save, next_save
from morph.contract.evaluation import BestRule, EvaluationSize
from morph.contract.messages import Evaluation, MicroBatchLoss, UnitWritten

H = 3600.0
LOSSES = ExpectedLosses(
    per_vm_h=0.2, weight_vm_h=10, bulk_share=0.4, bulk_fraction=0.25, cluster_h=1000, allocation_s=100, preparation_s=50
)


def training(size: int, **policy: object) -> Script:
    """Return the script of a job that trains on this many workers, and saves as often as costs least."""
    given = make_config().policy.model_copy(update={"checkpoint_every_steps": None, **policy})
    plans = {count: plan for count, plan in PLANS.items() if count <= size}
    script = formed(size, plans=plans, num_steps=10**6, expected_nodes=size, policy=given, expected_losses=LOSSES)
    assert script.state.phase is Phase.TRAINING
    return script


def seen(state: ControllerState, **times: object) -> ControllerState:
    """Set these measured times, and work out what is due by them."""
    state = changed(state, save_times=state.saving.save_times.model_copy(update=times))
    saves = state.saving.save_times.model_copy(update={"insurance": insurance_save(state, 0.0)})
    return changed(state, save_times=saves)


def step_to(script: Script, time_s: float) -> list[SendStep]:
    """Decide steps, each a second after the other, until a time; return the orders of the last one."""
    actions: list[SendStep] = []
    while script.now_s + 1 <= time_s:
        script.now_s += 1 - 0.1 * len(script.state.member_units)
        actions = [action for action in script.prepared() if isinstance(action, SendStep)]
    return actions


@pytest.mark.parametrize("manifests", ["in order", "two at once, the newer first"])
@pytest.mark.parametrize("num_steps_a_save", [1, 2, 5])
@pytest.mark.parametrize(
    "losses",
    [
        [9, 8, 7, 6, 5, 4, 3, 2, 1],  # each version is better than the one before
        [5, 6, 7, 8, 9, 10, 11, 12, 13],
        [5, 3, 4, 6, 2, 7, 8, 9, 9],
        [5, 4, 6, 1, 2, 3, 4, 5, 6],
    ],
)
def test_the_best_version_is_saved_however_slow_storage_is(
    losses: list[int], num_steps_a_save: int, manifests: str
) -> None:
    script = Script(num_steps=len(losses) + 1)
    script.ready("n1", "n2", "n3", "n4")
    size = EvaluationSize(every_steps=1, num_micro_batches=1, best=BestRule())
    script.state = changed(script.state, evaluation=size)
    queue: list[int] = []
    sealing: list[int] = []
    stored: set[int] = set()
    marked = 0

    def act(actions: Sequence[Action]) -> None:
        nonlocal marked
        for action in actions:
            if isinstance(action, WriteManifest):  # storage keeps the newest, the marked and the spared versions
                stored.add(action.manifest.version)
                stored.intersection_update({max(stored), marked, *action.spared})
            if isinstance(action, MarkBest) and action.best.version in stored:
                marked = action.best.version
            if isinstance(action, SendStep | SendCommit) and action.order.checkpoint_units:
                kept = [version for version in queue if version in action.order.earlier_checkpoints]
                queue[:] = [*kept, script.state.version]

    def write() -> None:
        version = queue.pop(0)
        act(script.written(version))
        sealing.append(version)
        if manifests == "in order" or len(sealing) == 2 or not queue:
            while sealing:
                act(script.tell(ManifestWritten(version=sealing.pop())))

    script.reshaped()
    while script.state.phase is Phase.TRAINING:
        version = script.state.version
        evaluation = None
        if version:
            loss = MicroBatchLoss(micro_batch=0, loss=losses[version - 1])
            evaluation = Evaluation(version=version, num_micro_batches=1, losses=(loss,))
        act([action for worker in script.busy for action in script.prepared_with(worker, evaluation=evaluation)])
        assert len(queue) <= 4
        if queue and version % num_steps_a_save == 0 and script.state.phase is Phase.TRAINING:
            write()
    act(script.committed())
    while script.state.phase is not Phase.ENDED:
        write()
    assert marked == 1 + losses.index(min(losses))
    assert marked in stored
    assert script.state.saving.earlier == ()


def test_the_expected_loss_rate_holds_until_the_run_has_its_own() -> None:
    state = training(2).state
    appeared_s = [entry.appeared_s for entry in state.workers.values()]
    assert losses_per_vm_s(state, max(appeared_s)) * H == pytest.approx(0.2, rel=1e-3)
    # in 5 h each, and one lost in 30 h before: (0.2 * 10 + 1) / (10 + 30 + 2 * 5)
    state = seen(state, num_lost=1, vm_s=30 * H)
    assert losses_per_vm_s(state, 5 * H + sum(appeared_s) / 2) * H == pytest.approx(3 / 50)


def test_without_replicas_each_loss_is_fatal() -> None:
    state = training(2).state
    now_s = max(entry.appeared_s for entry in state.workers.values())
    # losses of single VMs: two VMs at 0.12/h; losses in bulk: events at 0.08/0.25 per hour, each of which takes one of
    # two VMs with probability 1 - 0.75 ** 2
    per_h = 1 / 1000 + 2 * 0.12 + 0.32 * (1 - 0.75**2)
    assert mean_s_to_fatal_loss(state, now_s) == pytest.approx(H / per_h, rel=1e-3)


def test_with_replicas_only_losses_of_all_that_hold_a_unit_are_fatal() -> None:
    state = training(4).state  # in 2x2 there are two pairs; a unit of both stages is lost with either
    now_s = max(entry.appeared_s for entry in state.workers.values())
    policy = state.config.policy
    heal_h = (policy.rules.wait.morph_s + policy.heartbeat_timeout_s) / H
    alone = 2 * (2 * 0.12**2 * heal_h)
    bulk = 0.32 * (1 - (1 - 0.25**2) ** 2)
    assert mean_s_to_fatal_loss(state, now_s) == pytest.approx(H / (1 / 1000 + alone + bulk), rel=1e-3)
    assert mean_s_to_fatal_loss(state, now_s) > 3 * mean_s_to_fatal_loss(training(2).state, now_s)


def test_units_in_two_zones_survive_the_loss_of_one() -> None:
    state = training(4).state
    together = {slot.worker: str(slot.stage) for slot in state.slots}
    apart = {slot.worker: str(slot.replica) for slot in state.slots}

    def mttf_s(by_worker: dict[str, str]) -> float:
        workers = {
            worker: entry.model_copy(update={"facts": NodeFacts(provider="azure", zone=by_worker[worker])})
            for worker, entry in state.workers.items()
        }
        return mean_s_to_fatal_loss(state.model_copy(update={"workers": workers}), 1.0)

    one_zone = mttf_s(dict.fromkeys(together, "1"))
    assert mttf_s(together) == pytest.approx(one_zone, rel=0.05)  # each pair is lost with its zone
    assert mttf_s(apart) > 5 * one_zone


def test_the_interval_is_that_of_the_thesis_where_each_loss_is_fatal() -> None:
    """GPT-117M, table 6.2: a save takes 2.55 s; preempted each 3 h; a new VM takes 285 s: 51.7 steps of 4.6 s."""
    once = ExpectedLosses(
        per_vm_h=1 / 3, weight_vm_h=1e9, bulk_share=0, cluster_h=1e12, allocation_s=132, preparation_s=153
    )
    state = seen(training(2).state, stall_s=2.55, durable_s=20.0, step_s=4.6, allocation_s=132.0)
    config = state.config.model_copy(update={"expected_losses": once})
    alone = state.reshape.model_copy(update={"slots": state.slots[:1]})
    state = changed(state, config=config, reshape=alone, setup_s=153.0)
    interval_s, why = cheapest_interval(state, 0.0)
    assert interval_s / 4.6 == pytest.approx(51.7, abs=0.05)
    assert "a save stalls training for 2.55 s" in why
    assert "a loss that sends training back to its last checkpoint is expected every 3 h" in why


@pytest.mark.parametrize(
    ("times", "interval_s"),
    [
        ({"stall_s": 1e-9, "durable_s": 40.0, "step_s": 1.0}, 40.0),  # one version is under way at a time
        ({"stall_s": 1e-9, "durable_s": 1.0, "step_s": 90.0}, 90.0),
    ],
)
def test_no_save_begins_within_a_step_or_before_the_last_ends(times: dict[str, float], interval_s: float) -> None:
    assert cheapest_interval(seen(training(2).state, **times), 0.0)[0] == interval_s


@pytest.mark.parametrize("per_vm_h", [0.01, 0.2, 5.0])
@pytest.mark.parametrize("stall_s", [0.0005, 0.02, 0.5, 20.0])
def test_saves_stay_below_half_a_percent_unless_stalls_are_long(per_vm_h: float, stall_s: float) -> None:
    """The share is at most sqrt(stall / 2 (MTTF + R)): under 0.5 % while a stall is below 1/20,000 of MTTF + R."""
    state = training(2).state
    losses = LOSSES.model_copy(update={"per_vm_h": per_vm_h, "weight_vm_h": 1e6})
    state = state.model_copy(update={"config": state.config.model_copy(update={"expected_losses": losses})})
    state = seen(state, stall_s=stall_s, durable_s=0.0, step_s=0.0, allocation_s=100.0)
    interval_s, why = cheapest_interval(changed(state, setup_s=50.0), 0.0)
    share = stall_s / interval_s
    mttf_s = mean_s_to_fatal_loss(state, 0.0)
    assert share == pytest.approx(math.sqrt(stall_s / 2 / (mttf_s + 150.0)))
    assert (share < 0.005) == (stall_s < (mttf_s + 150.0) / 20_000)
    assert f"({share:.2%} of the time)" in why


def test_a_save_begins_at_the_boundary_nearest_to_its_due_time() -> None:
    script = training(2)
    script.state = seen(script.state, stall_s=0.01, durable_s=2.0, step_s=1.0)
    save = next_save(script.state, script.now_s)
    assert save.kind == "insurance"
    first_s = script.state.saving.save_times.since_s
    assert first_s is not None
    assert save.due_s == first_s + save.interval_s
    assert not any(order.order.checkpoint_units for order in step_to(script, save.due_s - 0.6))
    orders = step_to(script, save.due_s + 0.6)
    assert sorted(unit for order in orders for unit in order.order.checkpoint_units) == sorted(UNITS)
    assert abs(script.now_s - save.due_s) <= 0.5 + 1e-9
    assert "one every" in script.sentence
    version = script.state.version
    script.written(version)
    manifest = script.state.saving.sealing[0]
    assert (manifest.kind, manifest.shape, manifest.version) == ("insurance", "2x1", version)
    (note,) = [act for act in script.tell(ManifestWritten(version=version)) if isinstance(act, NoteNextSave)]
    assert note.next_save.due_s > script.now_s


def test_what_a_save_took_is_measured() -> None:
    script = training(2, checkpoint_every_steps=2)
    script.prepared()
    begun_s = script.now_s + 0.2
    script.prepared()
    pending = script.state.saving.pending
    assert pending is not None
    for worker in ("n1", "n2"):
        units = [unit for unit, writer in pending.writers.items() if writer == worker]
        stall_s = 0.5 if worker == "n1" else 0.1
        written = tuple(
            UnitWritten(worker=worker, version=2, unit=unit, file="f", size_bytes=1, sha256="0" * 64, stall_s=stall_s)
            for unit in units
        )
        script.tell(UnitsWritten(worker=worker, written=written))
    num_first = sum(writer == "n1" for writer in pending.writers.values())
    assert script.state.saving.save_times.stall_s == pytest.approx(0.5 * num_first)
    assert script.state.saving.sealing[0].saved_s == pytest.approx(begun_s)
    script.now_s = begun_s + 7.0 - 0.1
    script.tell(ManifestWritten(version=2))
    assert script.state.saving.save_times.durable_s == pytest.approx(7.0)


def test_a_users_interval_holds_unless_insurance_comes_sooner() -> None:
    state = seen(training(2, checkpoint_every_steps=10).state, stall_s=1e-6, durable_s=3.0, step_s=1.0)
    save = next_save(state, 0.0)
    assert (save.kind, save.why) == ("periodic", "every 10 steps, as the cluster file says")
    both = state.config.policy.rules.checkpoints.model_copy(update={"insurance": True})
    rules = state.config.policy.rules.model_copy(update={"checkpoints": both})
    policy = state.config.policy.model_copy(update={"rules": rules})
    state = state.model_copy(update={"config": state.config.model_copy(update={"policy": policy})})
    sooner = next_save(state, 0.0)
    assert sooner.kind == "insurance"
    costly = next_save(seen(state, stall_s=60.0), 0.0)
    assert costly.kind == "periodic"


def test_failing_storage_is_reported_once_and_retried_less_often() -> None:
    script = training(2)
    script.state = seen(script.state, stall_s=1e-6, durable_s=1.0, step_s=1.0)
    tried_s: list[float] = []
    codes: list[str] = []
    while len(tried_s) < 4:
        step_to(script, script.now_s + 1)
        if script.state.saving.pending is not None:
            tried_s.append(script.now_s)
            script.tell(CheckpointFailed(worker="n1", error="disk full"))
            codes.append(script.code)
            assert script.state.saving.pending is None
    waits_s = [after - before for before, after in itertools.pairwise(tried_s)]
    assert waits_s == pytest.approx([10, 20, 40], abs=1.5)
    assert codes == ["checkpoint_abandoned", "units_noted", "units_noted", "units_noted"]
    while script.state.saving.pending is None:
        step_to(script, script.now_s + 1)
    script.saved(script.state.saving.pending.version)
    assert script.sentence.endswith("is complete, after 4 that storage refused")
    assert script.state.saving.save_times.num_refused == 0


def test_a_save_that_lost_its_writer_does_not_postpone_the_next() -> None:
    script = training(4)
    script.state = seen(script.state, stall_s=0.01, durable_s=1.0, step_s=1.0)
    save = script.state.saving.save_times.insurance
    step_to(script, save.due_s + 0.6)
    assert script.state.saving.pending is not None
    since_s = script.state.saving.save_times.since_s
    assert since_s is not None
    assert since_s > save.due_s - 1
    lost = next(iter(script.state.saving.pending.debtors))
    script.tell(WorkerLost(worker=lost, cause="killed"))
    script.aborted()
    script.reshaped()
    assert script.state.phase is Phase.TRAINING
    again = script.state.saving.save_times.insurance
    assert again.due_s < script.now_s  # it is due as if it had never begun


def test_a_lost_vm_counts_once_and_its_life_is_noted() -> None:
    script = training(4)
    born_s = script.state.workers["n4"].appeared_s
    script.tell(WorkerLost(worker="n4", cause="killed"), at_s=born_s + 50)
    assert (script.state.saving.save_times.num_lost, script.state.saving.save_times.vm_s) == (1, pytest.approx(50))


def test_how_long_a_vm_took_to_come_is_measured() -> None:
    script = Script(target_nodes=2, expected_nodes=2)
    script.ready("own")
    ((name, request),) = script.state.provisioning.requests.items()
    script.tell(NodesGranted(request=name, nodes=("new",)))
    script.tell(NodeAppeared(node="new", request=name), at_s=request.requested_s + 30)
    assert script.state.saving.save_times.allocation_s == pytest.approx(30)


@pytest.mark.parametrize(("lead_s", "saved"), [(20.0, True), (3.0, False)])
def test_a_save_for_a_notice_begins_only_if_it_can_complete(lead_s: float, saved: bool) -> None:
    script = training(2)
    script.state = seen(script.state, stall_s=1.0, durable_s=8.0, step_s=1.0, since_s=script.now_s - 100)
    script.tell(NoticeGiven(worker="n2", lead_s=lead_s, notice="taken"))
    orders = [action for action in script.prepared() if isinstance(action, SendStep)]
    assert any(order.order.checkpoint_units for order in orders) == saved


def test_a_notice_causes_few_saves_the_last_as_late_as_possible() -> None:
    script = training(2)
    script.state = seen(script.state, stall_s=0.1, durable_s=2.0, step_s=1.0, since_s=script.now_s - 500)
    taken_s = script.now_s + 0.1 + 60
    script.tell(NoticeGiven(worker="n2", lead_s=60, notice="taken"))
    begun_s: list[float] = []
    while script.now_s < taken_s - 1:
        if any(order.order.checkpoint_units for order in step_to(script, script.now_s + 1)):
            begun_s.append(script.now_s)
            assert script.state.saving.pending.kind == "emergency"
            script.saved(script.state.saving.pending.version)
            script.state = seen(script.state, durable_s=2.0)
    left_s = [taken_s - at_s for at_s in begun_s]
    assert 3 <= len(begun_s) <= 7
    assert left_s[0] > 57
    assert 2 <= left_s[-1] < 5


def test_a_step_that_outlasts_a_notice_is_dissolved_for_a_change() -> None:
    given = make_config().policy.model_copy(update={"checkpoint_every_steps": None})
    script = formed(3, plans={count: PLANS[count] for count in (2, 3)}, num_steps=100, expected_nodes=3, policy=given)
    script.state = seen(script.state, step_s=60.0)
    script.tell(NoticeGiven(worker="n3", lead_s=30.0, notice="taken"))
    assert script.state.phase is Phase.ABORTING
    orders = [action for action in script.aborted() if isinstance(action, SendReshape)]
    assert "n3" in {action.worker for action in orders}  # the worker gives others what it holds
    assert orders[0].order.plan.shape == "2x1"
    assert {source.kind for source in orders[0].order.sources} == {"keep", "peer"}


def test_a_step_that_ends_in_time_is_not_dissolved() -> None:
    for lead_s, step_s in ((30.0, 5.0), (0.5, 60.0)):
        given = make_config().policy.model_copy(update={"checkpoint_every_steps": None})
        script = formed(
            3, plans={count: PLANS[count] for count in (2, 3)}, num_steps=100, expected_nodes=3, policy=given
        )
        script.state = seen(script.state, step_s=step_s)
        script.tell(NoticeGiven(worker="n3", lead_s=lead_s, notice="taken"))
        assert script.state.phase is Phase.TRAINING


def test_a_notice_for_a_departed_vm_dissolves_no_step() -> None:
    script = training(3)
    assert script.members == ["n1", "n2", "n3"]
    script.tell(NoticeGiven(worker="n3", lead_s=5.0, notice="taken"))
    script.prepared()
    script.reshaped()
    assert script.members == ["n1", "n2"]
    script.state = seen(script.state, stall_s=1.0, durable_s=3.0, step_s=6.0)
    script.tell(NoticeGiven(worker="n2", lead_s=30.0, notice="taken"))
    assert script.state.phase is Phase.TRAINING


def test_a_doomed_vms_only_copy_is_saved_within_a_long_step() -> None:
    script = training(2)
    script.prepared()
    script.state = seen(script.state, stall_s=1.0, durable_s=8.0, step_s=300.0)
    script.tell(NoticeGiven(worker="n2", lead_s=30.0, notice="taken"))
    commits = [action.order for action in script.aborted() if isinstance(action, SendCommit)]
    assert sorted(unit for order in commits for unit in order.checkpoint_units) == sorted(UNITS)
    assert all(order.held and order.version == 1 for order in commits)
    script.committed()
    script.saved(1)
    assert (script.state.saving.checkpoint.version, script.state.saving.checkpoint.kind) == (1, "emergency")


def test_requests_are_repeated_after_what_is_lost_is_given_back() -> None:
    script = Script(target_nodes=3, expected_nodes=2)
    script.ready("n1", "n2")
    assert script.state.provisioning.requests
    actions = script.tell(ManagerResumed(living=("n1",)))
    kinds = [action.kind for action in actions if action.kind in ("release_nodes", "request_nodes")]
    assert kinds[0] == "release_nodes"
    assert "request_nodes" in kinds


def test_nothing_is_due_while_nothing_trains() -> None:
    assert next_save(Script().state, 0.0) is None
    assert math.isfinite(mean_s_to_fatal_loss(Script().state, 0.0))

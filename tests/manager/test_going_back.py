"""Steps with bad numbers: what the controller orders, and when it ends the run."""

from __future__ import annotations

import math

import pytest
from controller_script import Script, formed, receivers
from simulated_job import FILES, RULES

from manager.controller.state.actions import Action, FindCheckpoint, Finish, NoteBadStep, SendReshape, SendStep
from manager.controller.state.events import CheckpointFound, CheckpointNotFound, ManagerResumed, WorkerLost
from manager.controller.state.state import Phase
from morph.contract.checkpoint import Manifest
from morph.contract.cluster import Policy
from morph.contract.decided import Decided, LossScale, LossTrend
from morph.contract.messages import MicroBatchLoss, NamedSamples
from morph.contract.rules import LossRules


def script_with(**losses: object) -> Script:
    """Return a script with two workers that are about to train, and a checkpoint every three steps."""
    rules = RULES.model_copy(update={"losses": LossRules.model_validate({"back_steps": 4, **losses})})
    policy = Policy(checkpoint_every_steps=3, order_timeout_s=20.0, rules=rules)
    return formed(2, num_steps=20, expected_nodes=2, policy=policy)


def bad(script: Script) -> tuple[Action, ...]:
    """Let all members prepare the step, in which a loss is not a number."""
    first, *others = script.busy
    script.prepared_with(first, losses=(MicroBatchLoss(micro_batch=3, loss=math.nan),))
    return script.prepared(*others)


def train(script: Script, until: int) -> None:
    while script.state.version < until:
        script.prepared()
        if script.state.saving.pending is not None:
            script.saved(script.state.saving.pending.version)


def gone_back() -> tuple[Script, tuple[Action, ...]]:
    """Return a script in which step 7 was bad; version 7 is the newest checkpoint, and version 4 the one before."""
    script = script_with(when_bad="go_back")
    train(script, 7)
    assert script.state.saving.newest == (3, 4, 7)
    return script, bad(script)


def test_a_bad_step_goes_back_over_steps_that_are_run_again() -> None:
    script, actions = gone_back()
    why = "step 7 is bad: the loss of micro-batch 3 is not finite; it and the 3 steps before it are given up"
    note = NoteBadStep(step=7, sentence=f"{why}: version 8 has the state of version 4")
    assert actions == (note, FindCheckpoint(doubted=7, at_most=4))
    assert script.tell(ManagerResumed(living=("n1", "n2"))) == (FindCheckpoint(doubted=7, at_most=4),)
    trend = LossTrend(num_bad=0)
    actions = script.tell(CheckpointFound(manifest=Manifest(fingerprint="f", version=3, units=FILES, losses=trend)))
    assert receivers(actions, SendReshape) == ["n1", "n2"]
    assert script.state.version == 3
    script.reshaped()
    script.prepared()
    assert (script.state.version, script.state.phase) == (4, Phase.RESHAPING)
    script.reshaped()
    assert (script.state.version, script.state.phase) == (8, Phase.RESHAPING)
    assert script.state.decided == Decided(version=8, skipped=True, state_of=4)
    assert script.state.losses == LossTrend(num_bad=1)
    assert {source.kind for source in script.state.reshape.sources} == {"keep"}
    orders = {action.worker: action.order for action in script.reshaped() if isinstance(action, SendStep)}
    assert [orders[worker].samples_of for worker in script.members] == [7, None]
    assert all(order.step == 8 and order.bears_non_finite for order in orders.values())
    script.prepared_with(script.members[0], named=NamedSamples(step=7, samples=(4, 2)))
    actions = script.prepared()
    assert all(one.order.samples_of is None for one in actions if isinstance(one, SendStep)), "they are named"


def test_without_an_earlier_checkpoint_a_bad_step_restarts_the_run() -> None:
    script, _ = gone_back()
    actions = script.tell(CheckpointNotFound(error="there is none up to version 4", damaged=False, none=True))
    assert receivers(actions, SendReshape) == ["n1", "n2"]
    assert script.state.version == 0
    script.reshaped()
    train(script, 4)
    script.reshaped()
    assert script.state.version == 8
    script.tell(WorkerLost(worker="n2", cause="killed"))
    script.aborted()
    script.ready("n3")
    assert script.state.version == script.state.saving.checkpoint.version == 3
    script.reshaped()
    script.prepared()
    script.reshaped()
    assert (script.state.version, script.state.decided) == (8, Decided(version=8, skipped=True, state_of=4))


def test_a_version_to_go_back_to_is_saved_during_another_save() -> None:
    script = script_with(when_bad="go_back")
    versions = []
    for _ in range(9):  # storage is slow: no checkpoint is complete
        script.prepared()
        versions.append(tuple(one.version for one in script.state.saving.under_way))
    assert versions[2:5] == [(3,), (4,), (4,)]
    assert versions[-1] == (4,), "a second one begins once the first is complete"
    script.saved(4)
    assert script.state.saving.newest == (4,)
    train(script, 13)
    assert 12 in script.state.saving.newest


def test_losses_that_hardly_differ_make_no_slight_rise_bad() -> None:
    rules, trend = LossRules(deviations=5.0, window=3), LossTrend()
    for version in range(1, 6):
        trend = trend.after(version, {0: 2.0}, {}, rules, bad=False)
    assert trend.variance == 0.0
    assert trend.why_bad({0: 2.0001}, {}, rules) == ""
    assert trend.why_bad({0: 2.02}, {}, rules).startswith("its loss, 2.02, is more than 5 deviations (0.002)")


def test_a_bad_step_at_its_milestone_is_left_without_storage() -> None:
    script = script_with(when_bad="go_back")
    train(script, 4)
    actions = bad(script)
    assert not any(isinstance(action, FindCheckpoint) for action in actions)
    assert script.state.version == 4
    script.reshaped()
    assert (script.state.version, script.state.decided) == (5, Decided(version=5, skipped=True, state_of=4))


@pytest.mark.parametrize(("when_bad", "num_skipped"), [("stop", 0), ("skip", 2)])
def test_too_many_bad_steps_end_the_run_saved(when_bad: str, num_skipped: int) -> None:
    script = script_with(when_bad=when_bad, most=2, deviations=5.0)
    train(script, 4)
    for step in range(4, 4 + num_skipped):
        bad(script)
        assert script.state.decided == Decided(version=step + 1, skipped=True, bad_loss=True)
    bad(script)
    version = 4 + num_skipped
    assert (script.state.phase, script.state.version) == (Phase.RESHAPING, version)
    script.reshaped()
    script.committed()
    (finish,) = [action for action in script.saved(version) if isinstance(action, Finish)]
    assert finish.outcome == "failed"
    assert finish.sentence.startswith(f"step {version} is bad: the loss of micro-batch 3 is not finite")
    assert finish.sentence.endswith(f"version {version} is saved")
    assert ("(rules.losses.most)" in finish.sentence) is (when_bad == "skip")


def test_a_leaping_loss_is_bad_and_changes_neither_mean_nor_scale() -> None:
    rules, trend = LossRules(when_bad="skip", deviations=3.0, window=4), LossTrend()
    for version, loss in enumerate((2.0, 1.8, 1.9, 1.7, 1.75), 1):
        assert trend.why_bad({0: loss, 1: loss}, {}, rules) == ""
        trend = trend.after(version, {0: loss, 1: loss}, {}, rules, bad=False)
    assert trend.mean == pytest.approx(1.82, abs=0.03)
    assert trend.why_bad({0: 1.8, 1: 9.0}, {}, rules).startswith("its loss, 5.4, is more than 3 deviations")
    assert trend.why_bad({0: 8.0, 1: 10.0}, {0: 4.0, 1: 6.0}, rules) == "", "a total over a weight"
    assert trend.after(6, {0: 1e300}, {}, rules, bad=True) == trend.model_copy(update={"num_bad": 1})
    assert trend.after(100, {0: 1e300}, {}, rules, bad=True).num_bad == 0
    huge = LossTrend().after(1, {0: 1e300}, {}, rules, bad=False)
    assert LossTrend.model_validate_json(huge.model_dump_json()) == huge
    scale = LossScale(exponent=6, growth_steps=3)
    assert Decided(version=7, skipped=True, bad_loss=True).next_scale(scale) is scale

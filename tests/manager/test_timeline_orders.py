"""Which schedule a run is planned with, and which of its steps is recorded."""

from __future__ import annotations

import pytest
from controller_script import Script

from manager.controller.state.actions import SendStep
from manager.run.preparation import constant_trace, controller_config
from morph.contract.cluster import LocalVms, Policy
from morph.contract.plan import Schedule
from simulator import synthetic_profile

PROFILE = synthetic_profile(num_sections=4, batch_size=16)
VMS = LocalVms(num_vms=4, memory_bytes=10**12)


@pytest.mark.parametrize("schedule", ["varuna", "gpipe", "1f1b"])
def test_every_plan_of_a_run_has_the_schedule_asked_for(schedule: Schedule) -> None:
    config = controller_config(PROFILE, VMS, Policy(), constant_trace(VMS), 10, schedule=schedule)
    assert {plan.schedule for plan in config.plans.values()} == {schedule}
    assert config.timeline_step is None


def test_the_step_to_record_reaches_the_controller() -> None:
    config = controller_config(PROFILE, VMS, Policy(), constant_trace(VMS), 10, timeline_step=7)
    assert config.timeline_step == 7


def test_only_the_step_asked_for_is_recorded_in_each_of_its_attempts() -> None:
    script = Script(timeline_step=1)
    script.ready("n1", "n2", "n3", "n4")
    recorded = []
    actions = script.reshaped()
    for overflowed in (False, True, False, False):
        orders = [action.order for action in actions if isinstance(action, SendStep)]
        assert len(orders) == 4
        recorded += [(order.step, order.attempt) for order in orders if order.record_timeline]
        actions = script.prepared(overflowed=overflowed)
    assert recorded == [(1, 0)] * 4 + [(1, 1)] * 4

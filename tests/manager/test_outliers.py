"""Slow workers: detected, left out at a boundary, probed, and taken back."""

from __future__ import annotations

import random
import statistics

import pytest
from controller_script import Script, formed, receivers
from simulated_job import PLANS, RULES, make_plan, make_unequal

from manager.controller.fail_stutter import Expected, error_of_median, judge, usual
from manager.controller.state.actions import EndWorker, ProbeWorker, SendReshape, SendStep
from manager.controller.state.events import ComputeTimesSeen, WorkerLost, WorkerProbed, WorkerTimes
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import Phase
from morph.contract.rules import StutterRules

STUTTER = StutterRules()
SLOW = 1.3


def test_replicas_that_only_differ_by_chance_are_never_slow() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        medians_s = {f"n{number}": draw.gauss(1.0, 0.03) for number in range(draw.randrange(3, 9))}
        assert not any(judgement.slow for judgement in judge(medians_s, None, STUTTER).values())


def test_of_two_replicas_the_slower_one_is_slow() -> None:
    judged = judge({"a": 1.0, "b": SLOW}, None, STUTTER)
    assert (judged["a"].slow, judged["b"].slow) == (False, True)
    assert judged["b"].ratio == pytest.approx(SLOW)


def test_a_single_replica_is_judged_only_with_a_profile() -> None:
    assert judge({"a": SLOW}, Expected(1.0, 0.0), STUTTER)["a"].slow
    assert not judge({"a": 1.1}, Expected(1.0, 0.0), STUTTER)["a"].slow
    assert judge({"a": SLOW}, None, STUTTER) == {}


def test_with_one_or_two_workers_neither_worker_nor_profile_is_suspected() -> None:
    assert usual([SLOW]) is None
    assert usual([1.0, SLOW]) is None


def test_workers_that_differ_from_the_profile_unequally_are_not_suspected() -> None:
    even, uneven = usual([1.0, 1.02, SLOW]), usual([1.0, 1.15, 1.15 * SLOW])
    assert even is not None and uneven is not None  # noqa: PT018
    assert judge({"a": SLOW}, even.expects(1.0), STUTTER)["a"].slow
    assert not judge({"a": 1.15 * SLOW}, uneven.expects(1.0), STUTTER)["a"].slow


def test_a_window_that_spreads_proves_less() -> None:
    medians_s = {"a": 1.0, "b": SLOW}
    assert judge(medians_s, None, STUTTER, {"a": 0.04, "b": 0.04})["b"].slow
    assert not judge(medians_s, None, STUTTER, {"a": 0.08, "b": 0.08})["b"].slow
    assert not judge({"b": SLOW}, Expected(1.0, 0.0), STUTTER, {"b": 0.08})["b"].slow


def test_random_differences_on_shared_cores_are_not_stutter() -> None:
    draw = random.Random(2)
    num_slow = 0
    for _ in range(2000):
        windows = {worker: [draw.lognormvariate(0, 0.4) for _ in range(STUTTER.samples)] for worker in "ab"}
        errors_s = {worker: error_of_median(samples_s) for worker, samples_s in windows.items()}
        medians_s = {worker: statistics.median(samples_s) for worker, samples_s in windows.items()}
        num_slow += any(judgement.slow for judgement in judge(medians_s, None, STUTTER, errors_s).values())
    assert (num_slow / 2000) ** STUTTER.windows < 1e-5


def trained(**fields: object) -> Script:
    """Return a script in which six workers have trained for a while, in three stages of two replicas."""
    script = formed(6, expected_nodes=6, num_steps=1000, **fields)
    warmed_up(script)
    return script


def warmed_up(script: Script) -> None:
    """Report as many windows as a worker with fewer than three peers needs before it is judged."""
    for _ in range(RULES.stutter.windows):
        times(script, {})


def times(script: Script, slow: dict[str, float], count: int = 4) -> None:
    """Let every member report compute times of ``count`` micro-batches."""
    reports = tuple(
        WorkerTimes(worker=worker, generation=script.state.generation, compute_s=(2.0 * slow.get(worker, 1.0),) * count)
        for worker in script.members
    )
    assert script.tell(ComputeTimesSeen(times=reports)) == ()


def test_a_member_slow_for_some_windows_is_left_out_at_the_boundary() -> None:
    script = trained()
    for _ in range(RULES.stutter.windows - 1):
        times(script, {"n3": 2.0})
    assert script.state.workers["n3"].node is NodeState.READY
    times(script, {"n3": 2.0})
    assert (script.state.workers["n3"].node, script.code) == (NodeState.SUSPECT, "worker_slow")
    actions = script.prepared()
    assert "n3" not in {slot.worker for slot in script.state.slots}
    assert receivers(actions, SendReshape)
    assert script.state.version == 1


def test_fewer_micro_batches_than_a_window_are_not_judged() -> None:
    script = trained()
    before = script.state.workers["n3"].pace.streak
    times(script, {"n3": 5.0}, count=3)
    assert script.state.workers["n3"].pace.streak == before
    times(script, {"n3": 5.0}, count=1)
    assert script.state.workers["n3"].pace.streak == 1


def test_times_of_an_older_generation_and_of_strangers_are_ignored() -> None:
    script = trained()
    late = tuple(
        WorkerTimes(worker=worker, generation=script.state.generation - 1, compute_s=(9.0,) * 8)
        for worker in [*script.members, "stranger"]
    )
    script.tell(ComputeTimesSeen(times=late))
    assert all(not entry.pace.samples_s for entry in script.state.workers.values())


def test_a_slow_member_stays_where_leaving_it_out_would_be_slower_still() -> None:
    script = formed(4, plans={2: PLANS[2], 4: PLANS[4]}, num_steps=1000)
    warmed_up(script)
    for _ in range(RULES.stutter.windows):
        times(script, {"n3": SLOW})
    assert script.state.workers["n3"].node is NodeState.SUSPECT
    assert receivers(script.prepared(), SendStep) == ["n1", "n2", "n3", "n4"]
    for _ in range(RULES.stutter.windows):
        times(script, {})
    assert (script.state.workers["n3"].node, script.code) == (NodeState.READY, "worker_well")


def test_a_spare_replaces_a_member_that_is_30_percent_slower() -> None:
    script = trained()
    script.ready("n7")
    for _ in range(RULES.stutter.windows):
        times(script, {"n3": SLOW})
    script.prepared()
    assert {slot.worker for slot in script.state.slots} == {"n1", "n2", "n4", "n5", "n6", "n7"}


def pipeline(depth: int, slow: dict[str, float], num_windows: int = 5, spare: bool = False) -> Script:
    """Report times for one replica of this depth, which are longer than the profile's by these factors."""
    script = Script(
        plans={depth: make_plan(depth, 1)}, expected_nodes=depth, num_steps=1000, section_compute_s=(1.0,) * 6
    )
    script.ready(*(f"n{number}" for number in range(1, depth + 1)))
    script.reshaped()
    if spare:
        script.ready(f"n{depth + 1}")
    for _ in range(num_windows):
        against_profile(script, slow)
    return script


def against_profile(script: Script, slow: dict[str, float]) -> None:
    """Let every member report a window of times that are longer than the profile's by these factors."""
    assert script.state.plan is not None
    reports = []
    for slot in script.state.slots:
        profiled_s = script.state.config.expected_compute_s(script.state.plan.stages[slot.stage])
        assert profiled_s is not None
        compute_s = (profiled_s * slow.get(slot.worker, 1.0),) * RULES.stutter.samples
        reports.append(WorkerTimes(worker=slot.worker, generation=script.state.generation, compute_s=compute_s))
    script.tell(ComputeTimesSeen(times=tuple(reports)))


def suspects(script: Script) -> list[str]:
    return [worker for worker, entry in script.state.workers.items() if entry.node is NodeState.SUSPECT]


def unequal(slow: dict[str, float], *kinds: tuple[int, int, str]) -> Script:
    """Let these kinds of pipelines, of the only plan, report times longer than the profile's by these factors."""
    plan = make_unequal(*kinds)
    script = formed(
        plan.num_workers, plans={plan.num_workers: plan}, expected_nodes=plan.num_workers, section_compute_s=(1.0,) * 6
    )
    for _ in range(5):
        against_profile(script, slow)
    return script


def test_a_stage_of_only_one_unequal_pipeline_is_compared_with_the_profile() -> None:
    script = unequal({"n5": SLOW}, (3, 1, ""), (2, 1, ""))
    assert suspects(script) == ["n5"]
    yardstick = script.state.workers["n5"].pace.yardstick
    assert (yardstick.first_section, yardstick.end_section, yardstick.healthy_s) == (3, 6, 3.0)
    assert suspects(unequal({}, (3, 1, ""), (2, 1, ""))) == []


def test_stages_of_the_same_sections_are_peers_whatever_pipeline_they_are_in() -> None:
    """Three equal workers are compared with their median, although all of them are slower than the profile."""
    slow = dict.fromkeys(("n1", "n2", "n3", "n4"), SLOW) | {"n4": SLOW * SLOW}
    same = make_unequal((1, 2, ""), (1, 2, ""))
    script = formed(4, plans={4: same}, expected_nodes=4)
    for _ in range(5):
        times(script, slow)
    assert suspects(script) == ["n4"]


def test_on_a_machine_slower_than_its_profile_no_worker_counts_as_slow() -> None:
    assert suspects(pipeline(3, {"n1": SLOW, "n2": SLOW, "n3": SLOW})) == []
    assert suspects(pipeline(3, {"n1": SLOW, "n2": SLOW * SLOW, "n3": SLOW})) == ["n2"]


@pytest.mark.parametrize("slow", [{"n1": SLOW}, {"n1": SLOW, "n2": 2 * SLOW}])
@pytest.mark.parametrize("depth", [1, 2])
def test_with_one_or_two_stages_the_profile_makes_no_worker_suspect(depth: int, slow: dict[str, float]) -> None:
    script = pipeline(depth, slow)
    assert suspects(script) == []
    assert all(entry.pace.streak == 0 for entry in script.state.workers.values())


def test_workers_are_compared_with_the_profile_once_all_were_timed() -> None:
    script = pipeline(3, {}, num_windows=0)
    for _ in range(RULES.stutter.windows):
        late = tuple(
            WorkerTimes(worker=worker, generation=script.state.generation, compute_s=(9.0,) * RULES.stutter.samples)
            for worker in script.members[1:]
        )
        script.tell(ComputeTimesSeen(times=late))
    assert suspects(script) == []


def probed_against_s(now: dict[str, float]) -> float:
    """Return the seconds with which the probe of a worker that was slow on a stage of two sections is compared."""
    script = pipeline(3, {"n2": SLOW}, spare=True)
    script.prepared()
    script.reshaped()
    assert "n2" not in script.members
    against_profile(script, now)
    for _ in range(10):
        for action in script.wake():
            if isinstance(action, ProbeWorker):
                return action.healthy_s
    raise AssertionError("it is never probed")


def test_a_probe_is_compared_with_how_the_others_match_the_profile() -> None:
    assert probed_against_s({}) == pytest.approx(2.0)
    assert probed_against_s({"n1": SLOW, "n3": SLOW, "n4": SLOW}) == pytest.approx(2.0 * SLOW)
    assert probed_against_s({"n1": 0.8, "n3": 0.8, "n4": 0.8}) == pytest.approx(2.0 * 0.8)


def left_out() -> Script:
    """Return a script in which a spare replaced a slow member."""
    script = trained()
    script.ready("n7")
    for _ in range(RULES.stutter.windows):
        times(script, {"n3": SLOW})
    script.prepared()
    script.reshaped()
    return script


def probe(script: Script) -> int:
    """Wait until the worker that was left out is probed."""
    for _ in range(10):
        for action in script.wake():
            if isinstance(action, ProbeWorker):
                assert action.worker == "n3"
                return action.probe
    raise AssertionError("it is never probed")


def test_good_probes_in_a_row_bring_a_worker_back() -> None:
    script = left_out()
    for _ in range(RULES.stutter.probe_passes):
        assert script.state.workers["n3"].node is NodeState.SUSPECT
        script.tell(WorkerProbed(worker="n3", probe=probe(script), slowdown=1.02))
    assert (script.state.workers["n3"].node, script.code) == (NodeState.READY, "worker_well")


def test_a_probe_repeats_the_slow_stage_against_its_peers_time() -> None:
    script = trained()
    stage = next(slot.stage for slot in script.state.slots if slot.worker == "n3")
    sections = script.state.plan.stages[stage].sections
    script.ready("n7")
    for _ in range(RULES.stutter.windows):
        times(script, {"n3": SLOW})
    script.prepared()
    script.reshaped()
    action = None
    while not isinstance(action, ProbeWorker):
        action = next(iter(script.wake()), None)
    assert (action.first_section, action.end_section) == (sections.start, sections.stop)
    assert action.healthy_s == 2.0
    assert action.step == script.state.version


def test_a_probe_that_did_not_run_is_repeated_and_not_counted() -> None:
    script = left_out()
    script.tell(WorkerProbed(worker="n3", probe=probe(script), slowdown=None))
    probation = script.state.workers["n3"].probation
    assert (probation.num_failed, probation.num_passed, probation.requested_s) == (0, 0, None)
    for _ in range(RULES.stutter.max_probes - 1):
        script.tell(WorkerProbed(worker="n3", probe=probe(script), slowdown=None))
    assert "n3" not in script.state.workers  # not for ever


def test_probes_that_find_it_slow_grow_rarer_and_end() -> None:
    script = left_out()
    waits_s: list[float] = []
    for _ in range(RULES.stutter.max_probes):
        number = probe(script)
        actions = script.tell(WorkerProbed(worker="n3", probe=number, slowdown=SLOW))
        entry = script.state.workers.get("n3")
        if entry is not None and entry.probation is not None:
            waits_s.append(entry.probation.due_s - script.now_s)
    assert actions == (EndWorker(worker="n3"),)
    assert "n3" not in script.state.workers
    assert waits_s == pytest.approx([1.0, 1.5])


def test_a_probe_that_is_late_or_was_never_sent_changes_nothing() -> None:
    script = left_out()
    number = probe(script)
    script.tell(WorkerProbed(worker="n3", probe=number + 1, slowdown=1.0))
    assert script.code == "ignored"
    script.tell(WorkerProbed(worker="n1", probe=number, slowdown=1.0))
    assert script.code == "ignored"


def test_giving_up_a_worker_that_serves_units_dissolves_the_generation() -> None:
    script = left_out()
    for _ in range(RULES.stutter.max_probes - 1):
        script.tell(WorkerProbed(worker="n3", probe=probe(script), slowdown=SLOW))
    number = probe(script)
    holds = script.state.workers[script.members[0]].holds
    workers = {**script.state.workers}
    workers["n3"] = workers["n3"].model_copy(update={"holds": holds})
    script.state = script.state.model_copy(update={"workers": workers})
    for worker in [slot.worker for slot in script.state.slots if slot.stage == 0]:
        script.tell(WorkerLost(worker=worker, cause="killed"))
    script.aborted()
    assert "n3" in script.busy
    script.reshaped(*[worker for worker in script.busy if worker != "n3"])
    actions = script.tell(WorkerProbed(worker="n3", probe=number, slowdown=SLOW))
    assert actions[0] == EndWorker(worker="n3")
    assert script.state.phase is Phase.RESHAPING
    assert script.state.generation == 4

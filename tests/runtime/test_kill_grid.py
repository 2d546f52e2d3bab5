"""Workers die at every phase of a step, at every stage, in every shape: no unit with a living holder is lost.

Each run has one shape, the real controller and real workers, with dropout, and plays one case after another: once the
shape is formed and its followers are in step, some members die, the others continue, and new workers replace the dead.
A case fails if a decided step is lost although every unit has a holder, if a unit without a holder is not named, if
more micro-batches are repeated than were summed since the last copy, or if the final weights differ in a bit from those
of a worker that trained alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from manager.controller.state.actions import ReasonCode, SendReshape
from manager.controller.state.config import ControllerConfig, ExpectedLosses
from manager.controller.state.events import NoticeGiven, StopRequested, WorkerLost
from manager.controller.state.state import ControllerState, Phase
from manager.engine.loop.driver import Observed, Observer
from manager.run_dir import RunDir
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.cluster import Policy
from morph.contract.faults import Fault
from morph.contract.messages import ReshapeOrder
from morph.contract.plan import Plan
from morph.contract.salvage import counted_in
from tests.crew import Crew, ManagedCrew
from tests.grids import IS_LONG
from tests.runtime.kill_cases import CHANGING, FILLING, LAST, Case, runs
from tests.system.harness import JOB, TinyJob, load_tiny_job
from tests.waiting import START_S

pytestmark = [pytest.mark.system, pytest.mark.timeout(6000 if IS_LONG else 600)]

NUM_SECTIONS, MICRO_BATCH_SIZE, NUM_MICRO_BATCHES = 6, 2, 6
CHECKPOINT_EVERY = 5
UNIT_BYTES = 40_000
PERIOD_S = 1.0
"""Seconds of a micro-batch in plans: long enough that, with this many losses, sums are copied after each one."""
SLOW_S = 0.3
MOST_STEPS = 400
ROOM_BYTES = 10**9
"""Bytes of a device and of the host: for pipelines of even depth, followers fit only in host memory."""
LONG_NOTICE_S, SHORT_NOTICE_S = 3600.0, 1.0


@dataclass
class Happened:
    """The results of a case so far.

    ``state``: before the case began. ``told``: the notice was given. ``left_out``: the change in which the victims were
    to die took nothing from them, because they had notices and others hold everything.
    """

    case: Case
    state: ControllerState
    faults: tuple[Fault, ...]
    gone: tuple[str, ...]
    lost: set[str] = field(default_factory=set)
    version: int = 0
    told: bool = False
    left_out: bool = False
    formed: ReshapeOrder | None = None


class Kills:
    """An observer of the driver that brings cases about and checks decisions."""

    def __init__(self, crew: ManagedCrew, cases: list[Case], num_workers: int) -> None:
        self._crew, self._left, self._num = crew, list(cases), num_workers
        self._case: Happened | None = None
        self._before: ControllerState | None = None
        self._named = num_workers
        self.done: list[str] = []
        self.num_fallbacks = 0
        self.redone: list[tuple[int, int]] = []

    def __call__(self, observed: Observed) -> None:
        state, reason = observed.decision.state, observed.decision.reason
        print(f"{observed.time_s:.3f} {observed.event.kind} -> {state.phase} v{state.version} {reason.sentence}")
        if self._case is None:
            self._begin(state, observed)
        else:
            self._watch(self._case, observed)
        self._before = state

    def _begin(self, state: ControllerState, observed: Observed) -> None:
        if len(state.slots) != self._num or state.reshape is None or state.stop_reason is not None:
            return
        if not self._left:
            if state.phase is Phase.TRAINING:
                self._crew.put(StopRequested(reason="every case was played"))
            return
        case = self._left[0]
        forms = any(isinstance(action, SendReshape) for action in observed.decision.actions)
        if forms if case.moment[0] in FILLING else _in_step(state):
            self._left.pop(0)
            self._bring_about(case, state)

    def _bring_about(self, case: Case, state: ControllerState) -> None:
        (phase, nth), places = case.moment, case.stages()
        workers = {(slot.stage, slot.replica): slot.worker for slot in state.slots}
        victims = [workers[place] for place in places]
        assert state.reshape is not None
        if phase == "receive_ahead" and not set(victims) <= {follow.follower for follow in state.reshape.follows}:
            self.done.append(str(case))  # in this shape no state is sent to them
            return
        share = NUM_MICRO_BATCHES // case.replicas
        first = state.version + (0 if phase in (*FILLING, *CHANGING) else 2)
        by_others = phase in (*CHANGING, "checkpoint")  # a change or a writing thread may reach it at any step
        num = MOST_STEPS if by_others else 6 if phase in FILLING else 1
        faults = tuple(
            Fault.model_validate(
                {"worker": worker, "phase": phase, "step": step, "nth": share - 1 if nth == LAST else nth}
            )
            for worker in victims
            for step in range(first, first + num)
        )
        print(f"{case}: {victims} die")  # pytest shows this when the test fails
        self._crew.arm(*faults, slow_s=SLOW_S if phase in FILLING else 0.0)
        gone = tuple(victims)
        if phase in CHANGING:  # the shape changes because another worker leaves
            other = next(worker for place, worker in sorted(workers.items(), reverse=True) if worker not in victims)
            self._crew.put(NoticeGiven(worker=other, lead_s=SHORT_NOTICE_S))
            gone += (other,)
        self._case = Happened(case, state, faults, gone, version=state.version)
        if case.noticed and phase in CHANGING:
            self._give_notice(self._case)

    def _give_notice(self, now: Happened) -> None:
        """Give long notices, which leave time for many more steps, so that the worker stays for now."""
        now.told = True
        for worker in dict.fromkeys(fault.worker for fault in now.faults):
            self._crew.put(NoticeGiven(worker=worker, lead_s=LONG_NOTICE_S))

    def _watch(self, now: Happened, observed: Observed) -> None:
        state, event, victims = observed.decision.state, observed.event, {fault.worker for fault in now.faults}
        if isinstance(event, WorkerLost):
            now.lost.update(event.workers)
            assert now.lost <= set(now.gone), f"{now.case}: {now.lost} are lost"
            for worker in victims - now.lost:  # workers that wait for the first victim would not reach the phase
                self._crew.end(worker)
        if observed.decision.reason.code is ReasonCode.SET_BACK:
            self._check_fallback(now, observed)
        else:
            assert state.version >= now.version, f"{now.case}: from version {now.version} back to {state.version}"
        now.version = state.version
        assert state.version < now.state.version + MOST_STEPS, f"{now.case}: {victims - now.lost} do not die"
        if now.case.noticed and not now.told and state.version > now.state.version:
            self._give_notice(now)
        for action in observed.decision.actions:
            if isinstance(action, SendReshape) and any(follow.units for follow in action.order.follows):
                assert action.order.follow_in_host == (now.case.depth % 2 == 0)
            if isinstance(action, SendReshape) and now.lost and now.formed is None:
                now.formed = action.order
                self._check_salvage(now, state, action.order)
        if now.told and now.case.moment[0] in CHANGING and not now.lost and state.phase is Phase.TRAINING:
            now.left_out = victims.isdisjoint(slot.worker for slot in state.slots)
            for worker in now.gone if now.left_out else ():
                self._crew.end(worker)
        if now.left_out and now.lost >= set(now.gone) and state.phase is Phase.TRAINING:
            self._replace(now, state)
        elif victims <= now.lost and state.phase is Phase.TRAINING and now.formed is not None:
            others = [worker for worker in now.gone if worker not in now.lost and worker in state.workers]
            for worker in others:
                self._crew.end(worker)  # as its provider does in the end
            if state.version > now.formed.version and not others:
                self._replace(now, state)

    def _replace(self, now: Happened, state: ControllerState) -> None:
        self.done.append(str(now.case))
        self._case = None
        missing = self._num - len(state.workers)
        self._crew.add(*(f"w{self._named + index}" for index in range(missing)))
        self._named += missing

    def _check_fallback(self, now: Happened, observed: Observed) -> None:
        """Check that a fallback names the lost units, that no worker holds them, and that the case allows this."""
        assert self._before is not None
        self.num_fallbacks += 1
        left = observed.decision.state.workers.keys()
        held = {unit for worker, entry in self._before.workers.items() if worker in left for unit in entry.holds}
        missing = sorted(set(self._before.config.units) - held)
        version = self._before.version
        sentence = observed.decision.reason.sentence
        assert missing, f"{now.case}: {sentence}"
        assert f"no living worker holds {', '.join(missing)} at version {version}: back to version" in sentence
        assert self._may_fall_back(now), f"{now.case}: {sentence}"

    def _may_fall_back(self, now: Happened) -> bool:
        if now.case.replicas == 2:
            return now.case.victims == "two of a stage"
        if now.case.moment[0] in FILLING:
            return True
        pairs = {(follow.worker, follow.follower) for follow in now.state.reshape.follows}
        return any((one, other) in pairs for one in now.gone for other in now.gone)

    def _check_salvage(self, now: Happened, state: ControllerState, order: ReshapeOrder) -> None:
        """Check that at most what was summed between two copies is run again."""
        phase, nth = now.case.moment
        step = now.faults[0].step
        if order.version != step or phase not in ("forward", "backward", "reduce", "before_commit"):
            return
        plan = now.state.reshape.plan
        places = {(unit, section): 0 for unit, sections in state.config.units.items() for section in sections}
        for sums in state.step.kept.values():
            for total in sums:
                for section, mask in counted_in(total).items():
                    if (total.unit, section) in places:
                        places[total.unit, section] |= mask
        lost = set(now.lost)
        for slot in now.state.slots:
            if slot.worker in lost:
                mine = plan.share_of(slot.replica, range(plan.num_micro_batches))
                done = {"forward": 0, "backward": len(mine) - 1 if nth == LAST else nth}.get(phase, len(mine))
                mask = sum(1 << number for number in mine[:done])
                for unit, section in places:
                    if section in plan.stages[slot.stage].sections:
                        places[unit, section] |= mask
        through = (1 << plan.num_micro_batches) - 1
        for mask in places.values():
            through &= mask
        spared = 0
        if order.salvage is not None:
            again = sum((1 << end) - (1 << begin) for begin, end in order.salvage.remaining)
            spared = ((1 << plan.num_micro_batches) - 1) & ~again
        redone = (through & ~spared).bit_count()
        every = now.state.reshape.copy_sums_every
        if not every or self._may_fall_back(now):
            return
        most = every * len({slot.stage for slot in now.state.slots if slot.worker in lost})
        self.redone.append((redone, most))
        assert redone <= most, f"{now.case}: {redone} of {through.bit_count()} micro-batches are run again"


def _in_step(state: ControllerState) -> bool:
    """Return whether a step is under way, and every follower has all units that it follows."""
    follows = state.reshape.follows
    in_step = all(state.workers[follow.follower].holds.issuperset(follow.units) for follow in follows)
    return state.phase is Phase.TRAINING and state.version > state.reshape.version and in_step


class Alone:
    """The weights of a single worker."""

    def __init__(self, job: TinyJob, directory: Path) -> None:
        self._crew = Crew(job, ("alone",))
        self._crew.set_up(JOB, job.fingerprint, directory)
        self._crew.reshape("1x1", ("alone",))

    def at(self, version: int) -> dict[str, str]:
        if version < self._crew.version:
            self._crew.begin()
            self._crew.reshape("1x1", ("alone",))
        self._crew.train(version)
        return self._crew.digests()

    def close(self) -> None:
        self._crew.close()


@pytest.fixture(scope="module")
def job() -> TinyJob:
    return load_tiny_job(NUM_SECTIONS, MICRO_BATCH_SIZE)


@pytest.fixture(scope="module")
def crew(job: TinyJob) -> Iterator[ManagedCrew]:
    crew = ManagedCrew(job)
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def alone(job: TinyJob, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    alone = Alone(job, tmp_path_factory.mktemp("alone"))
    yield alone
    alone.close()


def plans_of(job: TinyJob, depth: int, replicas: int) -> dict[int, Plan]:
    """Return the shape for all workers, and shallower pipelines for fewer, unequal where sections do not divide evenly.

    The expected times make more workers look faster than they are.
    """
    plans = {}
    for num in range(1, depth * replicas + 1):
        fewer = min(replicas, num)
        shallow, rest = divmod(num, fewer)
        shapes = (f"{shallow + 1}x{rest}", f"{shallow}x{fewer - rest}")
        plan = job.plan("+".join(shapes) if rest else shapes[1])
        share = NUM_MICRO_BATCHES // fewer
        followed_bytes = ROOM_BYTES + 1 if depth % 2 == 0 else 0
        update = {
            "examples_per_s": float(num),
            "mini_batch_s": PERIOD_S * share,
            "peak_memory_bytes": 0,
            "followed_memory_bytes": followed_bytes,
        }
        plans[num] = plan.model_copy(update={"expected": plan.expected.model_copy(update=update)})
    return plans


def config_of(
    job: TinyJob, plans: Mapping[Any, Plan], *, redundancy: str = "salvage", **fields: Any
) -> ControllerConfig:
    return ControllerConfig(
        fingerprint=job.fingerprint,
        plans=plans,
        units=job.units,
        unit_bytes=dict.fromkeys(job.units, UNIT_BYTES),
        policy=Policy(checkpoint_every_steps=CHECKPOINT_EVERY, start_patience_s=START_S, redundancy=redundancy),
        **fields,
    )


def trained(
    crew: ManagedCrew,
    config: ControllerConfig,
    folder: Path,
    observer: Callable[[ManagedCrew], Observer],
    outcome: str = "finished",
    types: str = "",
) -> tuple[int, dict[str, str]]:
    """Run a session to this outcome; return the newest checkpoint's version, and its digests by unit."""
    with RunDir(folder / "run", crew.facts) as run_dir:
        finish = crew.run(config, run_dir, observer, types=types)
        assert finish.outcome == outcome, finish.sentence
        newest = complete_versions(run_dir.checkpoint_url)[-1]
        return newest, {entry.unit: entry.sha256 for entry in read_manifest(run_dir.checkpoint_url, newest).units}


@pytest.mark.parametrize("cases", runs(), ids=lambda cases: f"{cases[0].depth}x{cases[0].replicas}")
def test_no_death_changes_a_bit_or_loses_a_held_unit(
    cases: list[Case], crew: ManagedCrew, alone: Alone, tmp_path: Path
) -> None:
    depth, replicas = cases[0].depth, cases[0].replicas
    job, num_workers = crew.job, depth * replicas
    config = config_of(
        job,
        plans_of(job, depth, replicas),
        expected_losses=ExpectedLosses(per_vm_h=1e4, weight_vm_h=1e3),
        num_steps=100_000,
        device_memory_bytes=ROOM_BYTES,
        host_memory_bytes=ROOM_BYTES,
        expected_nodes=num_workers,
    )
    kills: list[Kills] = []

    def observer(crew: ManagedCrew) -> Kills:
        kills.append(Kills(crew, cases, num_workers))
        return kills[0]

    newest, weights = trained(crew, config, tmp_path, observer, outcome="stopped")
    assert kills[0].done == [str(case) for case in cases]
    assert weights == alone.at(newest)
    print(f"{kills[0].num_fallbacks} fallbacks, run again: {kills[0].redone}")


def on_types(plan: Plan, types: str, examples_per_s: float) -> Plan:
    """The plan with a type for each stage, "f" or "s"."""
    stages = tuple(stage.model_copy(update={"node_type": of}) for stage, of in zip(plan.stages, types, strict=True))
    expected = plan.expected.model_copy(update={"examples_per_s": examples_per_s, "peak_memory_bytes": 0})
    return plan.model_copy(update={"stages": stages, "expected": expected})


def test_losses_of_either_type_re_shape_pipelines_over_two_types_and_change_no_bit(
    crew: ManagedCrew, alone: Alone, tmp_path: Path
) -> None:
    """Workers are where the plan wants their type, before and after."""
    job = crew.job
    shapes = (("3x1+2x1", "ffssf"), ("4x1", "sfff"), ("3x1", "fsf"))
    plans = [on_types(job.plan(shape), types, 10.0 - place) for place, (shape, types) in enumerate(shapes)]
    config = config_of(
        job,
        {plan.pool: plan for plan in plans},
        num_steps=9,
        expected_nodes=5,
    )
    left, formed = {3: "s", 6: "f"}, list[str]()

    def watch(observed: Observed) -> None:
        state = observed.decision.state
        if state.phase is not Phase.TRAINING or state.plan is None:
            return
        types = [state.workers[slot.worker].facts.node_type for slot in state.slots]
        assert types == [state.plan.stages[slot.stage].node_type for slot in state.slots]
        formed.extend([state.plan.shape] if formed[-1:] != [state.plan.shape] else [])
        if state.version in left:
            victim = state.slots[types.index(left.pop(state.version))].worker
            crew.arm(Fault(worker=victim, phase="before_commit", step=state.version + 1))

    newest, weights = trained(crew, config, tmp_path, lambda _: watch, types="fffss")
    assert formed == [plan.shape for plan in plans]
    assert (newest, weights) == (9, alone.at(9))


@pytest.mark.parametrize("with_sums_bytes", [ROOM_BYTES, ROOM_BYTES + 1])
def test_a_shape_without_room_for_kept_sums_drops_them_and_changes_no_bit(
    crew: ManagedCrew, alone: Alone, tmp_path: Path, with_sums_bytes: int
) -> None:
    """The second of three shapes has the room, or not; each next one is formed after a loss in mid-step."""
    job, shapes = crew.job, {4: "2x2", 3: "3x1", 2: "2x1"}
    plans = {}
    for num, shape in shapes.items():
        update = {"peak_memory_bytes": 0, "memory_with_sums_bytes": with_sums_bytes if num == 3 else 0}
        plan = job.plan(shape)
        plans[num] = plan.model_copy(update={"expected": plan.expected.model_copy(update=update)})
    config = config_of(
        job,
        plans,
        num_steps=9,
        device_memory_bytes=ROOM_BYTES,
        host_memory_bytes=ROOM_BYTES,
        redundancy="auto",
        expected_nodes=4,
    )
    left, formed = [3, 6], dict[str, tuple[bool, bool]]()

    def watch(observed: Observed) -> None:
        state = observed.decision.state
        if state.phase is not Phase.TRAINING or state.plan is None or state.reshape is None:
            return
        formed.setdefault(state.plan.shape, (state.reshape.keep_sums, state.reshape.salvage is not None))
        if state.version in left:
            left.remove(state.version)
            crew.arm(Fault(worker=state.slots[-1].worker, phase="before_commit", step=state.version + 1))

    newest, weights = trained(crew, config, tmp_path, lambda _: watch)
    fits = with_sums_bytes <= ROOM_BYTES
    assert list(formed) == [plan.shape for plan in plans.values()]
    assert [keeps for keeps, _ in formed.values()] == [True, fits, True]
    assert [salvages for _, salvages in formed.values()][:2] == [False, fits]
    assert (newest, weights) == (9, alone.at(9))

"""Salvage after the loss of a worker: real workers, each micro-batch counted once, equal weights.

A step that is given up is finished in the next shape, and a second worker holds state and sums (decision 0019).
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from manager.controller.shape.followers import choose_followers
from manager.controller.shape.salvage import choose_salvage, losses_of
from manager.controller.state.config import units_by_stage
from morph.contract.faults import Fault
from morph.contract.messages import Aborted, Failed, Prepared, ReshapeOrder
from morph.contract.salvage import LOSSES, PartialSum, mask_of, partial_sum, share_in, spans_of
from tests.crew import Crew
from tests.members import Member
from tests.system.harness import JOB, TinyJob, uninterrupted
from tests.waiting import poll_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NAMES = ("w0", "w1", "w2", "w3")
NUM_STEPS = 3
GIVEN_UP = 1


@pytest.fixture
def crew(processes: Crew) -> Crew:
    return processes


def keeping(order: ReshapeOrder, kept: dict[str, tuple[PartialSum, ...]], job: TinyJob) -> ReshapeOrder:
    sizes = dict.fromkeys(job.units, 1)
    needed, num = units_by_stage(order.plan, job.units), order.plan.num_micro_batches
    salvage = choose_salvage(kept, order.plan, order.slots, needed, job.units, sizes, num)
    return order.model_copy(update={"salvage": salvage, "keep_sums": True})


def reshape(crew: Crew, shape: str, workers: tuple[str, ...], kept: dict[str, tuple[PartialSum, ...]]) -> ReshapeOrder:
    """Form a shape that continues the kept partial sums; return the order."""
    order = keeping(crew.order(shape, workers), kept, crew.job)
    crew.form(order)
    return order


def give_up(
    crew: Crew, victim: str | None, *, reduced: bool = False, copied: str = "", num_copied: int = 0, done: int = 0
) -> dict[str, tuple[PartialSum, ...]]:
    """Run a step that fails on one worker, or is not decided; return the others' partial sums.

    ``reduced``: the failure comes so late that the others can prepare the step. ``copied``: the worker that has a copy
    of the victim's sums by then, with ``num_copied`` micro-batches. ``done``: the number of micro-batches that every
    backward has passed by then, at least.
    """
    order = crew.step_order()
    whole = prepared(crew)
    for name in crew.present:
        crew.members[name].send("step", order)
    others = [name for name in crew.present if name != victim]
    if victim is not None:
        failed = crew.members[victim].answer()
        assert isinstance(failed, Failed), failed
        del crew.held[victim]
        for name in others:
            member = crew.members[name]  # a worker that waits for its peers continues as long as they live
            if done and not (
                reduced and name != copied
            ):  # waiting proves nothing while the victim's messages are still on their way
                poll_until(partial(has_counted, member, done), f"{name} has done {done} micro-batches")
            ends = reduced and name != copied  # a worker with a copy of the victim's sums waits for the victim
            ready = partial(answered, member) if ends else partial(is_through, crew, name, victim)
            poll_until(ready, f"{name} answers" if ends else f"{name} has done what it can without {victim}")
            if name == copied:
                poll_until(partial(has_copied, member, victim, crew.version, num_copied), f"{name} has {victim}'s sums")
            crew.members[name].control("abort", crew.generation)
    kept = {}
    for name in others:
        answer = crew.members[name].answer()
        if isinstance(answer, Prepared):
            kept[name] = whole[name]
            continue
        assert isinstance(answer, Aborted), answer
        if answer.kept is not None:
            assert answer.kept.step == crew.version
            kept[name] = answer.kept.sums
    return kept


def give_up_without(crew: Crew, late: str) -> dict[str, tuple[PartialSum, ...]]:
    """Run a step that is given up before one worker has got the order; this worker keeps what it had before."""
    order = crew.step_order()
    others = [name for name in crew.present if name != late]
    for name in others:
        crew.members[name].send("step", order)
    for name in others:
        poll_until(partial(is_through, crew, name, late), f"{name} waits for {late}")
    for name in crew.present:
        crew.members[name].control("abort", crew.generation)
    crew.members[late].send("step", order)
    answers = {name: crew.members[name].answer() for name in crew.present}
    assert all(isinstance(answer, Aborted) for answer in answers.values()), answers
    return {name: answer.kept.sums for name, answer in answers.items()}


def has_counted(member: Member, number: int) -> bool:
    """Return whether a worker's backward has passed this many micro-batches."""
    return bool(member.control("counted") >= number)


def has_copied(member: Member, sender: str, step: int, number: int) -> bool:
    """Return whether a worker has a copy of another one's sums with this many micro-batches."""
    return bool(member.control("copied", sender, step) == number)


def answered(member: Member) -> bool:
    return member.has_answered


def stands(member: Member) -> bool:
    """Return whether a worker has answered its order or waits for a peer."""
    return member.has_answered or member.control("waiting")


def is_through(crew: Crew, name: str, missing: str) -> bool:
    """Return whether a worker waits for a missing one, after all of its micro-batches if its replica is whole."""
    assert crew.plan is not None
    replica_of = {slot.worker: slot.replica for slot in crew.slots}
    member, formed, replica = crew.members[name], crew.formed, replica_of[name]
    share = share_in(crew.plan, replica, formed.salvage if formed.version == crew.version else None)
    whole = replica != replica_of[missing]
    return member.has_answered or ((not whole or member.control("counted") == len(share)) and stands(member))


def prepared(crew: Crew) -> dict[str, tuple[PartialSum, ...]]:
    whole = (1 << crew.plan.num_micro_batches) - 1
    kept = {}
    for slot in crew.slots:
        mine = units_by_stage(crew.plan, crew.job.units)[slot.stage]
        sums = [partial_sum(unit, dict.fromkeys(crew.job.units[unit], whole)) for unit in mine]
        losses = partial_sum(LOSSES, losses_of(crew.plan, slot, None, crew.plan.num_micro_batches))
        kept[slot.worker] = (*sums, losses) if losses.counted else tuple(sums)
    return kept


CASES = {
    "a backward of the first stage": ("2x2", 0, "backward", 1, "2x1", None),
    "a backward of the last stage": ("2x2", 1, "backward", 1, "1x2", None),
    "a forward": ("2x2", 0, "forward", 2, "3x1", None),
    "the reduction": ("1x3", 0, "reduce", 0, "1x2", 2),
    "after the reduction": ("2x2", 0, "before_commit", 0, "2x1", 0),
    "after the reduction, the only one to know some losses": ("2x2", 1, "before_commit", 0, "2x1", 3),
    "a pipeline of one replica, which lost nobody": ("4x1", None, "", 0, "2x1", 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_failed_is_finished_in_another_shape_with_the_same_bits(
    crew: Crew, reference: dict[str, str], tmp_path: Path, case: str
) -> None:
    shape, stage, phase, nth, next_shape, again = CASES[case]
    depth, replicas = map(int, shape.split("x"))
    workers = NAMES[: depth * replicas]
    victim = None
    faults: tuple[Fault, ...] = ()
    if stage is not None:
        victim = workers[stage * replicas]
        faults = (Fault(worker=victim, phase=phase, step=GIVEN_UP, nth=nth, kind="out_of_memory"),)  # type: ignore[arg-type]
    crew.set_up(JOB, crew.job.fingerprint, tmp_path, faults=faults)
    reshape(crew, shape, workers, {})
    if victim is not None:
        assert crew.present.index(victim) == stage * replicas
    crew.train(GIVEN_UP)
    kept = give_up(crew, victim, reduced=phase == "before_commit")
    rest = tuple(name for name in NAMES if name != victim)
    order = reshape(crew, next_shape, rest, kept)
    left = sum(end - first for first, end in order.salvage.remaining)
    assert 0 <= left < order.plan.num_micro_batches
    assert again in (None, left)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


def test_a_step_given_up_twice_keeps_the_work_of_both_shapes(
    crew: Crew, reference: dict[str, str], tmp_path: Path
) -> None:
    faults = (Fault(worker="w0", phase="backward", step=GIVEN_UP, nth=1, kind="out_of_memory"),)
    crew.set_up(JOB, crew.job.fingerprint, tmp_path, faults=faults)
    reshape(crew, "1x4", NAMES, {})
    crew.train(GIVEN_UP)
    first = reshape(crew, "1x3", NAMES[1:], give_up(crew, "w0"))
    kept = give_up_without(crew, "w3")
    del kept["w2"], crew.held["w2"]
    second = reshape(crew, "1x2", ("w1", "w3"), kept)
    assert second.salvage is not None
    assert first.salvage.remaining == ((0, 2),)  # with two each, w0 had the first two
    assert second.salvage.remaining == ((1, 2), (4, 5))  # what w2 did in the first shape and in the second
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


@pytest.mark.parametrize("flips", ["one that is missing", "one that is there"])
def test_weights_differ_if_a_missing_micro_batch_is_not_run_again(
    crew: Crew, reference: dict[str, str], tmp_path: Path, flips: str
) -> None:
    faults = (Fault(worker="w0", phase="backward", step=GIVEN_UP, nth=1, kind="out_of_memory"),)
    crew.set_up(JOB, crew.job.fingerprint, tmp_path, faults=faults)
    reshape(crew, "2x2", NAMES, {})
    crew.train(GIVEN_UP)
    kept = give_up(crew, "w0")
    order = keeping(crew.order("2x1", NAMES[1:]), kept, crew.job)
    remaining, whole = mask_of(order.salvage.remaining), (1 << order.plan.num_micro_batches) - 1
    wrong = remaining if flips == "one that is missing" else whole & ~remaining
    flipped = order.salvage.model_copy(update={"remaining": spans_of(remaining ^ (wrong & -wrong))})
    crew.form(order.model_copy(update={"salvage": flipped}))
    crew.train(NUM_STEPS)
    assert (crew.digests() == reference) == (flips == "one that is there")


def follow(crew: Crew, order: ReshapeOrder, *, every: int = 0) -> ReshapeOrder:
    """Return the order with followers for stages that only one worker drives."""
    needed = units_by_stage(order.plan, crew.job.units)
    sizes = dict.fromkeys(crew.job.units, 1)
    num = Counter(unit for slot in order.slots for unit in needed[slot.stage])
    sole = {unit for unit, times in num.items() if times == 1}
    follows = choose_followers(order.slots, needed, crew.held, sizes, sole, {})
    return order.model_copy(update={"follows": follows, "keep_sums": True, "copy_sums_every": every})


def train_followed(crew: Crew, order: ReshapeOrder, until: int) -> None:
    """Run and decide steps, and note which followers are in step."""
    while crew.version < until:
        crew.prepare()
        answers = {answer.worker: answer for answer in crew.answers}
        crew.decide()
        crew.hold()
        for entry in order.follows:
            if answers[entry.worker].followed:
                crew.held[entry.follower] |= set(entry.units)


def await_copies(crew: Crew) -> None:
    """Let workers compute nothing while copies for their followers are under way.

    Otherwise offered gradients are skipped, and a follower that is further behind gets in step later.
    """
    for member in crew.members.values():
        member.control("arm", (), 0.0)


def in_step(crew: Crew, order: ReshapeOrder) -> bool:
    """Return whether every follower has all units that it follows."""
    return all(set(entry.units) <= crew.held[entry.follower] for entry in order.follows)


@pytest.mark.parametrize(
    ("victim", "phase", "nth", "next_shape", "done", "copied"),
    [
        ("w0", "forward", 1, "3x1", 0, 0),
        ("w1", "backward", 0, "2x1", 0, 0),
        ("w3", "backward", 2, "3x1", 2, 2),
        ("w1", "reduce", 0, "3x1", 5, 4),  # its follower has been through for a while
        ("w2", "before_commit", 0, "1x3", 6, 4),
    ],
)
def test_with_one_replica_a_lost_stage_continues_from_its_follower(
    crew: Crew, tmp_path: Path, victim: str, phase: str, nth: int, next_shape: str, done: int, copied: int
) -> None:
    num_steps, given_up = 8, 6
    reference = uninterrupted(num_steps, tmp_path / "reference")
    faults = (Fault(worker=victim, phase=phase, step=given_up, nth=nth, kind="out_of_memory"),)  # type: ignore[arg-type]
    crew.set_up(JOB, crew.job.fingerprint, tmp_path, faults=faults)
    await_copies(crew)
    order = follow(crew, crew.order("4x1", NAMES), every=2)
    assert [entry.worker for entry in order.follows] == [slot.worker for slot in order.slots]
    crew.form(order)
    train_followed(crew, order, given_up)
    assert in_step(crew, order)
    follower = next(entry.follower for entry in order.follows if entry.worker == victim)
    kept = give_up(
        crew, victim, reduced=phase == "before_commit", copied=follower if copied else "", num_copied=copied, done=done
    )
    rest = tuple(name for name in NAMES if name != victim)
    again = follow(crew, keeping(crew.order(next_shape, rest), kept, crew.job), every=2)
    assert again.version == given_up
    assert not [source for source in again.sources if source.kind == "initial"]
    if copied:
        # the follower has a copy of some of the lost worker's sums
        left = sum(end - first for first, end in again.salvage.remaining)
        assert left == again.plan.num_micro_batches - copied
    crew.form(again)
    train_followed(crew, again, num_steps)
    assert crew.digests() == reference


def test_a_follower_that_is_known_is_not_sent_the_state_again(crew: Crew, tmp_path: Path) -> None:
    num_steps = 9
    reference = uninterrupted(num_steps, tmp_path / "reference")
    crew.set_up(JOB, crew.job.fingerprint, tmp_path)
    await_copies(crew)
    order = follow(crew, crew.order("4x1", NAMES))
    crew.form(order)
    train_followed(crew, order, 5)
    assert in_step(crew, order)
    kept = give_up(crew, None)
    order = follow(crew, keeping(crew.order("4x1", NAMES), kept, crew.job))
    assert all(entry.known == entry.units for entry in order.follows)
    assert all(source.kind == "keep" for source in order.sources)
    crew.form(order)
    assert in_step(crew, order)
    train_followed(crew, order, 7)
    assert in_step(crew, order)
    pairs = {entry.worker: entry.follower for entry in order.follows}
    del crew.held["w1"]
    again = crew.order("3x1", ("w0", "w2", "w3"))
    assert not [source for source in again.sources if source.kind == "initial"]
    assert pairs["w1"] in {source.peer or source.worker for source in again.sources}
    crew.form(again)
    crew.train(num_steps)
    assert crew.digests() == reference


def test_sets_of_micro_batches_travel_as_spans() -> None:
    assert spans_of(0b1110110) == ((1, 3), (4, 7))
    assert spans_of(0) == ()

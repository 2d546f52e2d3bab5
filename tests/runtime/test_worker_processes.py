"""Real worker processes and real groups, without Ray: every shape, aborts, moving state, and nothing left behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from morph.checkpoint.manifest import write_manifest
from morph.checkpoint.unit_files import read_unit
from morph.contract.messages import Aborted, Failed, Prepared, Reshaped
from morph.cutting.cache.cut_job import load_and_cut
from morph.jobs.files import imported_once
from tests.crew import Crew, check_that_morphs_leave_nothing, workers_of
from tests.system.harness import JOB, MICRO_BATCH_SIZE, NUM_SECTIONS, TinyJob
from tests.waiting import poll_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NAMES = ("w0", "w1", "w2", "w3")
NUM_STEPS = 4
SHAPES = ("1x1", "2x1", "1x2", "2x2", "4x1", "3x1", "1x3", "1x4")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_ends_with_the_same_bits(crew: Crew, reference: dict[str, str], shape: str) -> None:
    crew.reshape(shape, workers_of(shape, NAMES))
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


def test_morphing_after_each_step_ends_with_the_same_bits(crew: Crew, reference: dict[str, str]) -> None:
    received = []
    for step, shape in enumerate(("2x2", "1x3", "4x1", "1x1")):
        received.append(sum(answer.received_bytes for answer in crew.reshape(shape, NAMES[::-1])))
        crew.train(step + 1)
    assert crew.digests() == reference
    assert received[0] == 0
    assert all(amount > 0 for amount in received[1:])


@pytest.fixture
def overflowing(crew: Crew) -> Iterator[Crew]:
    """Make the first step overflow by initial scales that are far too fine."""
    for exponent in (62, None):
        for member in crew.members.values():
            member.send("first_exponent", exponent)
            member.answer()
        if exponent is not None:
            yield crew


def test_steps_whose_gradients_overflow_are_redone_alike_in_every_shape(overflowing: Crew) -> None:
    results = []
    for shape in ("1x1", "2x2", "3x1"):
        overflowing.begin()
        overflowing.reshape(shape, workers_of(shape, NAMES))
        assert overflowing.prepare() == 2
        overflowing.decide()
        overflowing.train(3)
        results.append(overflowing.digests())
    assert results[0] == results[1] == results[2]


def test_an_overflowed_attempt_that_was_given_up_leaves_no_scales_behind(overflowing: Crew) -> None:
    """One worker keeps its state, the other gets it from the first: both must sum at the same scales."""
    overflowing.reshape("1x1", NAMES[:1])
    assert overflowing.prepare() == 2
    overflowing.decide()
    overflowing.train(2)
    undisturbed = overflowing.digests()
    overflowing.begin()
    overflowing.reshape("1x1", NAMES[:1])
    order = overflowing.step_order()
    (answer,) = overflowing.ask(NAMES[:1], "step", order)
    assert isinstance(answer, Prepared)
    assert answer.overflowed
    overflowing.reshape("1x2", NAMES[:2])
    assert overflowing.prepare() == 2
    overflowing.decide()
    overflowing.train(2)
    assert overflowing.digests() == undisturbed


def test_only_a_decided_step_is_applied_by_the_next_reshape(crew: Crew, reference: dict[str, str]) -> None:
    crew.reshape("2x1", NAMES[:2])
    crew.prepare()
    crew.decide()  # the reshape names this version
    crew.reshape("2x2", NAMES)
    crew.prepare()  # not decided: the reshape names the version before
    crew.reshape("1x2", NAMES[2:] + NAMES[:2])
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


def test_held_units_are_saved_and_resumed_without_a_generation(crew: Crew, reference: dict[str, str]) -> None:
    crew.reshape("2x2", NAMES)
    crew.train(NUM_STEPS - 2)
    crew.prepare()
    crew.decide()  # not applied by any worker yet
    slots = crew.slots
    crew.members["w0"].send("reshape", crew.order("4x1", NAMES))  # alone, it would wait for the others
    for name in NAMES:
        crew.members[name].control("abort", crew.generation)
    assert isinstance(crew.members["w0"].answer(), Aborted)
    crew.plan, crew.slots = crew.job.plan("2x2"), slots
    write_manifest(str(crew.directory), crew.save(held=True))
    crew.held = {}
    crew.reshape("1x2", NAMES[:2], restore="checkpoint")
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


def test_state_comes_back_from_a_checkpoint_onto_workers_that_never_had_it(
    crew: Crew, reference: dict[str, str], set_up: Crew
) -> None:
    crew.reshape("1x2", NAMES[:2])
    crew.train(2)
    write_manifest(str(crew.directory), crew.save())
    crew.train(3)
    crew.held = {}
    answers = crew.reshape("2x1", NAMES[2:], restore="checkpoint", version=2)
    assert all(answer.received_bytes == 0 for answer in answers)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


def test_a_damaged_checkpoint_fails_the_reshape_and_names_the_file(crew: Crew) -> None:
    crew.reshape("1x1", NAMES[:1])
    crew.train(1)
    manifest = crew.save()
    write_manifest(str(crew.directory), manifest)
    damaged = crew.directory / "v00000001" / manifest.units[0].file
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    crew.held = {}
    order = crew.order("1x1", NAMES[1:2], restore="checkpoint", version=1)
    (answer,) = crew.ask(NAMES[1:2], "reshape", order)
    assert isinstance(answer, Failed)
    assert (answer.detail, answer.cause) == ("CheckpointDamaged", "checkpoint")
    assert damaged.name in answer.error
    damaged.unlink()


def test_workers_behind_a_stopped_peer_abort_at_once_and_train_on(crew: Crew, reference: dict[str, str]) -> None:
    crew.reshape("2x2", NAMES)
    crew.train(1)
    lost = crew.slots[-1].worker
    rest = [name for name in crew.present if name != lost]
    stopped = crew.members[lost]
    stopped.stop()
    try:
        order = crew.step_order()
        for name in crew.present:
            crew.members[name].send("step", order)
        poll_until(lambda: all(crew.members[name].control("waiting") for name in rest), "the others to block")
        for name in rest:
            crew.members[name].control("abort", crew.generation)
        answers = [crew.members[name].answer() for name in rest]
        assert all(isinstance(answer, Aborted) and not answer.peer_lost for answer in answers), answers
        aborted = crew.generation
        del crew.held[lost]
        crew.reshape("3x1", rest)
        crew.train(3)
    finally:
        stopped.resume()
    stopped.control("abort", aborted)
    assert isinstance(stopped.answer(), Aborted | Prepared)
    crew.reshape("2x2", NAMES)  # the stopped worker is well again, and is taken back
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


def test_workers_that_wait_for_an_absent_member_abort_at_once(crew: Crew, reference: dict[str, str]) -> None:
    crew.reshape("1x1", NAMES[:1])
    crew.train(1)
    order = crew.order("2x2", NAMES)
    came = [name for name in crew.present if name != "w3"]
    for name in came:
        crew.members[name].send("reshape", order)
    poll_until(lambda: all(crew.members[name].control("waiting") for name in came), "them to wait for the last one")
    for name in came:
        crew.members[name].control("abort", crew.generation)
    answers = [crew.members[name].answer() for name in came]
    assert all(isinstance(answer, Aborted) and not answer.peer_lost for answer in answers), answers
    crew.reshape("1x3", NAMES[:3])  # the state of the first worker survived
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


def test_an_abort_that_overtakes_its_order_is_not_forgotten(crew: Crew) -> None:
    order = crew.order("1x1", NAMES[:1])
    crew.members["w0"].control("abort", order.generation)
    (answer,) = crew.ask(NAMES[:1], "reshape", order)
    assert isinstance(answer, Aborted)
    assert answer.generation == order.generation
    (answer,) = crew.ask(NAMES[:1], "reshape", crew.order("1x1", NAMES[:1]))
    assert isinstance(answer, Reshaped)


def test_a_late_abort_of_an_earlier_generation_changes_nothing(crew: Crew, reference: dict[str, str]) -> None:
    crew.reshape("2x1", NAMES[:2])
    crew.train(1)
    crew.reshape("2x1", NAMES[1:3])
    for name in NAMES:
        crew.members[name].control("abort", crew.generation - 1)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


def test_many_morphs_leave_no_threads_and_no_files_open(crew: Crew) -> None:
    check_that_morphs_leave_nothing(crew, NAMES)


FAST_JOB = """
from dataclasses import replace
import torch

from tiny_gpt_of_the_fast_job import job as tiny


def optimizer(parameters):
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1, momentum=0.9)


job = replace(tiny, accumulation="fast", optimizer=optimizer)
"""


def test_floating_point_accumulation_agrees_closely_between_shapes(
    processes: Crew, job: TinyJob, tmp_path: Path
) -> None:
    path = tmp_path / "fast.py"
    path.write_text(FAST_JOB, encoding="utf-8")
    shutil.copy(JOB.rpartition(":")[0], tmp_path / "tiny_gpt_of_the_fast_job.py")
    fast = f"{path}:job"
    with imported_once(fast):
        model = load_and_cut(fast, num_sections=NUM_SECTIONS, micro_batch_size=MICRO_BATCH_SIZE).model
    processes.set_up(fast, model.fingerprint, tmp_path / "checkpoints")
    results, losses = [], []
    for shape in ("1x1", "2x2", "1x3"):
        processes.begin()
        processes.reshape(shape, workers_of(shape, NAMES))
        processes.train(NUM_STEPS)
        manifest = processes.save()
        losses.append(processes.losses)
        results.append({unit: read_unit(str(tmp_path / "checkpoints"), manifest, unit) for unit in job.units})
    for shape_losses, units in zip(losses[1:], results[1:], strict=True):
        assert shape_losses == pytest.approx(losses[0], rel=1e-5)
        for unit, tensors in units.items():
            for name, tensor in tensors.items():
                if name != "numbers":
                    assert tensor.allclose(results[0][unit][name], rtol=1e-4, atol=1e-6), (unit, name)
    assert losses[0][-1] < losses[0][0]

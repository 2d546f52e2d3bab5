"""Whole workers in threads of one process: members send their units ahead to newcomers, who train on with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from manager.controller.shape.placement import choose_sources, place
from manager.controller.state.config import units_by_stage
from manager.rehearsal.device import EmulationOptions, emulated_device, known_units
from morph.checkpoint.unit_files import to_payload
from morph.contract.messages import (
    Aborted,
    PreCopyMove,
    PreCopyOrder,
    Prepared,
    Reshaped,
    ReshapeOrder,
    StepOrder,
    WorkerSetup,
)
from morph.contract.plan import Plan
from morph.runtime.groups.store import StoreHost
from morph.runtime.process.worker import Worker, set_up
from simulator import plan, synthetic_profile
from tests.runtime.worker_crew import poll_until, wait_for_updates

LOOPBACK = "127.0.0.1"
M = 4
PROFILE = synthetic_profile(
    num_sections=4, forward_s=0.0002, batch_size=32, micro_batch_size=M, parameter_bytes=20_000, tied=True
)
UNITS = {unit.id: unit.sections for unit in known_units(PROFILE)}
SIZES = dict.fromkeys(UNITS, 1)
BOUND_S = 150.0
MOST_BEHIND = 2


def plan_of(shape: str) -> Plan:
    depth, replicas = map(int, shape.split("x"))
    return plan(
        PROFILE,
        num_gpus=depth * replicas,
        pipeline_depth=depth,
        num_replicas=replicas,
        micro_batch_size=M,
        schedule="varuna",
        recompute=True,
    ).best


class Threads:
    """Workers, each with an order lane of its own."""

    def __init__(self, directory: Path, names: tuple[str, ...]) -> None:
        self.store = StoreHost(LOOPBACK)
        self.workers: dict[str, Worker] = {}
        device = emulated_device(PROFILE, M, range(2, 5), EmulationOptions())
        for name in names:
            setup = WorkerSetup(
                worker=name,
                job_path="emulated",
                fingerprint=PROFILE.job.fingerprint,
                num_sections=PROFILE.num_sections,
                micro_batch_size=M,
                checkpoint_url=str(directory),
                store_host=LOOPBACK,
                store_port=self.store.port(),
                listen_host=LOOPBACK,
                secret="of the run",
                emulation=device,
            )
            worker = set_up(setup)
            assert isinstance(worker, Worker)
            self.workers[name] = worker
        self.generation = self.version = 0
        self.held: dict[str, frozenset[str]] = {}
        self.members: tuple[str, ...] = ()

    def all(self, names: tuple[str, ...], carry_out: Callable[[Worker], Any]) -> dict[str, Any]:
        """Give everybody an order at once, and collect the answers."""
        answers: dict[str, Any] = {}

        def work(name: str) -> None:
            answers[name] = carry_out(self.workers[name])

        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND_S)
        assert set(answers) == set(names), "somebody did not answer"
        return answers

    def order(self, shape: str, names: tuple[str, ...], ahead: PreCopyOrder | None = None) -> ReshapeOrder:
        self.generation += 1
        needed = units_by_stage(plan_of(shape), UNITS)
        slots = place(plan_of(shape), names, self.held, needed, SIZES)
        sources = choose_sources(slots, needed, self.held, SIZES, "initial")
        if ahead is not None:
            senders = {(move.receiver, move.unit): move.sender for move in ahead.moves}
            sources = tuple(
                source.model_copy(update={"kind": "ahead", "peer": senders[source.worker, source.unit]})
                if source.kind == "peer"
                else source
                for source in sources
            )
        return ReshapeOrder(
            generation=self.generation,
            version=self.version,
            plan=plan_of(shape),
            slots=slots,
            sources=sources,
            ahead=ahead.number if ahead else None,
        )

    def reshape(self, order: ReshapeOrder) -> dict[str, Any]:
        taking_part = tuple(dict.fromkeys([slot.worker for slot in order.slots] + list(self.members)))
        taking_part = tuple(name for name in taking_part if name in self.workers)
        answers = self.all(taking_part, lambda worker: worker.reshape(order))
        if all(isinstance(answer, Reshaped) for answer in answers.values()):
            needed = units_by_stage(order.plan, UNITS)
            self.members = tuple(slot.worker for slot in order.slots)
            self.held = {slot.worker: frozenset(needed[slot.stage]) for slot in order.slots}
        return answers

    def step(self) -> None:
        for attempt in range(8):
            order = StepOrder(generation=self.generation, step=self.version, attempt=attempt)
            answers = self.all(self.members, partial(Worker.step, order=order))
            assert all(isinstance(answer, Prepared) for answer in answers.values()), answers
            if not any(answer.overflowed for answer in answers.values()):
                self.version += 1
                return
        raise AssertionError(f"step {self.version} overflowed 8 times")

    def send_ahead(self, shape: str, names: tuple[str, ...], number: int = 1) -> PreCopyOrder:
        """Order what a change to ``shape`` would need from peers."""
        order = self.order(shape, names)
        self.generation -= 1  # it is not given
        moves = tuple(
            PreCopyMove(unit=source.unit, sender=source.peer, receiver=source.worker)
            for source in order.sources
            if source.kind == "peer" and source.peer is not None
        )
        ahead = PreCopyOrder(number=number, num_micro_batches=order.plan.num_micro_batches, moves=moves)
        for name in {worker for move in moves for worker in (move.sender, move.receiver)}:
            self.workers[name].ahead(ahead)
        return ahead

    def train_until_all_follow(self, ahead: PreCopyOrder) -> None:
        wanted = {(move.receiver, move.unit) for move in ahead.moves}
        following: set[tuple[str, str]] = set()

        def told() -> bool:
            for name in {move.receiver for move in ahead.moves}:
                report = self.workers[name].heartbeat(0.01).ahead
                if report is not None:
                    assert report.error is None
                    following.update((name, unit) for unit in report.following)
            if following != wanted:
                for name in {move.sender for move in ahead.moves}:
                    wait_for_updates(self.workers[name]._ahead, MOST_BEHIND)
                self.step()
            return following == wanted

        poll_until(told, "everything to arrive")

    def weights(self) -> dict[str, bytes]:
        """Every unit at the decided version; equal on all who hold it."""
        found: dict[str, bytes] = {}
        for name in self.members:
            worker = self.workers[name]
            worker._enter(self.generation, self.version, None)
            for unit, state in worker._held.items():
                payload = to_payload(state.tensors())
                assert found.setdefault(unit, payload) == payload, f"{name} has another {unit}"
        assert set(found) == set(UNITS)
        return found


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Threads]:
    made = Threads(tmp_path, ("a", "b", "c", "d"))
    yield made
    for worker in made.workers.values():
        worker._ahead.end()
        worker._generation = None


def alone(directory: Path, version: int) -> dict[str, bytes]:
    """The weights of one worker that trained alone."""
    made = Threads(directory, ("a",))
    made.reshape(made.order("1x1", ("a",)))
    while made.version < version:
        made.step()
    return made.weights()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "first", "after", "then"),
    [
        ("2x1", "ab", "2x2", "abcd"),
        ("1x2", "ab", "4x1", "abcd"),
        ("3x1", "abc", "2x2", "abcd"),
        ("3x1", "abc", "2x1", "ab"),  # c is drained: it has no place, and sends what it holds
    ],
)
def test_newcomers_and_members_train_on_with_what_was_sent_ahead(
    crew: Threads, tmp_path: Path, before: str, first: str, after: str, then: str
) -> None:
    crew.reshape(crew.order(before, tuple(first)))
    crew.step()
    ahead = crew.send_ahead(after, tuple(then))
    crew.train_until_all_follow(ahead)
    crew.step()
    order = crew.order(after, tuple(then), ahead)
    assert "ahead" in {source.kind for source in order.sources}
    answers = crew.reshape(order)
    assert all(isinstance(answer, Reshaped) for answer in answers.values()), answers
    for _ in range(2):
        crew.step()
    assert crew.weights() == alone(tmp_path, crew.version)


def test_a_change_that_was_sent_ahead_and_lost_a_sender_is_aborted_and_formed_from_peers(
    crew: Threads, tmp_path: Path
) -> None:
    crew.reshape(crew.order("1x2", ("a", "b")))
    crew.step()
    ahead = crew.send_ahead("1x3", ("a", "b", "c"))
    crew.train_until_all_follow(ahead)
    crew.workers[ahead.moves[0].sender]._ahead.end()  # its streams break; it trains on
    crew.step()
    answers = crew.reshape(crew.order("1x3", ("a", "b", "c"), ahead))
    assert isinstance(answers["c"], Aborted)
    assert answers["c"].peer_lost
    again = crew.order("1x3", ("a", "b", "c"))
    assert {source.kind for source in again.sources} == {"keep", "peer"}
    answers = crew.reshape(again)
    assert all(isinstance(answer, Reshaped) for answer in answers.values()), answers
    crew.step()
    assert crew.weights() == alone(tmp_path, crew.version)

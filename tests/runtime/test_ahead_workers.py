"""Whole workers in threads of one process: members send their units ahead to newcomers, who train on with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from manager.rehearsal.device import EmulationOptions, emulated_device, known_units
from morph.checkpoint.unit_files import to_payload
from morph.contract.messages import Aborted, PreCopyMove, PreCopyOrder, ReshapeOrder
from simulator import synthetic_profile
from tests.crew import Crew, ThreadMember, taking_part, wait_for_updates
from tests.system.harness import TinyJob, plan_of
from tests.waiting import poll_until

M = 4
PROFILE = synthetic_profile(
    num_sections=4, forward_s=0.0002, batch_size=32, micro_batch_size=M, parameter_bytes=20_000, tied=True
)
JOB = TinyJob(
    PROFILE.job.fingerprint,
    PROFILE.job.batch_size,
    {unit.id: unit.sections for unit in known_units(PROFILE)},
    PROFILE.num_sections,
    M,
)
MOST_BEHIND = 2


class Threads(Crew):
    """Workers on an emulated device, in threads of this process."""

    def __init__(self, directory: Path, names: str) -> None:
        super().__init__(JOB, names, ThreadMember)
        device = emulated_device(PROFILE, M, range(2, 5), EmulationOptions())
        self.set_up("emulated", JOB.fingerprint, directory, code=None, emulation=device)

    def order_ahead(self, shape: str, names: str, ahead: PreCopyOrder | None = None) -> ReshapeOrder:
        """The order of a shape; ``ahead``: units come from what was pre-copied, rather than from peers."""
        order = self.order(plan_of(PROFILE, shape, M), names)
        if ahead is None:
            return order
        senders = {(move.receiver, move.unit): move.sender for move in ahead.moves}
        sources = tuple(
            source.model_copy(update={"kind": "ahead", "peer": senders[source.worker, source.unit]})
            if source.kind == "peer"
            else source
            for source in order.sources
        )
        return order.model_copy(update={"sources": sources, "ahead": ahead.number})

    def send_ahead(self, shape: str, names: str, number: int = 1) -> PreCopyOrder:
        """Order what a change to ``shape`` would need from peers."""
        plan, slots = self.plan, self.slots
        order = self.order_ahead(shape, names)
        self.generation, self.plan, self.slots = self.generation - 1, plan, slots  # it is not given
        moves = tuple(
            PreCopyMove(unit=source.unit, sender=source.peer, receiver=source.worker)
            for source in order.sources
            if source.kind == "peer" and source.peer is not None
        )
        ahead = PreCopyOrder(number=number, num_micro_batches=order.plan.num_micro_batches, moves=moves)
        for name in {worker for move in moves for worker in (move.sender, move.receiver)}:
            self.members[name].control("ahead", ahead)
        return ahead

    def train_until_all_follow(self, ahead: PreCopyOrder) -> None:
        wanted = {(move.receiver, move.unit) for move in ahead.moves}
        following: set[tuple[str, str]] = set()

        def told() -> bool:
            for name in {move.receiver for move in ahead.moves}:
                report = self.members[name].control("heartbeat", 0.01).ahead
                if report is not None:
                    assert report.error is None
                    following.update((name, unit) for unit in report.following)
            if following != wanted:
                for name in {move.sender for move in ahead.moves}:
                    wait_for_updates(self.members[name].worker._pre_copy, MOST_BEHIND)
                self.train(self.version + 1)
            return following == wanted

        poll_until(told, "everything to arrive")

    def weights(self) -> dict[str, bytes]:
        """Every unit at the decided version; equal on all who hold it."""
        found: dict[str, bytes] = {}
        for name in self.present:
            worker = self.members[name].worker
            worker._enter(self.generation, self.version, self.decided)
            for unit, state in worker._held.items():
                payload = to_payload(state.tensors())
                assert found.setdefault(unit, payload) == payload, f"{name} has another {unit}"
        assert set(found) == set(JOB.units)
        return found


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Threads]:
    made = Threads(tmp_path, "abcd")
    yield made
    for member in made.members.values():
        member.worker._pre_copy.end()
        member.worker._generation = None
    made.close()


def alone(directory: Path, version: int) -> dict[str, bytes]:
    """The weights of one worker that trained alone."""
    made = Threads(directory, "a")
    made.form(made.order_ahead("1x1", "a"))
    made.train(version)
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
    crew.form(crew.order_ahead(before, first))
    crew.train(1)
    ahead = crew.send_ahead(after, then)
    crew.train_until_all_follow(ahead)
    crew.train(crew.version + 1)
    order = crew.order_ahead(after, then, ahead)
    assert "ahead" in {source.kind for source in order.sources}
    crew.form(order)
    crew.train(crew.version + 2)
    assert crew.weights() == alone(tmp_path, crew.version)


def test_a_change_that_was_sent_ahead_and_lost_a_sender_is_aborted_and_formed_from_peers(
    crew: Threads, tmp_path: Path
) -> None:
    crew.form(crew.order_ahead("1x2", "ab"))
    crew.train(1)
    ahead = crew.send_ahead("1x3", "abc")
    crew.train_until_all_follow(ahead)
    crew.members[ahead.moves[0].sender].worker._pre_copy.end()  # its streams break; it trains on
    crew.train(crew.version + 1)
    order = crew.order_ahead("1x3", "abc", ahead)
    answers = dict(zip(taking_part(order), crew.ask(taking_part(order), "reshape", order), strict=True))
    assert isinstance(answers["c"], Aborted)
    assert answers["c"].peer_lost
    again = crew.order_ahead("1x3", "abc")
    assert {source.kind for source in again.sources} == {"keep", "peer"}
    crew.form(again)
    crew.train(crew.version + 1)
    assert crew.weights() == alone(tmp_path, crew.version)

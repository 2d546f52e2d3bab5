"""Rules of the strategies: pairs for averaging, when ``auto`` switches, and how replicas are merged."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from morph.elastic.peers import Address, Incoming
from morph.elastic.replicas import Union, as_vector, move_to
from morph.elastic.shelf import Fetcher, Shelf
from morph.elastic.state import TrainingState
from morph.elastic.strategy import (
    AD_PSGD,
    AUTO,
    FIRST_WAIT,
    MOST_WAIT,
    S_SGD,
    SYNC_STEPS,
    WINDOW,
    Pace,
    begun,
    is_sync_step,
    observed,
    partner,
    shares_of,
)
from morph.link.listener import Caller, Listener
from morph.runtime.groups.interrupt import Interrupt
from tests.link.pair import own
from tests.waiting import BOUND_S, poll_until


def after(pace: Pace, rate: float, num_workers: int = 4, times: int = 1) -> tuple[Pace, list[str]]:
    reasons = []
    for _ in range(times):
        pace, reason = observed(pace, rate, num_workers)
        reasons += [reason] if reason else []
    return pace, reasons


def of_reference(rate: float) -> Pace:
    pace, reasons = after(begun(AUTO), rate, times=1 + WINDOW)
    assert (pace.reference, reasons) == (rate, [])
    return pace


def test_s_sgd_is_left_below_two_fifths_of_the_best_throughput() -> None:
    pace, reasons = after(of_reference(10.0), 4.1, times=10 * WINDOW)
    assert (pace.sync, reasons) == (S_SGD, [])
    pace, reasons = after(pace, 3.9, times=WINDOW)
    assert pace.sync == AD_PSGD
    assert reasons == ["a worker has 3.9 shares/s under s-sgd, 39% of the best so far"]


def test_some_slow_steps_change_nothing() -> None:
    pace = of_reference(10.0)
    for rate in (1.0, 10.0, 1.0, 10.0, 10.0, 1.0, 10.0, 10.0):
        pace, reason = observed(pace, rate, 4)
        assert reason is None
    assert pace.sync == S_SGD


def left(rate: float = 3.0) -> Pace:
    return after(of_reference(10.0), rate, times=WINDOW)[0]


def test_s_sgd_needs_more_throughput_to_return_than_to_stay() -> None:
    on_trial, reasons = after(left(), 8.0, times=FIRST_WAIT + 1)
    assert (on_trial.sync, reasons) == (S_SGD, ["s-sgd is tried again with 4 workers"])
    assert after(on_trial, 5.0, times=WINDOW)[0].sync == AD_PSGD  # 50 %: enough to stay with s-sgd, not to return to it
    back, _ = after(on_trial, 6.0, times=WINDOW)
    assert (back.sync, back.is_trial) == (S_SGD, False)
    assert after(back, 5.0, times=WINDOW)[0].sync == S_SGD


def test_s_sgd_returns_where_ad_psgd_is_no_faster() -> None:
    on_trial, _ = after(left(), 3.0, times=FIRST_WAIT + 1)
    assert after(on_trial, 3.0, times=WINDOW)[0].sync == S_SGD


def test_trials_that_fail_become_rare() -> None:
    pace, waits = left(), []
    for _ in range(7):
        waits.append(pace.wait)
        pace, _ = after(pace, 8.0, times=pace.wait + 1)
        pace, _ = after(pace, 3.0, times=WINDOW)
    assert waits == [4, 8, 16, 32, 64, 64, 64]
    assert MOST_WAIT == 64


def test_when_workers_are_lost_s_sgd_is_tried_at_the_next_meeting() -> None:
    pace, _ = after(left(), 8.0, num_workers=3, times=2)
    assert pace.sync == S_SGD
    pace, _ = after(left(), 8.0, num_workers=5, times=2)
    assert pace.sync == AD_PSGD


def test_rates_of_another_ring_do_not_count() -> None:
    pace, _ = after(of_reference(10.0), 1.0, times=WINDOW - 1)
    pace, reasons = after(pace, 9.0, num_workers=3, times=WINDOW)
    assert (pace.sync, reasons, len(pace.rates)) == (S_SGD, [], WINDOW - 1)


@pytest.mark.parametrize("sync", [S_SGD, AD_PSGD, "sma"])
def test_only_auto_changes(sync: str) -> None:
    pace = replace(begun(sync), reference=100.0)
    assert after(pace, 0.1, times=100) == (pace, [])


def test_every_pair_averages_about_equally_often_and_no_member_with_itself() -> None:
    members = (2, 3, 5, 1024)
    pairs = Counter((me, partner(members, me, step)) for me in members for step in range(600))
    assert set(pairs) == {(me, other) for me in members for other in members if me != other}
    assert min(pairs.values()) > 150
    assert partner((7,), 7, 3) is None


def test_shares_that_are_summed_are_dealt_once_and_a_replica_always_has_one() -> None:
    dealt = [shares_of(rank, 5, 3, is_shared=True) for rank in range(5)]
    assert sorted(index for mine in dealt for index in mine) == [0, 1, 2]
    assert [shares_of(rank, 5, 3, is_shared=False) for rank in range(5)] == [[0], [1], [2], [0], [1]]


def test_workers_meet_after_the_first_step_and_then_each_sixteen() -> None:
    assert [step for step in range(40) if is_sync_step(AD_PSGD, step)] == [1, 1 + SYNC_STEPS, 1 + 2 * SYNC_STEPS]
    assert not any(is_sync_step("sma", step) for step in range(40))


def test_a_replica_moves_part_of_the_way() -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]], dtype=torch.float64)]
    move_to(tensors, torch.tensor([2.0, 4.0, 5.0], dtype=torch.float64), 0.5)
    assert [one.tolist() for one in tensors] == [[1.5, 3.0], [[4.0]]]
    assert as_vector(tensors).dtype == torch.float64


class Pair:
    """A ring of two; the other member has a replica too, and contributes as it would."""

    size = 2

    def __init__(self, rank: int, other: TrainingState, floats: torch.Tensor, integers: torch.Tensor) -> None:
        text = json.dumps(other.layout()).encode()
        self._rank, self._text = rank, text
        self._others = [torch.tensor([len(text)]), floats, integers]

    def reduce(self, tensor: torch.Tensor, operation: object) -> Pair:
        other = self._others.pop(0).to(tensor.dtype)
        tensor.copy_(torch.maximum(tensor, other) if operation == torch.distributed.ReduceOp.MAX else tensor + other)
        return self

    def gather(self, gathered: torch.Tensor, own: torch.Tensor) -> Pair:
        other = torch.frombuffer(bytearray(self._text.ljust(len(own))), dtype=torch.uint8)
        gathered.copy_(torch.cat([own, other] if self._rank == 0 else [other, own]))
        return self

    def wait(self, _: str) -> None:
        pass


def norm_state(**given: Any) -> TrainingState:
    model = nn.BatchNorm1d(2)
    return TrainingState(model, torch.optim.Adam(model.parameters(), lr=0.1), **given)


def test_replicas_become_their_mean_and_integers_those_of_the_first() -> None:
    state = norm_state(exponents={"weight": 3}, differs=True)
    model = state.model
    assert isinstance(model, nn.BatchNorm1d)
    model.num_batches_tracked.fill_(7)
    ring = Pair(1, norm_state(), torch.full((8,), 3.0), torch.tensor([40]))
    union = Union(state, ring, rank=1, num_workers=2)  # type: ignore[arg-type]
    union.wait()
    assert model.weight.tolist() == [1.0, 1.0]
    union.apply()
    assert model.weight.tolist() == [2.0, 2.0]
    assert model.running_mean.tolist() == [1.5, 1.5]
    assert int(model.num_batches_tracked) == 40
    assert (state.differs, state.exponents) == (False, {})


def test_state_that_only_one_replica_s_optimizer_keeps_is_had_by_all() -> None:
    """A parameter that has had no gradient has no state in the optimizer."""
    state, other = norm_state(differs=True), norm_state()
    for one in state.optimized():
        one.grad = torch.ones_like(one)
    other.optimized()[1].grad = torch.ones(2)
    for each in (state, other):
        each.optimizer.step()
    expected = state.optimizer.state[state.optimized()[0]]["exp_avg"].clone()
    kept = other.optimizer.state[other.optimized()[1]]
    zeros = torch.zeros(5)  # for the weight's exp_avg, exp_avg_sq and step, which the other member does not have
    floats = torch.cat(
        [one.detach().flatten() for one in (*other.model.parameters(), *list(other.model.buffers())[:2])]
    )
    floats = torch.cat([floats, zeros, *(kept[key].flatten() for key in sorted(kept))])
    union = Union(state, Pair(0, other, floats, torch.tensor([0])), rank=0, num_workers=2)  # type: ignore[arg-type]
    union.wait()
    union.apply()
    assert torch.equal(state.optimizer.state[state.optimized()[0]]["exp_avg"], expected)
    assert torch.equal(state.optimizer.state[state.optimized()[1]]["exp_avg"], kept["exp_avg"])


def test_complex_weights_are_averaged_as_pairs_of_reals() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor([1 + 2j])), "r": nn.Parameter(torch.tensor([3.0]))})
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    vector = as_vector(state.weights())
    assert sorted(vector.tolist()) == [1.0, 2.0, 3.0]
    move_to(state.weights(), vector + 2.0, 0.5)
    assert model["w"].tolist() == [2 + 3j]


@pytest.fixture
def address() -> Iterator[tuple[Address, Shelf, list[str]]]:
    """Return the address of a member that serves its shelf; for the listed requests it hangs up or falls silent."""
    shelf, faults = Shelf(), list[str]()
    over = threading.Event()

    def serve(caller: Caller) -> None:
        incoming = Incoming(caller, own("secret"))
        whole = incoming.pour

        def pour(data: memoryview) -> None:
            if faults:
                whole(data[: len(data) // 2])
                if faults.pop() == "hang":
                    over.wait(BOUND_S)
                raise ConnectionError("gone")
            whole(data)

        incoming.pour = pour  # type: ignore[method-assign]
        shelf.serve(incoming)

    listener = Listener.at("127.0.0.1", 0, serve, "test")
    yield Address(*listener.address, 0), shelf, faults
    over.set()
    listener.close()


def test_a_model_lost_in_transit_is_none_and_the_next_one_arrives(
    address: tuple[Address, Shelf, list[str]],
) -> None:
    where, shelf, faults = address
    fetcher, model = Fetcher(own("secret")), torch.arange(5_000_000, dtype=torch.float32)
    assert fetcher.fetch(0, 1, where, "model", Interrupt(1)).wait() is None
    shelf.put("model", model)
    for fault in ([], ["hang up"], []):
        faults += fault
        found = fetcher.fetch(0, 1, where, "model", Interrupt(1)).wait()
        assert (found is None) == bool(fault)
        assert found is None or torch.equal(found.view(torch.float32), model)
    fetcher.close()


def test_a_partner_that_hangs_is_waited_for_no_longer_than_its_ring_lasts(
    address: tuple[Address, Shelf, list[str]],
) -> None:
    where, shelf, faults = address
    shelf.put("model", torch.zeros(1000))
    faults.append("hang")
    fetcher, interrupt = Fetcher(own("secret")), Interrupt(1)
    fetch = fetcher.fetch(0, 1, where, "model", interrupt)
    # otherwise the next fetch would meet the fault
    poll_until(lambda: not faults, "half of the model to be on its way")
    interrupt.abort()
    assert fetch.wait() is None
    found = fetcher.fetch(0, 1, where, "model", Interrupt(2)).wait()
    assert found is not None
    assert len(found) == 4000
    fetcher.close()


def test_a_member_that_does_not_listen_has_no_model() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    fetcher = Fetcher(own("secret"))
    assert fetcher.fetch(0, 1, Address("127.0.0.1", port, 0), "model", Interrupt(1)).wait() is None

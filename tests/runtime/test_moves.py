"""State moves over channels that are lists here: each kind of source, and refusals."""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from morph.checkpoint.manifest import write_manifest
from morph.checkpoint.unit_files import write_unit
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.errors import CheckpointDamaged, CheckpointError, GenerationAborted
from morph.contract.messages import StateSource
from morph.contract.rules import CheckpointRules
from morph.cutting.cuts.cut_model import ParameterUnit
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.reshape.moves import MoveContext, send_in_background, start_sending, take_units
from morph.runtime.state.unit_state import UnitState
from tests.waiting import BOUND_S

UNITS = {f"s{index}": ParameterUnit(f"s{index}", (index,), (f"w{index}",)) for index in range(4)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


def make_unit(name: str, value: float = 0.0, version: int = 0) -> UnitState:
    unit = UNITS[name]
    state = UnitState(unit, {unit.parameters[0]: torch.full((3,), value)}, sgd, num_micro_batches=1, exact=True)
    state.version = version
    return state


class FakePending:
    def __init__(self, finish: Any) -> None:
        self._finish = finish

    def wait(self, what: str, timeout_s: float = 0.0) -> float:
        assert what
        self._finish()
        return 0.0


class FakeChannel:
    """One direction: a message waits in a queue until it is received."""

    def __init__(self, messages: deque[Tensor], *, sending: bool) -> None:
        self._messages = messages
        self._sending = sending

    def transfer(self, tensor: Tensor) -> FakePending:
        if self._sending:
            self._messages.append(tensor.clone())
            return FakePending(lambda: None)
        return FakePending(lambda: tensor.copy_(self._messages.popleft()))


class Network:
    def __init__(self, tmp_path: Path) -> None:
        self.messages: defaultdict[tuple[str, str], deque[Tensor]] = defaultdict(deque)
        self.url = str(tmp_path)
        self.ahead: dict[str, UnitState] = {}
        self.made: list[tuple[str, bool]] = []

    def context(self, worker: str, held: dict[str, UnitState], version: int = 2) -> MoveContext:
        def channel(sender: str, receiver: str) -> Any:
            assert worker in (sender, receiver)
            return FakeChannel(self.messages[sender, receiver], sending=worker == sender)

        def make(name: str, empty: bool) -> UnitState:
            self.made.append((name, empty))
            return make_unit(name, math.nan if empty else 0.0)

        return MoveContext(
            worker=worker,
            version=version,
            checkpoint_url=self.url,
            held=held,
            make_unit=make,
            channel=channel,
            adopt=lambda unit: self.ahead[unit],
            interrupt=Interrupt(1),
        )


@pytest.fixture
def network(tmp_path: Path) -> Network:
    return Network(tmp_path)


def source(worker: str, unit: str, kind: str, peer: str | None = None) -> StateSource:
    return StateSource.model_validate({"worker": worker, "unit": unit, "kind": kind, "peer": peer})


def value_of(state: UnitState) -> float:
    (parameter,) = state.parameters.values()
    return float(parameter.detach()[0])


def test_two_workers_take_units_from_each_other(network: Network) -> None:
    held = {
        "a": {"s0": make_unit("s0", 10.0, 2), "s1": make_unit("s1", 11.0, 2), "s2": make_unit("s2", 12.0, 2)},
        "b": {"s3": make_unit("s3", 13.0, 2)},
    }
    sources = [
        source("b", "s0", "peer", "a"),
        source("a", "s3", "peer", "b"),
        source("b", "s2", "peer", "a"),
        source("a", "s1", "keep"),
    ]
    contexts = {worker: network.context(worker, units) for worker, units in held.items()}
    leaving = [pending for context in contexts.values() for pending in start_sending(sources, context)]
    taken = {worker: take_units(sources, context) for worker, context in contexts.items()}
    for pending in leaving:
        pending.wait("it to leave")
    assert {name: value_of(state) for name, state in taken["a"][0].items()} == {"s3": 13.0, "s1": 11.0}
    assert {name: value_of(state) for name, state in taken["b"][0].items()} == {"s0": 10.0, "s2": 12.0}
    assert taken["a"][0]["s1"] is held["a"]["s1"]
    assert taken["b"][0]["s0"].version == 2
    assert taken["a"][1] > 0
    assert taken["b"][1] > taken["a"][1]
    assert not any(network.messages.values())


def test_a_received_state_has_its_own_memory(network: Network) -> None:
    held = {"s0": make_unit("s0", 1.0, 2)}
    sources = [source("b", "s0", "peer", "a")]
    start_sending(sources, network.context("a", held))
    units, _ = take_units(sources, network.context("b", {}))
    with torch.no_grad():
        for parameter in held["s0"].parameters.values():
            parameter.zero_()
    assert value_of(units["s0"]) == 1.0


def test_a_fresh_start_makes_units_anew(network: Network) -> None:
    units, received = take_units([source("a", "s1", "initial")], network.context("a", {}, version=0))
    assert value_of(units["s1"]) == 0.0
    assert received == 0


def save(network: Network, version: int) -> Manifest:
    tensors = make_unit("s1", 7.0, version).tensors()
    written = write_unit(network.url, version, "s1", "a", tensors)
    manifest = Manifest(
        fingerprint="f",
        version=version,
        units=(UnitFile(**written.model_dump(exclude={"worker", "version", "stall_s"})),),
    )
    write_manifest(network.url, manifest)
    return manifest


def test_units_come_from_the_checkpoint_of_the_wanted_version(network: Network) -> None:
    save(network, 2)
    save(network, 4)
    units, received = take_units([source("a", "s1", "checkpoint")], network.context("a", {}, version=2))
    assert units["s1"].version == 2
    assert value_of(units["s1"]) == 7.0
    assert received == 0


def test_units_that_a_worker_wrote_itself_are_not_read_from_storage(network: Network) -> None:
    manifest = save(network, 2)
    named = {entry.unit: entry.sha256 for entry in manifest.units}
    for file in (Path(network.url) / "v00000002").glob("s1-*"):
        file.unlink()
    own = make_unit("s1", value=7.0, version=2).tensors()
    context = replace(
        network.context("a", {}, version=2),
        host_copy=lambda version, unit, sha256: own if (version, unit, sha256) == (2, "s1", named["s1"]) else None,
    )
    units, _ = take_units([source("a", "s1", "checkpoint")], context)
    assert value_of(units["s1"]) == 7.0
    with pytest.raises(CheckpointError, match="s1"):
        take_units([source("a", "s1", "checkpoint")], network.context("a", {}, version=2))


def test_only_units_without_a_holder_are_made_with_initial_numbers(network: Network) -> None:
    save(network, 2)
    start_sending([source("b", "s0", "peer", "a")], network.context("a", {"s0": make_unit("s0", 1.0, 2)}))
    sources = [source("b", "s0", "peer", "a"), source("b", "s1", "checkpoint")]
    units, _ = take_units(sources, network.context("b", {}))
    take_units([source("b", "s2", "initial")], network.context("b", {}, version=0))
    assert network.made == [("s0", True), ("s1", True), ("s2", False)]
    assert [value_of(units[name]) for name in ("s0", "s1")] == [1.0, 7.0]


def test_units_that_a_worker_cannot_read_are_read_by_another(network: Network) -> None:
    """The reader's own units, and those that it wrote itself, play no role."""
    save(network, 2)
    held = {"s0": make_unit("s0", 3.0, 2)}
    sources = [source("b", "s0", "peer", "a"), source("b", "s1", "checkpoint", "a"), source("a", "s0", "keep")]
    reader = network.context("a", held)
    send_in_background(sources, reader, Interrupt(1))()
    assert take_units(sources, reader)[0] == held
    elsewhere = replace(network.context("b", {}), checkpoint_url=str(Path(network.url) / "out of reach"))
    units, received = take_units(sources, elsewhere)
    assert [value_of(units[name]) for name in ("s0", "s1")] == [3.0, 7.0]
    assert units["s1"].version == 2
    assert received > 0
    assert not any(network.messages.values())


def test_a_failed_read_for_another_worker_is_reported(network: Network) -> None:
    with pytest.raises(CheckpointError, match=r"v00000002.*no such checkpoint"):
        send_in_background([source("b", "s1", "checkpoint", "a")], network.context("a", {}), Interrupt(1))()


def test_a_missing_checkpoint_is_named(network: Network) -> None:
    with pytest.raises(CheckpointError, match=r"v00000002.*no such checkpoint"):
        take_units([source("a", "s1", "checkpoint")], network.context("a", {}))


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let storage give manifests and hang for everything else until this event is set."""
    answer = threading.Event()

    def hang(*_: object) -> Any:
        answer.wait(BOUND_S)
        raise TimeoutError("too late")

    monkeypatch.setattr("morph.runtime.reshape.moves.read_unit", hang)
    yield answer
    answer.set()


class HastyWithUnits(CheckpointRules):
    """Storage that gives up soon but reads the manifest, whose size is unknown."""

    def file_limit_s(self, num_bytes: int) -> float:
        return 0.05 if num_bytes else 60.0


def test_storage_that_hangs_is_given_up_and_not_counted_as_damaged(network: Network, hung: threading.Event) -> None:
    save(network, 2)
    context = replace(network.context("a", {}, version=2), rules=HastyWithUnits())
    with pytest.raises(CheckpointError, match=r"v00000002.*unit s1 to be read") as caught:
        take_units([source("a", "s1", "checkpoint")], context)
    assert not isinstance(caught.value, CheckpointDamaged)


def test_a_wait_for_storage_ends_with_its_generation(network: Network, hung: threading.Event) -> None:
    save(network, 2)
    context = network.context("a", {}, version=2)
    threading.Timer(0.05, context.interrupt.abort).start()
    with pytest.raises(GenerationAborted):
        take_units([source("a", "s1", "checkpoint")], context)


def test_other_workers_sources_are_none_of_ones_business(network: Network) -> None:
    sources = [source("b", "s0", "peer", "c"), source("b", "s1", "checkpoint"), source("c", "s0", "keep")]
    context = network.context("a", {})
    assert start_sending(sources, context) == []
    assert take_units(sources, context) == ({}, 0)


def test_a_unit_at_another_version_is_our_own_mistake(network: Network) -> None:
    with pytest.raises(AssertionError, match="unit s0 is at version 1, not 2"):
        take_units([source("a", "s0", "keep")], network.context("a", {"s0": make_unit("s0", 1.0, 1)}))


def test_units_leave_while_others_arrive_and_failures_reach_waiters(network: Network) -> None:
    held = {"a": {"s0": make_unit("s0", 3.0, 2)}, "b": {"s1": make_unit("s1", 5.0, 2)}}
    sources = [source("b", "s0", "peer", "a"), source("a", "s1", "peer", "b")]
    contexts = {name: network.context(name, held[name]) for name in held}
    for wait in [send_in_background(sources, context, Interrupt(1)) for context in contexts.values()]:
        wait()
    taken = {name: take_units(sources, context)[0] for name, context in contexts.items()}
    assert (value_of(taken["b"]["s0"]), value_of(taken["a"]["s1"])) == (3.0, 5.0)
    with pytest.raises(KeyError, match="s0"):
        send_in_background(sources, network.context("a", {}), Interrupt(1))()


def test_an_abort_ends_the_wait_for_units_that_are_made_ready(network: Network) -> None:
    interrupt = Interrupt(1)
    interrupt.abort()
    with pytest.raises(GenerationAborted):
        send_in_background((), network.context("a", {}), interrupt)()

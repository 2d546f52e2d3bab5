"""Every link implementation that needs no GPU passes the contract; and the additional rules of staging."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from morph.contract.errors import ConfigError, GenerationAborted
from morph.runtime.device.devices import Device, check_kernels, has_kernels, usable_device
from morph.runtime.device.links import HostLink, StagedLink
from morph.runtime.device.staging import Staging
from morph.runtime.groups.channels import Pending
from morph.runtime.groups.interrupt import Interrupt
from tests.device.device_tensors import on_device, placed, read
from tests.device.fake_device import BOUND_S, DeviceLost, FakeDevice, Ticking
from tests.device.link_contract import Ends, LinkContract, Pair, Spec


def staged_ends(pair: Pair, devices: dict[str, Device]) -> Ends:
    staging = {name: Staging(device) for name, device in devices.items()}
    interrupts = pair.interrupts
    return Ends(
        pair,
        {name: StagedLink(pair.channel(name), staging[name], interrupts[name]) for name in "ab"},
        staging["a"],
        place=placed if isinstance(devices["a"], FakeDevice) else torch.clone,
        read=read,
    )


class TestGloo(LinkContract):
    @pytest.fixture
    def ends(self, pair: Pair) -> Ends:
        links = {name: HostLink(pair.channel(name)) for name in "ab"}
        return Ends(pair, links)  # type: ignore[arg-type]


class TestStagedOnAFakeDevice(LinkContract):
    @pytest.fixture
    def ends(self, pair: Pair) -> Iterator[Ends]:
        devices = {name: FakeDevice() for name in "ab"}
        made = staged_ends(pair, dict(devices))
        ticking = Ticking(*devices.values())
        yield made
        ticking.stop()


class Wire:
    """A carrier whose messages complete when the test says so."""

    def __init__(self) -> None:
        self.handed_over: list[Tensor] = []
        self.transfers: list[Handed] = []

    def transfer(self, tensor: Tensor) -> Handed:
        self.handed_over.append(tensor)
        self.transfers.append(Handed())
        return self.transfers[-1]

    def reduce(self, tensor: Tensor, operation: object) -> Handed:
        return self.transfer(tensor)


class Handed(Pending):
    def __init__(self) -> None:
        self.done, self.done_at_s = False, 0.0


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def settled(device: FakeDevice, staging: Staging) -> None:
    """Let the device, and the thread behind it, do everything."""
    while device.tick():
        pass
    through: list[bool] = []
    staging.to_host([], lambda _: through.append(True), lambda _: None)
    with device.condition:
        while device.tick():
            pass
    for _ in range(1000):
        if through:
            return
        device.condition.acquire()
        device.condition.wait(BOUND_S / 1000)
        device.condition.release()
    raise AssertionError("the staging thread stands still")


def test_nothing_is_handed_to_the_wire_before_its_copy_is_done(device: FakeDevice) -> None:
    wire, staging = Wire(), Staging(device)
    leaving = StagedLink(wire, staging, Interrupt(1)).send([on_device(torch.ones(4))])
    assert wire.handed_over == []
    assert not leaving.done
    settled(device, staging)
    assert [tensor.tolist() for tensor in wire.handed_over] == [[1.0] * 4]
    assert not leaving.done
    wire.transfers[0].done = True
    assert leaving.done


def test_an_arrival_that_is_used_without_being_taken_is_poison(device: FakeDevice) -> None:
    wire, staging = Wire(), Staging(device)
    arrival = StagedLink(wire, staging, Interrupt(1)).receive([Spec((4,))])
    wire.handed_over[0].fill_(5.0)
    assert not arrival.done
    wire.transfers[0].done = True
    assert arrival.done
    (untaken,) = arrival._copied[0]  # type: ignore[attr-defined]
    assert bool(untaken.isnan().all())
    (taken,) = arrival.take()
    assert taken.tolist() == [5.0] * 4
    assert device.used == [taken.data_ptr()]


def test_sending_does_not_wait_for_a_hanging_device_and_aborts(device: FakeDevice) -> None:
    device.hang()
    wire, staging, interrupt = Wire(), Staging(device), Interrupt(1)
    leaving = StagedLink(wire, staging, interrupt).send([on_device(torch.ones(4))])
    interrupt.abort()
    with pytest.raises(GenerationAborted):
        leaving.wait("it to leave", BOUND_S)
    assert wire.handed_over == []


def test_waiting_for_a_send_raises_the_loss_of_the_device(device: FakeDevice) -> None:
    device.hang()
    wire, staging = Wire(), Staging(device)
    leaving = StagedLink(wire, staging, Interrupt(1)).send([on_device(torch.ones(4))])
    device.abort()
    with pytest.raises(DeviceLost):
        leaving.wait("it to leave", BOUND_S)


def test_nothing_of_an_aborted_generation_is_handed_to_the_wire(device: FakeDevice) -> None:
    wire, staging, interrupt = Wire(), Staging(device), Interrupt(1)
    StagedLink(wire, staging, interrupt).send([on_device(torch.ones(4))])
    interrupt.abort()
    settled(device, staging)
    assert wire.handed_over == []


def test_a_batch_on_the_device_no_longer_depends_on_the_loaders_memory(device: FakeDevice) -> None:
    loaded = torch.ones(3)
    batch = Staging(device).place({"x": loaded, "y": torch.tensor(2)})
    loaded.fill_(5.0)
    assert batch["x"].tolist() == [1.0] * 3
    assert int(batch["y"]) == 2


def test_the_fake_device_tells_of_a_source_that_was_let_go(device: FakeDevice) -> None:
    stream = device.stream()
    stream.copy(device.pinned((2,), torch.float32), on_device(torch.ones(2)))
    with pytest.raises(AssertionError, match="let go"):
        device.tick()


def test_the_fake_devices_events_come_in_order_and_across_streams(device: FakeDevice) -> None:
    first, second = device.stream(), device.stream()
    into, source = device.pinned((2,), torch.float32), on_device(torch.ones(2))
    second.wait(made := first.record())
    second.copy(into, source)
    behind = second.record()
    assert not made.done
    assert bool(into.isnan().all())
    device.current.wait(behind)
    assert made.done
    assert into.tolist() == [1.0, 1.0]


def test_a_synchronisation_with_a_fake_device_hangs_until_abort(device: FakeDevice) -> None:
    device.hang()
    event = device.stream().record()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(event.wait)
        assert not waiting.done()
        device.abort()
        with pytest.raises(DeviceLost):
            waiting.result(BOUND_S)


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"], False),  # a V100, CUDA 13
        ((7, 0), ["sm_50", "sm_60", "sm_70", "sm_75"], True),
        ((8, 9), ["sm_75", "sm_80", "sm_90"], True),  # binary code of 8.0
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 1), ["sm_90", "compute_90"], True),  # code that the device's driver compiles
        ((7, 0), ["sm_75", "compute_75"], False),
        ((9, 0), [], True),
    ],
)
def test_a_device_without_kernels_in_this_torch_is_known(
    capability: tuple[int, int], built_for: list[str], runs: bool
) -> None:
    assert has_kernels(capability, built_for) is runs


def test_a_device_without_kernels_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernels(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, answer in {
        "get_device_capability": (7, 0),
        "get_arch_list": ["sm_75", "sm_80"],
        "get_device_name": "Tesla V100",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    said = r"^vms.device: torch \S+ has no kernels for this device, Tesla V100 .*compute capability 7.0.*sm_75, sm_80"
    with pytest.raises(ConfigError, match=said):
        check_kernels(torch.device("cuda"))


def test_a_device_is_refused_where_this_torch_cannot_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ConfigError, match=r"^vms.device: .*: torch \S+ is built without CUDA \(got 'cuda'\)"):
        check_kernels(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert usable_device("cuda:1", numbered=True) == torch.device("cuda", 1)
    for name in ("cuda:7", "mps", "kuda"):
        with pytest.raises(ConfigError, match=rf"^a: b: .*\(got '{name}'\); allowed: cpu, cuda, cuda:0, cuda:1$"):
            usable_device(name, source="a", field="b", numbered=True)

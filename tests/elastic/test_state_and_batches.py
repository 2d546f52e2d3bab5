from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn
from typer.testing import CliRunner

from morph.cli.main import app
from morph.contract.errors import InputError
from morph.elastic import participation
from morph.elastic import state as state_module
from morph.elastic.consensus.member import founder, initiate
from morph.elastic.consensus.messages import Accept, Ballot, Excluded, Reconcile, Restart, Ring, Send, Stop
from morph.elastic.mini_batches import batches
from morph.elastic.optimizer import Optimizer
from morph.elastic.participation import SNAPSHOT, STEP, CatchUpLog
from morph.elastic.peers import Address, decode, encode
from morph.elastic.shelf import Shelf
from morph.elastic.state import TrainingState
from morph.elastic.sums import BUCKET_BYTES, Accumulation, Kind, MemberSums, buckets_of
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.parts import Memory
from tests.waiting import BOUND_S


def trained(seed: int, num_steps: int) -> TrainingState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (1 + seed), betas=(0.8, 0.9))
    state = TrainingState(model, optimizer, exponents={"0.weight": 40})
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        state.num_steps += 1
    return state


class Loop:
    """A loop's moving average and best value, with what its own code does to them after a step."""

    def __init__(self, seed: int) -> None:
        state = trained(seed, 0)
        self.average, self.best = torch.optim.swa_utils.AveragedModel(state.model), {"loss": math.inf, "at": (0,)}
        carried = {"average": self.average, "best": self.best, "scaler": torch.amp.GradScaler("cpu")}
        self.state = TrainingState(state.model, state.optimizer, carried=carried)

    def step(self) -> None:
        self.state.num_steps += 1

    def after_step(self) -> None:
        self.average.update_parameters(self.state.model)
        self.best.update(loss=1.0 / self.state.num_steps, at=(self.state.num_steps,))

    @property
    def told(self) -> tuple[int, dict[str, Any], list[float]]:
        return int(self.average.n_averaged), self.best, self.average.module[0].weight.flatten().tolist()


@pytest.mark.parametrize("has_passed", [True, False], ids=["sent in a step", "sent before it"])
@pytest.mark.parametrize("in_step", [True, False], ids=["received in the step before", "received between steps"])
@pytest.mark.parametrize("is_caught_up", [True, False])
def test_a_loops_own_state_arrives_once_however_far_both_loops_are(
    has_passed: bool, in_step: bool, is_caught_up: bool
) -> None:
    one, other = Loop(0), Loop(1)
    for _ in range(3):
        one.step()
        one.after_step()
    if has_passed:
        one.state.pass_boundary()
    if is_caught_up:
        other.state.unpack(one.state.pack(with_carried=False))
        assert other.told[0] == 0
        other.state.unpack_facts(one.state.pack_facts())
    else:
        other.state.unpack(one.state.pack())
    if in_step:  # the step came with the state, and this loop's own code follows it
        other.after_step()
    other.state.load_carried(in_step=False)
    other.state.load_carried(in_step=True)
    assert other.told == one.told
    other.after_step()
    assert other.told[0] == 4  # nothing of it is loaded twice
    other.state.load_carried(in_step=True)
    assert other.told[0] == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"average": 3.5}, r"state\['average'\]: has no state \(got 'float'\); allowed: objects with state_dict"),
        ({"best": {"loss": object()}}, r"state\['best'\]: has a state that cannot be sent \(got 'object'\)"),
    ],
)
def test_what_cannot_travel_is_refused(given: dict[str, Any], said: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(InputError, match=said):
        Optimizer(torch.optim.SGD(model.parameters()), model, state=given)


def test_a_worker_with_other_objects_than_the_oldest_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"state: names other objects than there \(got 'nothing'\); allowed: 'average'"
    ):
        trained(1, 0).unpack(Loop(0).state.pack())


def test_a_loop_continues_from_a_saved_state_like_one_that_was_not_interrupted(tmp_path: Path) -> None:
    def loop(num_steps: int, saved: Path | None = None) -> tuple[Optimizer, nn.Module, Any]:
        torch.manual_seed(0 if saved is None else 1)
        model = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(model)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
        optimizer = Optimizer(inner, model, lr_scheduler=schedule, state={"average": average})
        if saved is not None:
            optimizer.load_state_dict(torch.load(saved, weights_only=True))
        data = torch.linspace(-1, 1, 24).reshape(24, 1)
        for _ in batches(data, global_batch=8, share_size=4, num_steps=num_steps):
            optimizer.step(lambda share: model(share).square().mean())
            average.update_parameters(model)
        return optimizer, model, average

    optimizer, *_ = loop(5)
    torch.save(optimizer.state_dict(), tmp_path / "saved.pt")
    _, *whole = loop(9)
    continued, *resumed = loop(9, tmp_path / "saved.pt")
    for one, other in zip(whole, resumed, strict=True):
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
    with pytest.raises(InputError, match="comes too late; allowed: a call before the first step"):
        continued.load_state_dict(optimizer.state_dict())
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="is not a state of this model and optimizer"):
        Optimizer(torch.optim.SGD(model.parameters()), model).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("dtype", state_module._TYPES)
def test_packed_bytes_are_a_safetensors_file(dtype: torch.dtype) -> None:
    tensors = {"b": torch.arange(6).reshape(2, 3).to(dtype), "a": torch.tensor(1).to(dtype), "c": torch.empty(0, 2)}
    packed = state_module._packed(tensors, {"x": 1})
    for given in (state_module._unpacked(packed)[0], load(packed.numpy().tobytes())):
        assert all(torch.equal(given[name], one) and given[name].dtype == one.dtype for name, one in tensors.items())


def step_of(state: TrainingState) -> Any:
    """Do a step, and pack it as does a member that lets others in."""
    state.optimizer.zero_grad()
    state.model(torch.randn(6, 4)).square().mean().backward()
    state.optimizer.param_groups[0]["lr"] *= 0.5
    settings = state.settings()
    packed = state.pack_gradients({name: one.grad for name, one in state.parameters().items() if one.grad is not None})
    state.optimizer.step()
    state.num_steps += 1
    applied = state.pack_applied(settings)
    state.advance_schedule()
    return applied, packed


def test_a_follower_of_a_members_steps_has_its_state_bit_for_bit() -> None:
    one, other = trained(0, 3), trained(1, 0)
    shelf = Shelf()
    catch_up_log = CatchUpLog(shelf)
    catch_up_log.boundary(one, (), is_wanted=True, is_apart=False)
    other.unpack(torch.cat(shelf._held[SNAPSHOT]))
    for number in range(3, 6):
        catch_up_log.boundary(one, step_of(one), is_wanted=True, is_apart=False)
        other.unpack_step(torch.cat(shelf._held[f"{STEP}{number}"]))
    assert catch_up_log.covers(6)
    assert torch.equal(one.pack(), other.pack())
    catch_up_log.boundary(one, step_of(one), is_wanted=False, is_apart=False)
    assert (shelf._held, catch_up_log.covers(7)) == ({}, False)


def test_steps_that_outgrow_the_state_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participation, "LEAST_BOUND_BYTES", 0)
    one, shelf = trained(0, 3), Shelf()
    catch_up_log = CatchUpLog(shelf)
    for _ in range(30):
        catch_up_log.boundary(one, step_of(one), is_wanted=True, is_apart=False)
    assert list(shelf._held) == [SNAPSHOT]
    assert len(shelf._held[SNAPSHOT][0]) == 0
    assert not catch_up_log.covers(one.num_steps)


def test_where_models_differ_joiners_come_in_without_a_state() -> None:
    shelf = Shelf()
    CatchUpLog(shelf).boundary(trained(0, 1), (), is_wanted=True, is_apart=True)
    assert len(shelf._held[SNAPSHOT][0]) == 0


@pytest.mark.parametrize(
    "message",
    [
        Accept(Ring(Ballot(3, 1), (1, 2, 9)), 7, 1, (2,), (9,)),
        Restart(Ballot(3, 1)),
        Stop(Ballot(3, 1), 1, 4),
        Excluded(Ballot(3, 1)),
    ],
)
def test_a_message_is_read_as_it_was_written(message: Any) -> None:
    assert decode(encode(message, {})) == (message, {})


def test_an_attempt_brings_the_addresses_of_its_joiners() -> None:
    _, outputs = initiate(founder(0, (0, 1)), joiners=(1024,))
    (token,) = [one.message for one in outputs if isinstance(one, Send)]
    book = {0: Address("a", 1, 2), 1024: Address("b", 3, 4)}
    assert isinstance(token, Reconcile)
    assert decode(encode(token, book)) == (token, {1024: Address("b", 3, 4)})


BROKEN = [b"{}", b'["Nobody", [], {}]', b'["Restart", [3], {}]', b"\xff", b'["Stop", [[1, 2]], {}]']


@pytest.mark.parametrize("body", BROKEN)
def test_invalid_messages_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        decode(body)


def test_buckets_are_filled_from_the_last_parameter_on() -> None:
    sizes = {"a": 10, "b": BUCKET_BYTES // 4, "c": 10, "d": 10}
    parameters = {name: nn.Parameter(torch.empty(size)) for name, size in sizes.items()}
    assert buckets_of(parameters) == [["d", "c", "b"], ["a"]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"global_batch": 0}, "global_batch: is not a batch size (got 0)"),
        ({"global_batch": 12, "share_size": 5}, "share_size: does not divide the batch (got 5)"),
        ({"global_batch": 12, "num_steps": -1}, "num_steps: is not a number of steps (got -1)"),
    ],
)
def test_batches_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        batches(torch.arange(24), **given)
    assert said in str(caught.value)


def test_a_batch_makes_at_most_32_shares_unless_more_are_asked_for() -> None:
    assert batches(torch.arange(24), global_batch=256).num_shares == 32
    assert batches(torch.arange(24), global_batch=21).num_shares == 21
    assert batches(torch.arange(24), global_batch=64, share_size=1).num_shares == 64


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--join", "nowhere"], "--join: is not an address (got 'nowhere'); allowed: HOST:PORT"),
        (["--join", "127.0.0.1:1,here"], "--join: is not an address (got 'here')"),
        (["--join", "127.0.0.1:1"], "MORPH_ELASTIC_SECRET: is not set"),
        (["--workers", "3", "--founders", "2"], "--founders: is less than --workers (got 2)"),
        (["--listen", "192.0.2.1"], "--listen: cannot be listened on"),
        ([], "COMMAND: cannot be started: No such file or directory (got 'no-such-program')"),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_why(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["elastic", *options, "--", "no-such-program"])
    assert result.exit_code == 2
    assert said in result.output


def test_importing_it_loads_no_torch() -> None:
    imports = "import sys, morph; morph.elastic; import morph.elastic.launcher"
    code = f"{imports}; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * BOUND_S, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("accumulation", ["exact", "fast"])
def test_gradients_are_summed_where_they_are(accumulation: Accumulation) -> None:
    """Torch's device without numbers, like any device, refuses to add tensors of another one."""
    model = nn.Linear(4, 8, device="meta")
    parameters = dict(model.named_parameters())
    kind = Kind(accumulation, 4, parameters, {}, buckets_of(parameters))
    memory = Memory(torch.device("meta"))
    sums = MemberSums(kind, {}, None, Interrupt(1), 2, memory)
    for _ in range(2):
        for name, parameter in parameters.items():
            parameter.grad = torch.ones_like(parameter)
            sums.add_gradient(name, parameter)
        sums.add_loss(1.0)
    assert {one.device.type for one in memory.used.values()} == {"meta"}


def test_a_model_on_two_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2, device="meta"))
    with pytest.raises(InputError, match=r"several devices.*cpu and meta"):
        Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

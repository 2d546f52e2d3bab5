from __future__ import annotations

import hashlib
import json
import logging
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from morph.cutting import cut, export_job
from morph.cutting.deferred_init.construct import BuiltModel, LazyTensors, build_model
from morph.jobs.job import load_job
from tests.waiting import BOUND_S

MIB = 1 << 20
JOBS = Path(__file__).parents[2] / "configs/jobs"
TINY_GPT = str(JOBS / "tiny_gpt.py:job")


class Assorted(nn.Module):
    """Weights made in all ways that constructors use."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(8, 8)
        nn.init.orthogonal_(self.plain.weight)
        nn.init.trunc_normal_(self.plain.bias, std=0.02)
        self.changed = nn.Linear(8, 8)
        self.changed.weight.data.normal_(0.0, 0.02)
        self.changed.weight.data[:2].zero_()
        self.changed.bias.data = torch.ones(8) * 3
        self.embedding = nn.Embedding(9, 8, padding_idx=0)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.listed = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.from_numpy = nn.Parameter(torch.from_numpy(np.arange(8.0)).float() + self.plain.bias)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.list = torch.linspace(0, 1, 3).tolist()
        self.copied = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.half = nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        with torch.no_grad():
            self.plain.weight.copy_(self.plain.weight.t() + self.changed.weight)
            self.plain.weight[0, 0] = 7.0


class UsesNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = float(self.layer.weight.detach().numpy().sum())


class PicksByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.places = nn.Parameter(torch.randn(torch.nonzero(torch.tril(torch.ones(3, 3))).shape[0]))


def wide() -> nn.Module:
    """Eight layers of 4 MiB."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))


def tensors(built: BuiltModel) -> LazyTensors:
    return LazyTensors(dict(built.model.named_parameters()) | dict(built.model.named_buffers()), built.tape)


class CountsBytes(TorchDispatchMode):
    """Adds up the sizes of the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[object, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = (storage, storage.nbytes())
        return result

    def total(self) -> int:
        return sum(size for _, size in self.made.values())


def test_a_constructor_is_recorded_without_a_real_weight() -> None:
    built = build_model(Assorted, 0)
    assert built.not_recorded is None
    assert built.model.rates == [0.0, 0.25, 0.5]
    assert built.model.list == [0.0, 0.5, 1.0]
    assert built.model.head.weight is built.model.embedding.weight


def test_all_at_once_equals_one_at_a_time() -> None:
    lazy = tensors(build_model(Assorted, 3))
    together = lazy.all_at_once()
    assert len(together) > 30
    for name in reversed(list(lazy)):
        alone = lazy[name]
        assert torch.equal(alone, together[name]), name
        assert lazy.specs[name] == (tuple(alone.shape), alone.dtype)
        assert torch.isfinite(alone.float()).all()


def test_made_weights_equal_those_of_the_constructor() -> None:
    lazy = tensors(build_model(Assorted, 0))
    assert torch.equal(lazy["changed.weight"][:2], torch.zeros(2, 8))
    assert 0 < lazy["changed.weight"][2:].std() < 0.04
    assert torch.equal(lazy["changed.bias"], torch.full((8,), 3.0))
    assert torch.equal(lazy["embedding.weight"][0], torch.zeros(8))
    assert torch.equal(lazy["listed"], torch.tensor([1.0, 2.0]))
    assert torch.equal(lazy["from_numpy"], torch.arange(8.0) + lazy["plain.bias"])
    assert torch.equal(lazy["mask"], torch.tril(torch.ones(4, 4)))
    assert lazy["half.weight"].dtype == torch.bfloat16
    assert lazy["plain.weight"][0, 0] == 7.0
    orthogonal = (lazy["plain.weight"] - lazy["changed.weight"])[1:]
    torch.testing.assert_close(orthogonal @ orthogonal.t(), torch.eye(7), atol=1e-5, rtol=0)
    norm = lazy["normed.parametrizations.weight.original1"].norm(dim=1, keepdim=True)
    torch.testing.assert_close(lazy["normed.parametrizations.weight.original0"], norm)


def test_weights_depend_on_the_seed_and_differ_from_each_other() -> None:
    first, second = tensors(build_model(Assorted, 0)), tensors(build_model(Assorted, 1))
    assert not torch.equal(first["embedding.weight"], second["embedding.weight"])
    assert not torch.equal(first["plain.bias"], second["plain.bias"])
    assert torch.equal(first["mask"], second["mask"])
    layers = tensors(build_model(lambda: nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), 0))
    assert not torch.equal(layers["0.weight"], layers["1.weight"])


SCRIPT = """
import hashlib, json, resource, sys
from dataclasses import replace
from functools import partial
from math import prod

from torch import nn

from morph.cutting import cut, export_job
from morph.cutting.deferred_init.construct import build_model
from morph.jobs.job import load_job


def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


build_model(lambda: nn.Linear(8, 8), 0)
before = peak_kib()
build_model(lambda: nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(8))), 0)
recording_kib = peak_kib() - before
job = load_job(sys.argv[2])
big = sys.modules[type(job.dataset()).__module__]
model = cut(export_job(replace(job, model=partial(big.model, 6, 6144, 48))), num_sections=6, micro_batch_size=1)
cutting_kib = peak_kib() - before
small = cut(export_job(load_job(sys.argv[3])), num_sections=4, micro_batch_size=3)
said = {
    "recording_kib": recording_kib,
    "num_parameters": sum(prod(shape) for shape, _ in model.parameter_specs.values()),
    "cutting_kib": cutting_kib,
    "fingerprint": small.fingerprint,
}
sys.path.insert(0, sys.argv[1])
from test_construct import Assorted, digest
print(json.dumps({**said, "digest": digest(Assorted)}))
"""


def digest(model: type[nn.Module]) -> str:
    made = tensors(build_model(model, 5)).all_at_once()
    return hashlib.sha256(b"".join(tensor.float().numpy().tobytes() for tensor in made.values())).hexdigest()


@pytest.fixture(scope="module")
def other_process() -> dict[str, Any]:
    """Run a process that only builds and cuts the model; return its output: the memory beyond that of imports."""
    big = str(JOBS / "gpt2_big.py:gpt2_2_5b")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(Path(__file__).parent), big, TINY_GPT]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=2 * BOUND_S).stdout
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.slow
def test_two_processes_make_equal_weights(other_process: dict[str, Any]) -> None:
    assert digest(Assorted) == other_process["digest"]


@pytest.mark.slow
def test_two_processes_find_the_same_fingerprint(other_process: dict[str, Any]) -> None:
    cut_model = cut(export_job(load_job(TINY_GPT)), num_sections=4, micro_batch_size=2)
    assert cut_model.fingerprint == other_process["fingerprint"]


def test_one_weight_takes_the_memory_of_one_weight() -> None:
    lazy = tensors(build_model(wide, 0))
    with CountsBytes() as counted:
        weight = lazy["3.weight"]
    assert weight.numel() * 4 == 4 * MIB
    assert counted.total() < 1.1 * 4 * MIB


@pytest.mark.slow
def test_recording_takes_no_memory_for_weights(other_process: dict[str, Any]) -> None:
    assert other_process["recording_kib"] < 50 * 1024  # the weights would take 8 GiB


@pytest.mark.slow
def test_a_model_of_gigabytes_is_cut_without_memory_for_it(other_process: dict[str, Any]) -> None:
    assert other_process["num_parameters"] > 3_000_000_000
    assert other_process["cutting_kib"] < 1 << 19  # the weights would take 12 GiB


@pytest.mark.parametrize("model", [UsesNumpy, PicksByValue])
def test_a_constructor_that_cannot_be_recorded_is_really_run_and_says_so(
    caplog: pytest.LogCaptureFixture, model: type[nn.Module]
) -> None:
    with caplog.at_level(logging.WARNING):
        built = build_model(model, 0)
    assert built.not_recorded
    assert "\n" not in built.not_recorded
    assert built.tape is None
    assert "every worker builds the whole model" in caplog.text
    assert torch.equal(tensors(built)["layer.weight"], built.model.layer.weight)


def test_an_error_of_the_constructor_is_the_users_own() -> None:
    with pytest.raises(ZeroDivisionError):
        build_model(lambda: nn.Linear(1, 1 // 0), 0)


class FromOtherGenerators(nn.Module):
    """Weights from numpy's and Python's generators, which are recorded as data; with ``really`` this is impossible."""

    def __init__(self, really: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.from_numpy(np.random.randn(4)))
        self.scale = nn.Parameter(torch.tensor([random.random()]))
        if really:
            self.sum = float(self.layer.weight.detach().numpy().sum())


@pytest.mark.parametrize("really", [False, True], ids=["recorded", "really built"])
def test_weights_from_numpy_and_python_generators_are_the_same_in_every_process(really: bool) -> None:
    built = [build_model(lambda: FromOtherGenerators(really), seed) for seed in (5, 5, 6)]
    assert all((one.tape is None) == really for one in built)
    one, again, other = (tensors(entry) for entry in built)
    for name in ("weight", "scale"):
        assert torch.equal(one[name], again[name])
        assert not torch.equal(one[name], other[name])


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tensors(build_model(Assorted, 0)).all_at_once()
    assert torch.equal(torch.get_rng_state(), before)

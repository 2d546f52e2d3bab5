"""Random weights equal those of a seeded global generator, whose state stays unchanged."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from morph.cutting.cache import artefact
from morph.cutting.deferred_init import tape
from morph.cutting.deferred_init.construct import LazyTensors, build_model


def parameters(make: Callable[[], nn.Module], seed: int) -> LazyTensors:
    built = build_model(make, seed)
    assert built.tape is not None
    return LazyTensors(dict(built.model.named_parameters()), built.tape)


class Seen(TorchDispatchMode):
    """Fails at the first operation at which the state of torch's global generator has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.default_generator.get_state()
        self.num_random = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_random += torch.Tag.nondeterministic_seeded in func.tags
        result = func(*args, **(kwargs or {}))
        assert torch.equal(torch.default_generator.get_state(), self.state), f"{func} drew from the global generator"
        return result


class Drawing(nn.Module):
    """Draws in every way for which torch has functions with and without a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.randn = nn.Parameter(torch.randn(40))
        self.randint = nn.Parameter(torch.randint(2, 900, (40,)).float())
        self.randperm = nn.Parameter(torch.randperm(40).float())
        self.like = nn.Parameter(torch.rand_like(self.randn) + torch.randn_like(self.randn))
        self.poisson = nn.Parameter(torch.poisson(torch.ones(40) * 3))
        self.bernoulli = nn.Parameter(torch.bernoulli(torch.ones(40) * 0.3))
        self.normal = nn.Parameter(torch.normal(torch.zeros(40), torch.ones(40)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(40)))


def test_making_weights_draws_from_no_global_generator_for_another_thread_may_train() -> None:
    values = parameters(Drawing, 0)
    with Seen() as seen:
        values.all_at_once()
    assert seen.num_random >= 9


def test_weights_are_those_of_the_global_generator_seeded_for_each_operation() -> None:
    made = parameters(Drawing, 5)
    draws = [
        lambda: torch.randn(40),
        lambda: torch.randint(2, 900, (40,)).float(),
        lambda: torch.randperm(40).float(),
    ]
    with torch.random.fork_rng(devices=[]):
        for number, (name, draw) in enumerate(zip(("randn", "randint", "randperm"), draws, strict=True)):
            torch.manual_seed(tape._seed(5, number))
            assert torch.equal(made[name], draw()), name


def test_functions_without_a_generator_argument_repeat_and_restore_the_global() -> None:
    def make() -> nn.Module:
        module = nn.Linear(40, 1)
        module.noise = nn.Parameter(nn.functional.dropout(torch.ones(40), 0.5))
        return module

    before = torch.get_rng_state()
    one, other = (parameters(make, 3)["noise"] for _ in range(2))
    assert torch.equal(one, other)
    assert 0 < int((one == 0).sum()) < 40
    assert torch.equal(torch.get_rng_state(), before)


def test_a_weight_without_numbers_is_laid_out_as_the_weight() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.randn(3, 5).t())
            self.part = nn.Parameter(torch.randn(6, 8)[:, :5])
            self.images = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
            self.narrow = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
            self.listed = nn.Parameter(torch.tensor([1.0, 2.0]))

    values = parameters(Odd, 0)
    for name in values:
        empty, real = values.empty(name, torch.device("cpu")), values[name]
        assert (empty.shape, empty.dtype, empty.stride()) == (real.shape, real.dtype, real.stride()), name


def seeded() -> nn.Module:
    torch.manual_seed(5)
    return Drawing()


def seeded_with_the_jobs_seed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def forked() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 8), nn.GRU(8, 3), Drawing())


def with_a_generator() -> nn.Module:
    model, generator = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    nn.init.trunc_normal_(model[1].weight, std=0.3, generator=generator)
    nn.init.uniform_(model[0].bias[2:7], generator=generator)
    model.drawn = nn.Parameter(torch.randn(6, generator=generator))
    return model


def with_a_noise_of_its_own() -> nn.Module:
    torch.manual_seed(7)
    model = nn.Linear(4, 40)
    with torch.no_grad():
        model.weight.copy_(torch.normal(model.weight, 0.1) + torch.nn.functional.dropout(model.weight, 0.5))
        model.bias.copy_(torch.poisson(model.bias.abs() * 20) + torch.rand(40))
    return model


def with_a_saved_state() -> nn.Module:
    before = torch.get_rng_state()
    torch.manual_seed(5)
    first = nn.Linear(4, 8)
    torch.set_rng_state(before)
    torch.manual_seed(int(torch.randint(9, (), generator=torch.Generator().manual_seed(1))))
    return nn.Sequential(first, nn.Linear(8, 2))


def with_numpy_and_python() -> nn.Module:
    model = nn.Linear(4, 8)
    np.random.seed(5)
    random.seed(5)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(np.random.randn(8, 4)) + np.random.RandomState(5).rand())
        model.bias.fill_(random.random())
    return model


def an_adapter_over_a_seeded_base() -> nn.Module:
    transformers.set_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    base = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian"))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft with a newer transformers
@pytest.mark.parametrize("make", [
    seeded, seeded_with_the_jobs_seed, forked, with_a_generator, with_a_noise_of_its_own, with_a_saved_state,
    with_numpy_and_python, an_adapter_over_a_seeded_base,
])  # fmt: skip
def test_a_constructor_that_seeds_itself_gives_the_weights_of_plain_pytorch(make: Callable[[], nn.Module]) -> None:
    made = parameters(make, 0)
    for operation in made.tape.operations if made.tape is not None else ():
        assert artefact.read_value(artefact.write_value(operation)).function is operation.function
    with torch.random.fork_rng(devices=[]):
        plain = dict(make().named_parameters())
    for name, value in made.all_at_once().items():
        assert torch.equal(value, plain[name]), name
        assert torch.equal(made[name], plain[name]), f"{name} alone"


def test_layers_after_a_forked_seed_are_drawn_from_the_jobs_seed() -> None:
    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            first = nn.Linear(4, 8)
        return nn.Sequential(first, nn.Linear(8, 2))

    one, again, other = (parameters(make, seed).all_at_once() for seed in (0, 0, 1))
    assert torch.equal(one["0.weight"], other["0.weight"])
    assert torch.equal(one["1.weight"], again["1.weight"])
    assert not torch.equal(one["1.weight"], other["1.weight"])

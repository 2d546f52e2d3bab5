"""Weights from files equal those of an ordinary load, and each worker reads only the weights that it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from morph.contract.errors import JobError
from morph.cutting import CutModel, cut, export_job
from morph.cutting.cache.cut_job import LoadedJob, load_and_cut
from morph.cutting.deferred_init.construct import LazyTensors, build_model, build_really
from morph.cutting.sections.section import Constants
from morph.jobs.files import imported_once
from morph.tracing.check import check_dependencies
from tests.cutting.conftest import make_job
from tests.cutting.test_construct import CountsBytes

pytestmark = pytest.mark.slow

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 32,
}
SLACK_BYTES = 1 << 18


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("weights")
    torch.manual_seed(1)
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=50, n_positions=32)).save_pretrained(
        found / "gpt2"
    )
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(found / "llama", max_shard_size="8KB")
    MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)).save_pretrained(found / "mixtral")
    safetensors.torch.save_file(layers(2, 16).state_dict(), found / "plain.safetensors")
    return found


def layers(number: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(number)))


def loaded(path: Path, number: int = 2, width: int = 16, *, assign: bool = False) -> nn.Module:
    model = layers(number, width)
    model.load_state_dict(safetensors.torch.load_file(path), assign=assign)
    return model


def opened(path: Path) -> nn.Module:
    model = layers(2, 16).to(torch.bfloat16)
    with safe_open(path, "pt") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(file.get_slice(name)[:])
        model[0].weight[:4] = file.get_tensor("1.weight")[4:8] * 2
    return model


def with_a_new_head(path: Path) -> nn.Module:
    """Draw after a seed what the files lack: to make the rest, on ``meta``, moves no generator on."""
    torch.manual_seed(3)
    with torch.device("meta"):
        nn.init.trunc_normal_(nn.Linear(16, 16).weight)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=5)
    model.adapter = nn.Linear(16, 4)
    return model


MAKES: dict[str, Callable[[Path], nn.Module]] = {
    "load_file": lambda folder: loaded(folder / "plain.safetensors"),
    "load_file, assigned": lambda folder: loaded(folder / "plain.safetensors", assign=True),
    "safe_open": lambda folder: opened(folder / "plain.safetensors"),
    "tied": lambda folder: AutoModelForCausalLM.from_pretrained(folder / "gpt2"),
    "in shards": lambda folder: AutoModelForCausalLM.from_pretrained(folder / "llama"),
    "in bf16": lambda folder: AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16),
    "experts stacked": lambda folder: AutoModelForCausalLM.from_pretrained(folder / "mixtral"),
    "a new head, seeded": lambda folder: with_a_new_head(folder / "llama"),
}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize("name", MAKES)
def test_weights_from_files_have_the_bits_of_an_ordinary_load(name: str, folder: Path) -> None:
    assert len(list((folder / "llama").glob("*.safetensors"))) > 2
    built = build_model(lambda: MAKES[name](folder), seed=0)
    plain = tensors(build_really(lambda: MAKES[name](folder), seed=0))
    assert built.not_recorded is None
    found = LazyTensors(tensors(built.model), built.tape)
    assert found.keys() == plain.keys()
    assert not any(isinstance(entry, Tensor) for entry in found.entries.values()), "a weight was made"
    for key, value in plain.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value)
        assert tensors(built.model)[key].requires_grad == value.requires_grad


def read_bytes() -> int:
    """Return the bytes that this process has read so far, from page cache or disk."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_one_of_eight_layers_is_read_without_the_others(tmp_path: Path) -> None:
    path, width = tmp_path / "eight.safetensors", 512
    safetensors.torch.save_file(layers(8, width).state_dict(), path)
    built = build_model(lambda: loaded(path, 8, width, assign=True), seed=0)
    lazy, size = LazyTensors(tensors(built.model), built.tape), 4 * width * width
    before = read_bytes()
    with CountsBytes() as counted:
        made = lazy["3.weight"]
    assert torch.equal(made, safetensors.torch.load_file(path)["3.weight"])
    assert size <= read_bytes() - before < size + SLACK_BYTES
    assert counted.total() < 2 * size


def samples() -> list[dict[str, Tensor]]:
    return [{"x": torch.full((16,), float(index))} for index in range(12)]


def test_a_worker_holds_frozen_weights_of_its_own_sections_alone(tmp_path: Path) -> None:
    path = tmp_path / "four.safetensors"
    safetensors.torch.save_file(layers(4, 16).state_dict(), path)

    def model() -> nn.Module:
        made = loaded(path, 4)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        return made

    job = make_job(model, lambda made, batch: made(batch["x"]).square().mean(), samples())
    exported = export_job(job)
    found = cut(exported, num_sections=4, micro_batch_size=2)
    given = {name: exported.initial_parameters[name] for name in exported.initial_parameters}
    values: tuple[Tensor, ...] = ()
    for section in found.sections:
        values = section(values, {"x": torch.ones(2, 16)}, given)
    middle = {name for section in found.sections[1:3] for name in section.constants}
    assert held(found) == {name for section in found.sections for name in section.constants} > middle
    found.keep_constants_of(range(1, 3))
    assert held(found) == middle
    (constants,) = found.constants
    assert {name: constants.num_bytes(name) for name in middle} == {name: constants[name].nbytes for name in middle}
    assert list(found.specs) == [f"{index}.bias" for index in range(4)], "what is frozen is in no unit"
    path.unlink()  # the dependencies of a large model are found without any weight, even a frozen one
    report = check_dependencies(job, num_sections=4, exported=exported, max_real_elements=500)
    assert (report.violations, "more than 500 parameters" in report.notes[0]) == ((), True)


def held(model: CutModel) -> set[str]:
    (constants,) = {id(section.constant_values): section.constant_values for section in model.sections}.values()
    assert isinstance(constants, Constants)
    return {name for name, _ in constants._held}


JOB = """
from pathlib import Path
import safetensors.torch
import torch
from torch import nn
from morph import Job

class Samples:
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return {"x": torch.full((16,), float(index))}

def model():
    made = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    made.load_state_dict(safetensors.torch.load_file(Path(__file__).parent / "own.safetensors"))
    made[0].weight.requires_grad_(False)
    return made

def sgd(named):
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

job = Job(name="files", model=model, loss=lambda model, batch: model(batch["x"]).square().mean(), dataset=Samples,
          optimizer=sgd, batch_size=6)
"""


def test_a_worker_is_handed_places_in_files_and_refuses_files_that_changed(tmp_path: Path) -> None:
    path, spec = tmp_path / "own.safetensors", f"{tmp_path / 'job.py'}:job"
    state = {
        f"{2 * index}.{name}": value for index in range(2) for name, value in nn.Linear(16, 16).state_dict().items()
    }
    safetensors.torch.save_file(state, path)
    (tmp_path / "job.py").write_text(JOB)
    with imported_once(spec):
        handed = LoadedJob(spec).handed(2, 2)
        found = load_and_cut(spec, num_sections=2, micro_batch_size=2, handed=handed)
        assert torch.equal(found.initial["2.weight"], state["2.weight"])
        (frozen,) = found.model.sections[0].constants
        assert torch.equal(found.model.sections[0].constant_values[frozen], state["0.weight"])
        other = {name: value + 1 for name, value in state.items()}
        safetensors.torch.save_file(other, path)
        with pytest.raises(JobError, match=r"own\.safetensors.* holds other weights than when the model was cut"):
            found.initial["2.weight"]
        again = LoadedJob(spec).cut(2, 2)
        assert torch.equal(again.initial["2.weight"], other["2.weight"]), "a cut is not kept beyond its files"
        path.unlink()
        with pytest.raises(JobError, match=r"own\.safetensors: is missing on this machine"):
            load_and_cut(spec, num_sections=2, micro_batch_size=2, handed=handed)

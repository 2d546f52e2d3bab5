"""Adapters of peft over a frozen base: trained as in a plain loop, and exported in peft's own form."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from manager.run_dir import RunDir, RunFacts
from morph.checkpoint.unit_files import read_unit
from morph.cutting.cache.cut_job import LoadedJob
from morph.data import MicroBatchLoader
from morph.jobs.files import imported_once
from morph.jobs.job import load_job
from morph.runtime.state.model_state import model_state
from tests.training.shapes import ShapesCrew, Trained
from tests.training.test_export_and_import import morph
from tests.training.training_jobs import MICRO_BATCH_SIZE, NUM_SECTIONS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

NUM_STEPS = 6
LOOP = Path(__file__).parents[2] / "configs/loops/lora.py"
SETTINGS: dict[str, dict[str, object]] = {
    "lora": {"modules_to_save": ["lm_head"]},
    "dora": {"use_dora": True, "lora_dropout": 0.0},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "base"
    torch.manual_seed(1)
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=50,
            max_position_embeddings=32,
        )
    ).save_pretrained(folder, max_shard_size="8KB")
    return folder


def plain_loop(job_path: str) -> nn.Module:
    """Return what peft itself reaches from the same initial weights and batches."""
    job = load_job(job_path)
    model, state = job.model().train(), model_state(job)
    model.load_state_dict({name: state.values[kept] for name, kept in state.kept.items()})
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    optimizer = job.optimizer(named)
    loader = MicroBatchLoader(job.dataset(), job.seed, job.batch_size, job.batch_size)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        job.loss(model, dict(loader.load(step, 0, ("tokens",)))).backward()
        optimizer.step()
    return model


def state_of(trained: Trained) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for entry in trained.manifest.units:
        found |= read_unit(str(trained.directory), trained.manifest, entry.unit)
    return found


@pytest.mark.parametrize("name", ["lora", pytest.param("dora", marks=pytest.mark.long)])
def test_adapters_end_where_peft_brings_them_in_every_shape_and_after_losses(
    name: str, base: Path, crew: ShapesCrew, tmp_path: Path
) -> None:
    given = ", ".join(f"{key}={value!r}" for key, value in {"base": str(base), **SETTINGS[name]}.items())
    job_path, run, out = f"{LOOP}:job({given})", tmp_path / "run", tmp_path / "adapter"
    plain = plain_loop(job_path)
    with imported_once(job_path):
        cut = LoadedJob(job_path).handed(NUM_SECTIONS, MICRO_BATCH_SIZE)
    facts = RunFacts(
        job=job_path, fingerprint="any", micro_batch_size=MICRO_BATCH_SIZE, batch_size=8, num_sections=NUM_SECTIONS
    )
    with RunDir(run, facts) as opened:
        trained = crew.train(job_path, [("1x1", NUM_STEPS)], Path(opened.checkpoint_url), cut=cut)
    spans = [("2x2", 2), ("3x1", 4), ("1x2", NUM_STEPS)]
    assert crew.train(job_path, spans, tmp_path / "moved", lose=True, cut=cut).digests == trained.digests
    state = state_of(trained)
    expected = {key: value for key, value in plain.named_parameters() if value.requires_grad}
    assert {key.split("/")[1] for key in state if "/" in key} == set(expected), "nothing frozen is in a checkpoint"
    for key, value in expected.items():
        torch.testing.assert_close(state[f"param/{key}"], value.detach(), rtol=0, atol=1e-6)
    code, said = morph("export", run, out)
    assert (code, f"wrote version {NUM_STEPS} to {out}: {len(expected)} tensors" in said) == (0, True)
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 4
    assert len(safetensors.torch.load_file(out / "adapter_model.safetensors")) == len(expected)
    require_same_outputs(base, out, plain)
    code, said = morph("export", run, out)
    assert (code, "exists already" in said) == (2, True)


def require_same_outputs(base: Path, adapter: Path, plain: nn.Module) -> None:
    """Check that peft loads the exported adapter over the base, and computes what the plain loop's model does."""
    found = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    tokens = torch.arange(18).reshape(2, 9)
    with torch.no_grad():
        given, wanted = found(input_ids=tokens).logits, plain.eval()(input_ids=tokens).logits
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-5)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from morph.tracing import DependencyReport, Finding

pytestmark = pytest.mark.slow

TINY_GPT = Path(__file__).resolve().parents[2] / "configs/jobs/tiny_gpt.py"


def mean_of_all_layers(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x, total = batch["x"], torch.zeros(())
    for block in model.blocks:
        x = functional.gelu(block(x))
        total = total + 1e-3 * x.mean()
    return x.square().mean() + total


def decayed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    fit = model(batch["x"]).square().mean()
    penalty = sum(weight.square().sum() for weight in model.parameters())
    return fit + 0.01 * penalty


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        x = first.relu()
        for block in self.blocks[1:]:
            x = block(x).relu()
        return x + first  # far


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


class SharesAConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("scale", torch.linspace(0.5, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu() * self.scale
        return x


def of_kind(report: DependencyReport, kind: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.kind == kind]


def test_activations_that_cross_cuts_are_handled(tools: Any) -> None:
    report = tools.trace(tools.make_job())
    assert report.violations == ()
    crossing = of_kind(report, "activation")
    assert crossing
    assert {unit for finding in crossing for unit in finding.units} == {"s0", "s1", "s2"}
    assert all(finding.status == "handled" and finding.num_bytes for finding in crossing)


def test_one_section_has_no_dependencies(tools: Any) -> None:
    report = tools.trace(tools.make_job(num_sections=1))
    assert (report.findings, report.num_sections) == ((), 1)


def test_a_tied_weight_is_handled_and_names_its_bytes(tools: Any) -> None:
    (tied,) = of_kind(tools.trace(tools.make_job(model=Tied)), "tied")
    assert (tied.status, tied.units, tied.num_bytes) == ("handled", ("s0", "s2"), 8 * 8 * 4)
    assert "blocks.0.weight" in tied.message
    assert tied.place.user.startswith(__file__)


def test_a_metric_over_all_layers_crosses_with_the_plan(tools: Any) -> None:
    report = tools.trace(tools.make_job(loss=mean_of_all_layers))
    assert report.violations == ()
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = 1 + next(index for index, line in enumerate(lines) if "total = total +" in line)
    users = [finding.place.user for finding in of_kind(report, "activation") if finding.operator == "add"]
    assert f"{__file__}:{number}" in users


def test_weight_decay_in_the_loss_ties_every_weight(tools: Any) -> None:
    report = tools.trace(tools.make_job(loss=decayed))
    assert report.violations == ()
    tied = of_kind(report, "tied")
    tied_bytes = sum(finding.num_bytes for finding in tied if finding.place.function == "decayed")
    in_last = sum(unit.endswith("+s2") for unit in report.units)
    assert in_last == 2
    assert tied_bytes > 8 * 8 * 4
    assert any("costly" in finding.advice for finding in tied)


def test_a_skip_connection_says_how_many_sections_it_passes(tools: Any) -> None:
    report = tools.trace(tools.make_job(model=Skips))
    far = [finding for finding in of_kind(report, "activation") if "do not use it" in finding.message]
    assert [finding.operator for finding in far] == ["add"]
    assert {"s0", "s2"} <= set(far[0].units)


def test_a_constant_of_the_model_is_only_read(tools: Any) -> None:
    (constant,) = of_kind(tools.trace(tools.make_job(model=SharesAConstant)), "constant")
    assert (constant.status, constant.units) == ("handled", ("s0", "s1", "s2"))


def test_a_large_model_is_traced_alike_without_numbers(tools: Any) -> None:
    job = tools.make_job(model=Tied)
    real, fake = tools.trace(job), tools.trace(job, max_real_elements=10)
    assert fake.findings == real.findings
    assert fake.notes


def test_the_report_turns_into_json(tools: Any) -> None:
    report = tools.trace(tools.make_job(model=Tied))
    again = json.loads(json.dumps(report.to_json()))
    assert again["num_violations"] == 0
    assert [finding["id"] for finding in again["findings"]] == [finding.id for finding in report.findings]


def test_the_tiny_gpt_is_clean(tools: Any) -> None:
    from morph.jobs.job import load_job

    report = tools.trace(load_job(f"{TINY_GPT}:job"))
    assert report.violations == ()
    (tied,) = of_kind(report, "tied")
    assert (tied.units, tied.operator) == (("s0", "s5"), "linear")


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": (torch.arange(16) + index) % 32}


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def test_transformers_have_no_false_positives(tools: Any) -> None:
    pytest.importorskip("transformers")
    report = tools.trace(tools.make_job(model=llama, loss=next_token, dataset=Texts))
    assert report.violations == ()
    assert of_kind(report, "tied") == []
    assert of_kind(report, "activation")

"""Everyday loops (configs/loops): each ends with the weights of the user's own loop, or is refused in one sentence.

python -m tests.training.test_loops     # writes their table in the docs anew
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import morph
from morph.contract.errors import InputError
from morph.cutting import export_job
from morph.data.loader import order_of, recipe_of
from morph.jobs.job import Job, load_job
from morph.runtime.step.stage import seed_section
from tests.training.shapes import trained_alone

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/start/loops.md"
STEPS = 12
CLASSIFICATION = {
    **{"num_layers": 2, "hidden_size": 32, "vocab_size": 400, "num_files": 4, "max_steps": STEPS, "max_seq_length": 32},
    **{"per_device_train_batch_size": 8, "early_stopping_patience": 0, "eval_strategy": "no", "use_cpu": True},
    **{"save_strategy": "no", "load_best_model_at_end": False, "disable_tqdm": True, "report_to": []},
    **{"config_overrides": "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0", "logging_steps": 1},
    **{"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 2, "pad_to_max_length": False},
}


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A row of the table.

    ``within``: the largest difference of a weight after ``STEPS`` steps. ``says``: a part of the refusal.
    ``data``: the plain loop's data set in the script, whose samples it gets in the run's order; empty: it has a loader
    of its own. ``lines``: those that Morph needs; None: counted. ``given``: what the script's functions get.
    """

    name: str
    script: str
    note: str = ""
    within: float = 1e-6
    says: str = ""
    data: str = "dataset"
    sections: int = 2
    lines: int | None = None
    needs: str = ""
    given: str = ""
    prepare: Callable[[ModuleType, Path], object] = lambda *_: None


def of_a_trainer(script: ModuleType, folder: Path) -> None:
    """Let ``train`` be the Trainer's own, of the script as it is without Morph."""

    def train() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(morph.hf, "job", lambda trainer, **_: trainer)
            trainer = script.main(**CLASSIFICATION, output_dir=str(folder / "trainer"))
        trainer.train()
        return trainer.model

    script.train = train  # type: ignore[attr-defined]


def with_a_base(_script: ModuleType, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=32, **sizes)).save_pretrained(folder / "base")


IN_ONE = "a micro-batch is the whole mini-batch, so that a pipeline has nothing to overlap: use replicas"
LOOPS = (
    Loop(name="convolutional net, as in the MNIST example", script="loops/cnn.py", data="Digits"),
    Loop(name="nanoGPT", script="loops/nanogpt.py", data="Text"),
    Loop(
        name="text classification, Trainer of transformers",
        script="jobs/run_classification.py",
        data="",
        lines=2,
        given=", ".join(f"{name}={value!r}" for name, value in CLASSIFICATION.items()),
        prepare=of_a_trainer,
    ),
    Loop(
        name="causal language model, prompts labelled -100",
        script="loops/answers.py",
        note="the loss is divided by the tokens that count in the whole mini-batch",
        data="Conversations",
    ),
    Loop(name="LightningModule", script="loops/lit.py", data=""),
    Loop(
        name="Accelerate",
        script="loops/accelerated.py",
        note="the loop's parts; `accelerator.backward` itself is not run",
    ),
    Loop(
        name="LoRA with peft",
        script="loops/lora.py",
        note="`morph export RUN adapter` writes what `PeftModel.from_pretrained` loads",
        data="Text",
        given="base='{folder}/base'",
        prepare=with_a_base,
    ),
    Loop(
        name="Parquet shards",
        script="loops/shards.py",
        data="Rows",
        needs="pyarrow",
        given="folder='{folder}/rows'",
        prepare=lambda script, folder: script.write(folder / "rows"),
    ),
    Loop(name="ResNet with BatchNorm and augmentation", script="loops/resnet.py", note=IN_ONE, data="Pictures"),
    Loop(name="variational autoencoder", script="loops/vae.py", sections=1),
    Loop(name="contrastive learning, in-batch negatives", script="loops/contrastive.py", note=IN_ONE, data="Views"),
    Loop(name="GAN", script="loops/gan.py", says="Networks trained in turns (GAN) are not supported"),
)


def job_path(loop: Loop, folder: Path) -> str:
    function = "main" if loop.script.startswith("jobs/") else "job"
    return f"{ROOT / 'configs' / loop.script}:{function}({loop.given.replace('{folder}', str(folder))})"


def batches(job: Job, data: Any) -> Iterator[Any]:
    """The samples of the run in the plain loop's own form, with the run's draws in the data set and in the model."""
    for step in range(STEPS):
        batch = default_collate(recipe_of(job).read(data, order_of(job).mini_batch(step)))
        seed_section(job.seed, step, 0, 0)
        yield batch


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore:The `srun` command is available")
@pytest.mark.parametrize("loop", [pytest.param(loop, id=loop.name) for loop in LOOPS])
def test_a_loop_ends_with_the_weights_of_the_users_own(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loop.needs:
        pytest.importorskip(loop.needs)
    path = job_path(loop, tmp_path)
    script_path = ROOT / "configs" / loop.script
    monkeypatch.syspath_prepend(str(script_path.parent))
    script = importlib.import_module(script_path.stem)
    loop.prepare(script, tmp_path)
    with torch.random.fork_rng():
        job = load_job(path)
        if loop.says:
            with pytest.raises(InputError) as refused:
                export_job(job)
            assert loop.says in str(refused.value)
            assert "\n" not in str(refused.value)
            return
        given = eval(f"dict({loop.given.replace('{folder}', str(tmp_path))})") if loop.data else {}
        if loop.data == "Rows":
            own = script.train(batches(job, script.Rows(Path(given["folder"]))))
        elif loop.data:
            own = script.train(batches(job, getattr(script, loop.data)()), **given)
        else:
            own = script.train()
    m = job.micro_batch_size or job.batch_size // (2 if loop.sections > 1 else 1)
    found = trained_alone(path, STEPS, tmp_path / "morph", num_sections=loop.sections, micro_batch_size=m)
    expected = {name: value.detach() for name, value in own.named_parameters() if value.requires_grad}
    assert found.keys() == expected.keys()
    off = max(float((found[name] - value).abs().max()) for name, value in expected.items())
    assert off <= loop.within, f"{off:.1e}"


def lines_for_morph(script: Path) -> int:
    """Count the lines that the plain program does not need: imports of Morph, and what only the job uses."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    named = {found.name: found for found in tree.body if isinstance(found, ast.FunctionDef | ast.ClassDef)}
    begin = [
        node.id
        for found in tree.body
        if isinstance(found, ast.If)
        for node in ast.walk(found)
        if isinstance(node, ast.Name)
    ]
    needed, new = set[str](), {"train", *begin} & named.keys()
    while new:
        needed |= new
        names = {node.id for name in new for node in ast.walk(named[name]) if isinstance(node, ast.Name)}
        new = (names & named.keys()) - needed
    imports = [
        found
        for found in tree.body
        if isinstance(found, ast.Import | ast.ImportFrom) and "morph" in ast.unparse(found).split(".")[0].split()
    ]
    spans = [*imports, *(found for name, found in named.items() if name not in needed)]
    return sum((found.end_lineno or found.lineno) - found.lineno + 1 for found in spans)


def rendered() -> str:
    rows = ["| loop | lines for Morph | after 12 steps |", "|---|---|---|"]
    for loop in LOOPS:
        lines = loop.lines or lines_for_morph(ROOT / "configs" / loop.script)
        result = f"refused: `{loop.says}`" if loop.says else f"no weight differs by more than {loop.within:g}"
        result += f"; {loop.note}" if loop.note else ""
        rows.append(f"| [{loop.name}](../../configs/{loop.script}) | {lines} | {result} |")
    return "\n".join(rows) + "\n"


def test_the_docs_show_the_loops_as_they_are_tested() -> None:
    assert rendered() in PAGE.read_text(encoding="utf-8"), "python -m tests.training.test_loops writes the table anew"


if __name__ == "__main__":
    before, table = PAGE.read_text(encoding="utf-8").split("| loop |")
    PAGE.write_text(f"{before}{rendered()}\n{table.split(chr(10) * 2, 1)[1]}", encoding="utf-8")

"""Jobs made from Trainers: the losses and the weights of the Trainer itself, and refusals by the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import morph
from morph.checkpoint.manifest import read_manifest
from morph.checkpoint.retention import best_version
from morph.contract.errors import JobError
from morph.contract.job_facts import JobFacts
from morph.cutting import cut, export_job
from morph.jobs.changes import require_same
from morph.runtime.process.single import run_single
from morph.runtime.workloads.job_workload import settings
from morph.trainers.arguments import ARGUMENTS
from tests.crew import ManagedCrew
from tests.system.harness import cut_for_workers, load_tiny_job
from tests.training.shapes import ShapesCrew, parameters_of, rows_of, totals_of_all

transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer  # noqa: E402 (transformers brings it)
from tokenizers.models import WordLevel  # noqa: E402

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "configs" / "jobs"
NUM_STEPS = 6
SMALL = {"num_layers": 2, "hidden_size": 32, "vocab_size": 400, "num_files": 4, "max_steps": NUM_STEPS}
SMALL |= {"logging_steps": 1, "use_cpu": True, "learning_rate": 1e-3}
CLM = {**SMALL, "block_size": 32, "config_overrides": "attn_pdrop=0.0,resid_pdrop=0.0,embd_pdrop=0.0"}
PADDED = {
    **SMALL,
    "max_seq_length": 32,
    "disable_tqdm": True,
    "config_overrides": "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0",
}
CLASSIFICATION = {**PADDED, "pad_to_max_length": True, "early_stopping_patience": 0, "eval_strategy": "no"}
CLASSIFICATION |= {"load_best_model_at_end": False}
SMOOTHED = (
    "run_clm",
    {**CLM, "label_smoothing_factor": 0.1, "weight_decay": 0.1, "model_type": "llama", "config_overrides": ""},
)
BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


@pytest.fixture
def trainer_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return the Trainer that a script makes, with the script's other lines unchanged."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def make(script: str, **given: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(morph.hf, "job", lambda trainer, **_: trainer)
            return import_module(script).main(**{"output_dir": str(tmp_path / "trainer"), **given})

    return make


def trained_by_itself(trainer: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and weights of the Trainer's own loop."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: value.detach() for name, value in trainer.model.named_parameters()}


def path_of(script: str, given: dict[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"{SCRIPTS / script}.py:main({arguments})"


def trained_by_morph(script: str, folder: Path, given: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    losses: list[float] = []
    with torch.random.fork_rng():
        manifest = run_single(
            path_of(script, given),
            steps=NUM_STEPS,
            num_sections=3,
            micro_batch_size=given["per_device_train_batch_size"] // 2,
            checkpoint_url=str(folder),
            on_step=lambda _, loss: losses.append(loss),
        )
    return losses, parameters_of(manifest, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "given"),
    [
        ("run_clm", CLM),
        pytest.param(*SMOOTHED, marks=pytest.mark.long),
        pytest.param("run_classification", CLASSIFICATION, marks=pytest.mark.long),
    ],
)
def test_losses_and_weights_are_those_of_the_trainer(
    script: str, given: dict[str, Any], trainer_of: Callable[..., Any], tmp_path: Path
) -> None:
    losses, weights = trained_by_itself(trainer_of(script, **BATCH, **given))
    found, trained = trained_by_morph(script, tmp_path / "morph", {**BATCH, **given})
    assert found == pytest.approx(losses, abs=1e-5)
    assert trained.keys() == weights.keys()
    for name, value in trained.items():
        assert (value - weights[name]).norm() <= 1e-4 * weights[name].norm() + 1e-6, name


@pytest.mark.slow
def test_evaluations_are_the_trainers_and_a_loss_changes_no_bit(
    crew: ShapesCrew, trainer_of: Callable[..., Any], tmp_path: Path
) -> None:
    """The order of samples, evaluations, ``compute_metrics`` and the best version, with a worker lost in between."""
    given = {
        **{**CLASSIFICATION, "per_device_train_batch_size": 8, "eval_strategy": "steps", "eval_steps": 2},
        **{"save_strategy": "best", "load_best_model_at_end": True, "metric_for_best_model": "accuracy"},
    }
    trainer = trainer_of("run_classification", **given)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    path = path_of("run_classification", given)
    alone = crew.train(path, [("1x1", NUM_STEPS)], tmp_path / "alone")
    shapes = crew.train(path, [("1x2", 3), ("2x1", NUM_STEPS)], tmp_path / "shapes", lose=True)
    assert shapes.digests == alone.digests
    evaluated = [totals_of_all(trained) for trained in (alone, shapes)]
    assert evaluated[0] == evaluated[1]
    assert [totals.version for totals in evaluated[0]] == [2, 4, 6]
    job = morph.hf.job(trainer)
    assert job.best == morph.Best(metric="accuracy", mode="max")
    assert job.eval_metrics is not None
    for totals, entry in zip(evaluated[0], logged, strict=True):
        assert totals.values["loss"] == pytest.approx(entry["eval_loss"], abs=1e-5)
        samples = {name: rows_of(array) for name, array in totals.samples.items()}
        assert job.eval_metrics(samples) == {"accuracy": entry["eval_accuracy"]}


@pytest.mark.system
@pytest.mark.slow
def test_the_example_of_classification_ends_early_where_its_trainer_does(
    trainer_of: Callable[..., Any], tmp_path: Path
) -> None:
    """Texts padded to buckets, evaluations and patience, undisturbed and with two of three workers killed."""
    given = {**PADDED, "num_files": 7, "max_eval_samples": 80, "max_steps": 80, "learning_rate": 3e-3}
    given |= {"per_device_train_batch_size": 8, "eval_steps": 4, "early_stopping_patience": 2}
    trainer = trainer_of("run_classification", **given)
    losses, _ = trained_by_itself(trainer)
    assert len(losses) == trainer.state.global_step < 80
    path = path_of("run_classification", given)
    handed = cut_for_workers(path, 3, 2)
    managed = ManagedCrew(load_tiny_job(3, 2, path, handed), path, handed)
    try:
        finish, alone, alone_url = managed.train(tmp_path / "alone", {1: "1x1"}, 80)
        shapes = {1: "1x1", 2: "2x1", 3: "1x3"}
        again, lost, lost_url = managed.train(tmp_path / "lost", shapes, 80, managed.kill_at(3, 9))
    finally:
        managed.close()
    assert "accuracy did not improve in" in finish.sentence
    assert [alone.losses[step] for step in range(len(losses))] == pytest.approx(losses, abs=1e-5)
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    best = trainer.state.best_metric  # older Trainers record only saved steps
    assert best_version(alone_url) == next(entry["step"] for entry in logged if entry["eval_accuracy"] == best)
    for one, entry in zip(alone.evaluations, logged, strict=False):
        assert one.version == entry["step"]
        assert one.loss == pytest.approx(entry["eval_loss"], abs=1e-5)
        assert one.metrics == {"accuracy": entry["eval_accuracy"]}
    assert len({worker for morph in lost.morphs for worker in morph.lost_workers}) == 2
    assert (again.sentence, lost.losses, lost.evaluations) == (finish.sentence, alone.losses, alone.evaluations)
    last = [read_manifest(url, alone.version) for url in (alone_url, lost_url)]
    assert {one.unit: one.sha256 for one in last[0].units} == {one.unit: one.sha256 for one in last[1].units}


@pytest.mark.parametrize("labels", ["floats", "items"])
def test_accumulated_batches_count_as_in_the_trainer(labels: str, tmp_path: Path) -> None:
    """Two batches are accumulated: the Trainer adds up means, and divides sums over items once."""
    trainer = small_trainer(tmp_path, model=Regression() if labels == "floats" else Tokens(), **BATCH)
    trainer.args.logging_steps = 1
    job = morph.hf.job(trainer)
    assert job.batch_size == 8
    assert job.micro_batch_size == (4 if labels == "floats" else None)
    batch = next(iter(trainer.get_train_dataloader())), next(iter(trainer.get_train_dataloader()))
    count = sum((part["labels"] != -100).sum() for part in batch)
    trainer.current_gradient_accumulation_steps = 2
    for part in batch:
        found = job.loss(trainer.model, part)
        mean = found / 2 if isinstance(found, Tensor) else found.total / count
        assert float(mean.detach()) == pytest.approx(float(trainer.training_step(trainer.model, part, count)), rel=1e-6)


class Regression(torch.nn.Module):
    """Takes the number of items, as models of transformers do, and ignores it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(x)[:, 0], labels.float())}


class Tokens(Regression):
    """Divides by the number of items."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> dict[str, Tensor]:
        total = torch.nn.functional.cross_entropy(self.layer(x), labels, reduction="sum")
        return {"loss": total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)}


def small_trainer(tmp_path: Path, **given: Any) -> Any:
    names = {"model", "compute_metrics", "callbacks", "optimizers", "eval_dataset", "train_dataset"}
    kind = given.pop("kind", transformers.Trainer)
    newer = (
        given.keys()
        - names
        - {"kind", "of", "quantum"}
        - {field.name for field in fields(transformers.Seq2SeqTrainingArguments)}
    )
    if newer:
        pytest.skip(f"of a newer transformers: {newer}")
    own = {name: given.pop(name) for name in names & given.keys()}
    data = [{"x": torch.randn(3), "labels": index % 2} for index in range(16)]
    args = given.pop("of", transformers.TrainingArguments)(str(tmp_path), use_cpu=True, **given)
    return kind(**{"model": Tokens(), "args": args, "train_dataset": data, **own})


@pytest.mark.parametrize("given", [{}, {"data_seed": 3}, {"train_sampling_strategy": "sequential"}])
def test_samples_come_in_the_trainers_order_epoch_by_epoch(given: dict[str, Any], tmp_path: Path) -> None:
    data = [{"x": torch.full((3,), float(index)), "labels": 0} for index in range(18)]
    trainer = small_trainer(tmp_path, train_dataset=data, dataloader_drop_last=True, **BATCH, **given)
    job = morph.hf.job(trainer)
    assert job.sampler is not None
    loader = trainer.get_train_dataloader()
    for epoch in range(3):
        loader.set_epoch(epoch)
        numbers = torch.cat([batch["x"][:, 0] for batch in loader]).int().tolist()
        assert job.sampler(data, 0, epoch) == numbers
    assert len(numbers) == 16


WORDS = [[1, 4, 5, 1] * (index % 5 + 1) + [1] * (index % 3) for index in range(30)]
SIZES = [len(words) for words in WORDS]
ROUNDED = [16 if size <= 16 else 32 for size in SIZES]
TARGETS = [[1] * (30 - size) for size in SIZES]
SIZES_WITH_TARGETS = [max(size, 30 - size) for size in SIZES]


def tokenizer(side: str = "right") -> Any:
    vocabulary = {"<unk>": 0, "a": 1, "<mask>": 2, "<pad>": 3, "b": 4, "c": 5}
    given = {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>", "padding_side": side}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, "<unk>")), **given)


class MeanOfTokens(Regression):
    """Ignores the number of items, as BERT does for masked tokens."""

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        logits = self.layer(input_ids[..., None].float().expand(-1, -1, 3))
        return {"loss": (logits[..., 0] - labels).square().mean()}


def trainer_of_words(tmp_path: Path, collator: Any, data: Any = None, **given: Any) -> Any:
    data = [{"input_ids": words, "labels": index % 2} for index, words in enumerate(WORDS)] if data is None else data
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, remove_unused_columns=False, **given)
    return transformers.Trainer(MeanOfTokens(), args, train_dataset=data, data_collator=collator)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("collator", "labels", "wanted", "buckets"),
    [
        (lambda t: transformers.DataCollatorWithPadding(t), None, SIZES, (8, 16, 22)),
        (lambda t: transformers.DataCollatorWithPadding(t, pad_to_multiple_of=16), None, ROUNDED, (16, 32)),
        (lambda t: transformers.DataCollatorForLanguageModeling(t, mlm=False), None, SIZES, (8, 16, 22)),
        (lambda t: transformers.DataCollatorForLanguageModeling(t), None, SIZES, (8, 16, 22)),
        (lambda t: transformers.DataCollatorForTokenClassification(t), WORDS, SIZES, (8, 16, 22)),
        (lambda t: transformers.DataCollatorForSeq2Seq(t), TARGETS, SIZES_WITH_TARGETS, (16, 26)),
    ],
)
def test_lengths_follow_from_a_collator_that_pads(
    collator: Any, labels: Any, wanted: list[int], buckets: tuple[int, ...], side: str, tmp_path: Path
) -> None:
    data = [{"input_ids": words} for words in WORDS]
    if labels is not None:
        data = [{**sample, "labels": found} for sample, found in zip(data, labels, strict=True)]
    trainer = trainer_of_words(tmp_path, collator(tokenizer(side)), data)
    job = morph.hf.job(trainer)
    assert (job.buckets, dict(job.padding)) == (buckets, {"input_ids": 3})
    assert job.lengths is not None
    assert job.lengths(job.dataset()).tolist() == wanted
    given = morph.hf.job(trainer, buckets=(12, 40))
    assert (given.buckets, dict(given.padding)) == ((12, 40), {"input_ids": 3})
    assert morph.hf.job(trainer, lengths=None).buckets == ()


def test_lengths_of_a_column_are_taken_where_they_are_right(tmp_path: Path) -> None:
    class Table(list[Any]):
        column_names = ("input_ids", "size")

        def __init__(self, sizes: list[int]) -> None:
            super().__init__({"input_ids": words} for words in WORDS)
            self.sizes, self.num_read = sizes, 0

        def __getitem__(self, key: Any) -> Any:
            self.num_read += key != "size"
            return self.sizes if key == "size" else super().__getitem__(key)

    for sizes in (SIZES, [1] * len(SIZES)):
        data = Table(sizes)
        job = morph.hf.job(
            trainer_of_words(
                tmp_path, transformers.DataCollatorWithPadding(tokenizer()), data, length_column_name="size"
            )
        )
        assert job.lengths is not None
        assert job.lengths(data).tolist() == SIZES
        assert (data.num_read < len(data)) == (sizes == SIZES)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("collator", "given", "named"),
    [
        (transformers.DataCollatorWithFlattening(), {}, "data_collator.*WithFlattening.*a row for each sample"),
        (transformers.default_data_collator, {}, "data_collator.*default_data_collator.*pads samples"),
        (
            lambda samples: {"input_ids": torch.ones(len(samples), 2 + max(len(s["input_ids"]) for s in samples))},
            {},
            r"data_collator.*morph\.hf\.job\(trainer, lengths=lambda data.*buckets=",
        ),
        (
            transformers.DataCollatorForTokenClassification(tokenizer()),
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps.*larger per_device_train_batch_size",
        ),
    ],
)
def test_lengths_that_do_not_follow_are_refused(
    collator: Any, given: dict[str, Any], named: str, tmp_path: Path
) -> None:
    data = [{"input_ids": words, "labels": words} for words in WORDS]
    with pytest.raises(JobError, match=named):
        morph.hf.job(trainer_of_words(tmp_path, collator, data, **given))


ADAPTERS = """
import warnings
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
from tests.trainers.test_trainer import NotPlaced, WORDS, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer
import morph

BASE = Path(__file__).parent / "base"

def adapted(base):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "lora_A" in name:
                value.copy_(torch.linspace(-1, 1, value.numel()).reshape(value.shape))
    return made

def model():
    return adapted(AutoModelForCausalLM.from_pretrained(BASE))

def trainer(meta=False):
    with torch.device("meta" if meta else "cpu"):
        made = adapted(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE))) if meta else model()
    args = NotPlaced(
        str(BASE.parent / "trainer"), use_cpu=True, report_to=[], logging_steps=1, max_steps=3, learning_rate=1e-2,
        per_device_train_batch_size=4, gradient_accumulation_steps=2,
    )
    data = [{"input_ids": words} for words in WORDS]
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    return Trainer(made, args, train_dataset=data, data_collator=collator)

def main(meta=False):
    return morph.hf.job(trainer(meta), **({"model": model} if meta else {}))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_adapters_over_a_base_that_stays_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and weights are the Trainer's, whether its model has values or is on the meta device."""
    pytest.importorskip("peft")
    config = {"vocab_size": 6, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, num_attention_heads=2, pad_token_id=3))
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "adapter_job.py").write_text(ADAPTERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    losses, weights = trained_by_itself(import_module("adapter_job").trainer())
    trained = []
    for meta in (False, True):
        found: list[float] = []
        manifest = run_single(
            f"{tmp_path / 'adapter_job.py'}:main(meta={meta})",
            steps=3,
            num_sections=2,
            micro_batch_size=2,
            checkpoint_url=str(tmp_path / f"{meta}"),
            on_step=lambda _, loss, found=found: found.append(loss),
        )
        assert found == pytest.approx(losses, abs=1e-5)
        trained.append(parameters_of(manifest, tmp_path / f"{meta}"))
    assert trained[0].keys() == trained[1].keys() == {name for name in weights if "lora" in name}
    for name, value in trained[0].items():
        assert torch.equal(value, trained[1][name]), name
        assert torch.allclose(value, weights[name], rtol=1e-4, atol=1e-5), name


def test_every_argument_of_the_installed_transformers_is_in_the_table() -> None:
    assert {field.name for field in fields(transformers.Seq2SeqTrainingArguments)} <= ARGUMENTS.keys()


def test_an_unknown_argument_is_refused_by_name(tmp_path: Path) -> None:
    @dataclass
    class Newer(transformers.TrainingArguments):
        quantum: bool = False

    assert morph.hf.job(small_trainer(tmp_path, of=Newer)).batch_size == 8
    with pytest.raises(JobError, match=r"quantum.*does not know"):
        morph.hf.job(small_trainer(tmp_path, of=Newer, quantum=True))


GENERATES = {"of": transformers.Seq2SeqTrainingArguments, "predict_with_generate": True, "generation_max_length": 8}


class NotPlaced(transformers.TrainingArguments):
    place_model_on_device = False


def own(cls: type = transformers.Trainer, /, **methods: Any) -> type:
    """Return a subclass with these methods; a function ``loader`` becomes ``get_train_dataloader``."""
    if "loader" in methods:
        methods["get_train_dataloader"] = methods.pop("loader")
    return type("Own", (cls,), methods)


def loader_of(**given: Any) -> Any:
    """Return a ``get_train_dataloader`` that makes a loader of one's own."""

    def get_train_dataloader(self: Any) -> Any:
        made = {name: value(self.train_dataset) if callable(value) else value for name, value in given.items()}
        return torch.utils.data.DataLoader(self.train_dataset, collate_fn=self.data_collator, **made)

    return get_train_dataloader


class OwnBatches(torch.utils.data.BatchSampler):
    pass


def own_batches(data: Any) -> OwnBatches:
    return OwnBatches(torch.utils.data.SequentialSampler(data), 8, drop_last=False)


def nothing(*_: Any, **__: Any) -> None:
    """Stands for a method of one's own."""


CHANGES_TRAINING = (
    *("train", "training_step", "get_batch_samples", "create_optimizer_and_scheduler", "_prepare_inputs"),
    *("_inner_training_loop", "compute_loss_context_manager", "set_initial_training_values", "_get_num_items_in_batch"),
)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config"),
        ({"optim": "lion_32bit"}, "optim.*adamw_torch_fused"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "lr_scheduler_type.*linear"),
        ({"torch_compile_backend": "eager"}, "torch_compile_backend.*inductor"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy.*sequential"),
        ({"train_sampling_strategy": "group_by_length"}, r"train_sampling_strategy.*order\.grouped\(lengths"),
        ({"model": torch.nn.Linear(2, 2, device="meta"), "of": NotPlaced}, "model.*model=make"),
        ({"callbacks": [type("Mine", (transformers.TrainerCallback,), {})()]}, "callbacks.*Mine"),
        ({"callbacks": [type("Stops", (transformers.EarlyStoppingCallback,), {})(1)]}, "callbacks.*Stops"),
        *(({"kind": own(**{name: nothing})}, f"Own.{name}") for name in CHANGES_TRAINING),
        ({"kind": own(evaluate=nothing), "eval_strategy": "epoch"}, "Own.evaluate"),
        ({"kind": own(loader=loader_of(batch_sampler=own_batches))}, "batch_sampler.*OwnBatches"),
        ({"kind": own(loader=loader_of(batch_size=3))}, r"get_train_dataloader: batch_size.*3.*8, as in args"),
        ({"kind": own(loader=loader_of(batch_size=8, shuffle=True))}, r"global generators.*RandomSampler"),
        ({"train_dataset": iter([])}, "train_dataset"),
        ({**GENERATES, "eval_strategy": "epoch"}, "predict_with_generate.*eval_strategy='no'.*`sample`"),
        ({**GENERATES, "sortish_sampler": True}, "sortish_sampler"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(given: dict[str, Any], named: str, tmp_path: Path) -> None:
    if "eval_strategy" in given:
        given = {**given, "eval_dataset": [{"x": torch.zeros(3), "labels": 0}]}
    if "train_dataset" in given:
        given = {**given, "max_steps": 3}
    with pytest.raises(JobError, match=named):
        morph.hf.job(small_trainer(tmp_path, **given))


def test_a_trainer_that_generates_after_training_is_honoured(tmp_path: Path) -> None:
    assert morph.hf.job(small_trainer(tmp_path, **GENERATES)).batch_size == 8


def test_methods_that_do_not_change_training_may_be_overridden(tmp_path: Path) -> None:
    harmless = dict.fromkeys(("log", "save_model", "evaluate", "prediction_step", "helper"), nothing)
    assert morph.hf.job(small_trainer(tmp_path, kind=own(**harmless))).batch_size == 8
    trainer = small_trainer(tmp_path)
    trainer.log = nothing
    morph.hf.job(trainer)
    trainer.training_step = nothing
    with pytest.raises(JobError, match=r"Trainer\.training_step"):
        morph.hf.job(trainer)


def test_settings_become_fields_of_the_job(tmp_path: Path) -> None:
    data = [{"x": torch.zeros(3), "labels": 0}] * 4
    is_new = any(field.name == "activation_checkpointing" for field in fields(transformers.TrainingArguments))
    recompute = "activation_checkpointing" if is_new else "gradient_checkpointing"
    trainer = small_trainer(
        tmp_path,
        eval_dataset=data,
        **{**BATCH, "num_train_epochs": 3, "max_grad_norm": 0.5, "bf16": True, "seed": 7, "torch_compile": True},
        callbacks=[transformers.EarlyStoppingCallback(3, 0.1)],
        **{
            "metric_for_best_model": "eval_loss",
            "eval_strategy": "epoch",
            "run_name": "a run/of mine",
            "dataloader_num_workers": 2,
        },
        **{recompute: True, "report_to": [], "push_to_hub": False},
    )
    job = morph.hf.job(trainer, num_sections=1)
    assert (job.name, job.batch_size, job.clip_grad_norm, job.precision) == ("a-run-of-mine", 8, 0.5, "bf16")
    assert (job.seed, job.compile, job.data_workers, job.num_sections) == (7, True, 2, 1)
    assert (job.eval_every_epochs, job.best) == (1, morph.Best(metric="loss", patience=3, min_delta=0.1))
    assert morph.hf.num_steps(trainer) == 6
    trainer.args.run_name = None
    assert morph.hf.job(trainer, num_sections=1).name == type(trainer.model).__name__


def test_an_optimizer_and_a_schedule_of_ones_own_are_built_for_each_unit(tmp_path: Path) -> None:
    model = Tokens()
    groups = [{"params": [model.layer.weight], "lr": 0.5, "momentum": 0.9}, {"params": [model.layer.bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=1.0, nesterov=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 1 / (1 + step)])
    job = morph.hf.job(small_trainer(tmp_path, model=model, optimizers=(optimizer, schedule)))
    bias = torch.nn.Parameter(torch.zeros(2))
    mine = job.optimizer([("layer.bias", bias)])
    assert job.lr_scheduler is not None
    mine_too = job.lr_scheduler(mine)
    rates = []
    for _ in range(3):
        rates.append([group["lr"] for group in mine.param_groups])
        mine.step()
        mine_too.step()
    assert rates == [[0.5, 0.1], [0.5, 0.05], [0.5, pytest.approx(0.1 / 3)]]
    assert [len(group["params"]) for group in mine.param_groups] == [0, 1]
    assert mine.param_groups[0]["momentum"] == 0.9
    assert optimizer.param_groups[1]["lr"] == 0.1


def test_a_worker_with_other_weights_is_not_the_runs(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path)
    job = morph.hf.job(trainer)
    model = cut(export_job(job), num_sections=1, micro_batch_size=1)
    began = JobFacts(settings=settings(job, model))
    made = job.model()
    with torch.no_grad():
        made.layer.bias.add_(1)
    require_same(JobFacts(settings=settings(job, model)), began, "job.py:job")
    with torch.no_grad():
        trainer.model.layer.bias.add_(1)
    with pytest.raises(JobError, match="model: is not the setting that the run began with"):
        require_same(JobFacts(settings=settings(job, model)), began, "job.py:job")

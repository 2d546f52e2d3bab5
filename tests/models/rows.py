"""The table of models and jobs, by group; ``docs/reference/tested-models.md`` shows it."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from tests.models import language, own_code, vision
from tests.models.case import Case, Outcome
from tests.models.own_code import Applied, around

MEET = "of samples run together is not the mean of their separate ones"
SUM = "is a sum over the samples"
ONE = "marks, or one section"
WHOLE: dict[str, Any] = {"num_sections": 1}
BACKWARD = "an autograd.Function, or torch.library.custom_op with register_autograd"


def _text(name: str, model: Any, outcome: Outcome = "exact", **fields: Any) -> Case:
    values = {"loss": language.causal_loss, "items": language.texts(), **fields}
    return Case(name=name, model=model, outcome=outcome, **values)


def _masked(name: str, model: Any, **fields: Any) -> Case:
    return Case(name=name, model=model, loss=language.own_loss, items=language.masked_texts(), **fields)


def _picture(name: str, model: Any, outcome: Outcome = "close", **fields: Any) -> Case:
    values = {"loss": vision.hf_picture_loss, "items": vision.pictures(), **fields}
    return Case(name=name, model=model, outcome=outcome, **values)


def _own(name: str, *middle: Any, **fields: Any) -> Case:
    """Build a chain of small blocks with something between them."""
    values = {"loss": own_code.loss, "items": own_code.points(), "fields": {"num_sections": 2}, **fields}
    return Case(name=name, model=lambda: around(*(make() for make in middle)), **values)


def _whole(name: str, model: Any, **fields: Any) -> Case:
    values = {"loss": own_code.loss, "items": own_code.points(), "fields": {"num_sections": 2}, **fields}
    return Case(name=name, model=model, **values)


LANGUAGE = (
    _text("GPT-NeoX", language.gpt_neox, another=True),
    _text("Gemma 2", language.gemma2, "close"),
    _text("Falcon", language.falcon, another=True),
    _text("BLOOM", language.bloom, "close"),
    _text("OPT", language.opt, another=True),
    _text("Phi", language.phi, another=True),
    _text("OLMo", language.olmo, another=True),
    _text("Mixtral with its auxiliary loss", language.mixtral_with_auxiliary_loss, loss=language.own_loss, warns=MEET),
    _text("Phi-MoE", language.phi_moe, "close", another=True),
    _text("Mamba", language.mamba, "close", items=language.texts(6)),
    _masked("RoBERTa, masked tokens", language.roberta),
    _masked("DistilBERT", language.distilbert, another=True),
    _masked("ELECTRA", language.electra, another=True),
    _masked("ALBERT (one block, called again)", language.albert),
    _masked("BART", language.bart, another=True),
    Case(
        name="LSTM of two layers",
        model=partial(language.Recurrent, one_by_one=False),
        loss=language.recurrent_loss,
        items=language.texts(),
        another=True,
    ),
    Case(
        name="an LSTM for each layer",
        model=partial(language.Recurrent, one_by_one=True),
        loss=language.recurrent_loss,
        items=language.texts(),
    ),
)

VISION = (
    _picture("DeiT", vision.deit, "exact", another=True),
    _picture("Swin", vision.swin, "exact"),
    _picture("ConvNeXt", vision.convnext, items=vision.big_pictures()),
    _picture("ResNet with BatchNorm", vision.resnet, another=True),
    _picture("MLP-Mixer", vision.mixer, loss=vision.picture_loss),
    _picture("CLIP, with in-batch negatives", vision.clip, loss=vision.clip_loss, items=vision.captioned(), warns=MEET),
    _picture("Whisper", vision.whisper, loss=language.own_loss, items=vision.sounds(), another=True),
)

BACKWARDS = (
    _own("gradient reversal (autograd.Function)", lambda: Applied(lambda x: own_code.Reversal.apply(x, 0.5))),
    _own("straight-through rounding (autograd.Function)", lambda: Applied(own_code.StraightThrough.apply)),
    _own("straight-through rounding (detach)", own_code.Quantised),
    _own("torch.library.custom_op with register_autograd", lambda: Applied(own_code.doubled)),
    _own("activation checkpointing", partial(own_code.Checkpointed, reentrant=False)),
    _own("activation checkpointing, reentrant", partial(own_code.Checkpointed, reentrant=True)),
    _own("a hook on an activation", own_code.Hooked, outcome="refused", says="hook", instead=BACKWARD),
    _whole("a hook on a parameter", own_code.with_parameter_hook, outcome="refused", says="hook", instead=BACKWARD),
    _whole(
        "a backward hook of a module", own_code.with_backward_hook, outcome="refused", says="hook", instead=BACKWARD
    ),
)

STATE = (
    _whole("BatchNorm", own_code.batch_norm, items=own_code.pictures()),
    _whole("frozen BatchNorm", own_code.frozen_batch_norm, items=own_code.pictures()),
    _own("a moving average under no_grad", own_code.MovingAverage, warns=MEET),
    _whole("spectral_norm", own_code.spectral),
    _whole("weight_norm", own_code.weight_norm),
    _own("a buffer that is assigned", own_code.Assigned, warns=MEET),
    _own(
        "a counter in the forward",
        own_code.Counting,
        outcome="refused",
        says="calls",
        instead="nothing but weights, buffers, batch and torch's random functions in the forward",
    ),
    _own(
        "numpy's random numbers in the forward",
        lambda: Applied(own_code.numpy_noise),
        outcome="refused",
        says="numpy",
        instead="torch's random functions, or numbers drawn in the data set",
    ),
    _own(
        "Python's random numbers in the forward",
        lambda: Applied(own_code.python_noise),
        outcome="refused",
        says="random",
        instead="torch's random functions, or numbers drawn in the data set",
    ),
)

GRADIENTS = (
    _own("a VAE (torch.distributions)", loss=own_code.elbo),
    _own("a gradient penalty", loss=own_code.penalised, outcome="refused", says="autograd.grad", instead=ONE),
    _own("a gradient penalty, in one section", loss=own_code.penalised, fields=WHOLE),
    _own("torch.func.vmap", loss=own_code.by_sample, outcome="refused", says="torch.func", instead=ONE),
    _own("torch.func.vmap, in one section", loss=own_code.by_sample, fields=WHOLE),
    _own("ctc_loss", loss=own_code.ctc, outcome="refused", says="aten._ctc_loss has a result", instead=ONE),
    _own("ctc_loss, in one section", loss=own_code.ctc, fields=WHOLE),
    _whole("packed sequences", own_code.Packed, outcome="refused", says="packed sequences", instead=ONE),
    _whole("packed sequences, in one section", own_code.Packed, fields=WHOLE),
    _own(
        "a metric by .item()",
        loss=own_code.number_as_metric,
        outcome="refused",
        says="without .item()",
        instead="the tensor",
    ),
    _own(
        "a torch.Generator of the model's own",
        own_code.OwnNoise,
        outcome="refused",
        says="torch.Generator",
        instead="torch's random functions without generator=",
    ),
    _whole(
        "nn.LazyLinear",
        lambda: around(nn.LazyLinear(own_code.WIDTH)),
        outcome="refused",
        says="2.weight has no shape before the first forward",
        instead="its size, or one call of the model where it is built",
    ),
)

SHAPES = (
    _own("LayerDrop", own_code.LayerDrop, outcome="refused", says="own_code.py", instead="a mask instead of a branch"),
    _own("a branch on values", own_code.Branch, outcome="refused", says="own_code.py", instead="torch.where, or marks"),
    _whole("a branch on values, marked", own_code.MarkedBranch, fields={"cut_points": ("second",)}),
    _own(
        "a loop over the chosen experts",
        own_code.Experts,
        outcome="refused",
        says="own_code.py",
        instead="a route by tensor operations, or marks",
    ),
    _own(
        "a number of samples written down",
        lambda: Applied(own_code.fixed_samples),
        outcome="refused",
        says="samples",
        instead="x.shape[0]",
    ),
    _own("LoRA", lambda: own_code.Adapted(nn.Linear(own_code.WIDTH, own_code.WIDTH))),
    _whole("frozen layers", own_code.frozen_backbone),
    _whole("tied weights", own_code.Tied),
    _own("complex numbers (FFT)", own_code.Complex),
)

LOSSES = (
    _own("a loss with a metric", loss=own_code.loss_with_metric),
    _own("a sum over samples", loss=own_code.summed_loss, warns=SUM),
    _own("in-batch negatives", loss=own_code.contrastive_loss, warns=MEET),
    _own(
        "two losses",
        loss=own_code.two_losses,
        outcome="refused",
        says="loss",
        instead="their sum, or one of them as a metric; one job for each optimizer",
    ),
    _own("random crops in the data set", items=own_code.Cropped),
    _own(
        "a random generator of the data set's own",
        items=own_code.OwnGenerator,
        outcome="refused",
        says="x",
        instead="the global generators, which are seeded for each sample, or one made from the index",
    ),
    _own(
        "samples of differing lengths",
        items=own_code.OddLengths,
        outcome="refused",
        says="'x'",
        instead="padding or cropping in the data set, or lengths and buckets",
    ),
    _own(
        "an IterableDataset of unknown length",
        items=own_code.Stream,
        outcome="refused",
        says="IterableDataset",
        instead="shards, or the number of samples (morph.data.streams)",
    ),
    _own(
        "a DataLoader",
        items=own_code.loader,
        outcome="refused",
        says="DataLoader",
        instead="its data set; Morph makes the batches",
    ),
)

GROUPS: dict[str, tuple[Case, ...]] = {
    "Language": LANGUAGE,
    "Pictures and sound": VISION,
    "A backward of one's own": BACKWARDS,
    "State in the forward": STATE,
    "What tracing does not see": GRADIENTS,
    "Control flow, shapes, weights": SHAPES,
    "Losses and data sets": LOSSES,
}

_WARNINGS = {
    "": "",
    MEET: "; a warning says that the samples of a batch meet in the loss",
    SUM: "; a warning says that the loss is no mean",
}
_WORDS = {"exact": "bit for bit", "close": "within 2e-6"}


def rendered(group: str) -> str:
    by_result: dict[str, list[str]] = {}
    for case in GROUPS[group]:
        refused = f"refused; instead: {case.instead}"
        result = refused if case.outcome == "refused" else _WORDS[case.outcome] + _WARNINGS[case.warns]
        by_result.setdefault(result, []).append(case.name)
    lines = [f"| {group.lower()} | result |", "|---|---|"]
    lines += [f"| {'; '.join(names)} | {result} |" for result, names in by_result.items()]
    return "\n".join(lines)

"""Compares a document of a packed sample with the same document alone: attention may not mix documents."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from morph.contract.errors import JobError
from morph.cutting.deferred_init.construct import build_really
from morph.cutting.source.locate import definition_line
from morph.cutting.trial_run.trial import move_weights
from morph.data.lengths import IGNORED, LABELS
from morph.data.loader import data_of, recipe_of
from morph.data.packing import POSITIONS, Packed
from morph.data.seeding import kept_generators
from morph.jobs.job import Job
from morph.losses import values_of

_MOST_TRIED = 32
_TIMES = 4.0
"""Factor of weights: with those of a constructor, attention is nearly even and adds little to the hidden states."""
_DIFFERENT = 1e-2
"""Relative difference of a parameter's gradient above which it counts as another one: far above rounding."""
_SHARE = 0.25
"""Share of the parameters with other gradients above which documents are mixed. Attention has more of a model; a load
balancing loss, which is one of the whole batch in a plain loop too, changes a router alone."""


@kept_generators()
def check_packed(job: Job) -> None:
    """Run the loss of one document behind another and alone, in evaluation mode, and compare gradients.

    A data set without labels, or without two documents in a sample, is not examined, nor a loss that fails.
    """
    data = data_of(job)
    if not isinstance(data, Packed):
        return
    for first, second in [pack[:2] for pack in data.packs if len(pack) > 1][:_MOST_TRIED]:
        alone, together = data.sample([second]), data.sample([first, second])
        if LABELS not in alone or not bool((alone[LABELS] != IGNORED).any()):
            continue
        begins = int((together[POSITIONS] == 0).nonzero()[1])
        together[LABELS][:begins] = IGNORED
        model = build_really(job.model, job.seed).eval()
        move_weights(model, job.seed)
        for parameter in model.parameters():
            parameter.data.mul_(_TIMES if parameter.dim() > 1 else 1.0)
        try:
            behind, by_itself = (_gradients(job, model, sample) for sample in (together, alone))
        except Exception:  # the trial of the loss, in training mode, reports the job's own errors
            return
        off = [name for name, gradient in by_itself.items() if _relative(behind.get(name), gradient) > _DIFFERENT]
        if len(off) > _SHARE * len(by_itself):
            raise JobError(
                f"{type(model).__name__} mixes the documents of a packed sample: the gradients of document {second} "
                f"are others when document {first} comes before it",
                source=definition_line(job.loss),
                field="dataset",
                value=f"{len(off)} of {len(by_itself)} parameters differ, such as {off[0]}",
                allowed="attention within documents, as by morph.data.document_mask(batch['position_ids']); one of the "
                "models in the guide's table, which make that mask from position_ids; or a data set that is not packed",
            )
        return


def _gradients(job: Job, model: nn.Module, sample: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.default_generator.manual_seed(job.seed)
    batch = recipe_of(job).batch([sample], [(0, 0)], "dataset()")
    loss, _ = values_of(job.loss(model, batch.form.build(batch.entries)))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(trained, gradients, strict=True) if gradient is not None}


def _relative(gradient: Tensor | None, other: Tensor) -> float:
    """Return the size of the difference, in sizes of ``other``; 0 where that is nothing but rounding."""
    size = float(other.double().norm())
    return 0.0 if gradient is None or size < 1e-9 else float((gradient.double() - other.double()).norm()) / size

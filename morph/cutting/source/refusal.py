"""Explains in plain words why torch.export refused a model, and what to write instead."""

from __future__ import annotations

import traceback

from morph.contract.errors import JobError
from morph.cutting.source.guards import TRANSFORMS, Guard

OR_MARK = (
    "; or mark where to cut: call a morph.CutPoint() on the hidden tensor in the forward, "
    "or name modules in Job(cut_points=[...]); or do not cut: Job(num_sections=1) trains replicas of the whole model"
)


_COMPARES_MASKS = "_detect_is_causal_mask"
_PACKED = ("torch/nn/utils/rnn.py", "torch/nn/modules/rnn.py")


class Untraceable(Exception):
    """The user's code cannot be traced, for a reason that is known where it is raised."""

    def __init__(self, reason: str, allowed: str) -> None:
        super().__init__(reason)
        self.allowed = allowed


def transform_refused() -> tuple[str, str]:
    """Return (reason, what is allowed) for a use of torch.func."""
    return (
        "torch.func (grad, vmap, jacrev, jvp) in the forward or the loss is not traced",
        "operations on the whole batch",
    )


def explain(error: Exception, guard: Guard | None = None) -> tuple[str, str]:
    """Return (reason, what is allowed) for an exception of torch.export."""
    reason, advice = _reason_and_advice(error, guard)
    return reason, advice + OR_MARK


def _reason_and_advice(error: Exception, guard: Guard | None) -> tuple[str, str]:
    if isinstance(error, Untraceable):
        return str(error), error.allowed
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename for frame in frames]
    in_transform = any(file.removesuffix(".py").replace("/", ".").endswith(TRANSFORMS) for file in files)
    if in_transform or (guard is not None and guard.transformed):
        return transform_refused()
    comparing = next((frame.line for frame in frames if f"= {_COMPARES_MASKS}(" in (frame.line or "")), None)
    if comparing is not None:
        name = comparing.partition(" = ")[0]
        outer = " (in nn.Transformer: src_is_causal)" if name == "is_causal" else ""
        return (
            "torch compares the values of the attention mask with those of a causal one",
            f"{name}=True{outer} beside a mask that is causal, {name}=False beside any other",
        )
    if any(file.endswith(_PACKED) for file in files) and "FakeTensor" in text:
        return (
            "packed sequences have sizes that depend on the lengths in the batch",
            "padded sequences and a mask, without pack_padded_sequence",
        )
    if type(error).__name__ == "DynamicOutputShapeException":
        return (
            f"{text.removesuffix('.Tensor').removesuffix('.default')} has a result whose size depends on values in a "
            "tensor",
            "operations whose sizes are known from the shapes of the batch",
        )
    if "Constraints violated" in text:
        inside = f", in a {guard.module}" if guard is not None and guard.module else ""
        if "specialized" in text:
            return (
                f"it fixes the number of samples in a micro-batch{inside}",
                "any number of samples; take it from tensor.shape[0], not from len(tensor) or as a written number",
            )
        return (
            f"it does one thing for some numbers of samples in a micro-batch and another for others{inside}",
            "the same operations for any number of samples, one included",
        )
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__ or "unbacked" in text:
        return (
            "control flow or a shape depends on values in a tensor",
            "branches and shapes known before the data; use torch.where, or move the choice into the data set",
        )
    return (
        f"{type(error).__name__}: {first_line(error)}",
        "plain tensor operations; rewrite this line, or move it into the data set",
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not empty."""
    try:
        text = str(error)
    except Exception:  # the user's own class writes the text
        text = ""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def changes_requires_grad(name: str, line: str | None) -> JobError:
    """Return the error for a parameter that is frozen or unfrozen while training."""
    return JobError(
        f"requires_grad of {name} changes while training",
        source=line,
        field="model",
        allowed="what Job.model sets it to, for the whole run; a schedule that sets the learning rate of a parameter "
        'group to 0 freezes it (docs/guides/training.md, "Freezing by step")',
    )

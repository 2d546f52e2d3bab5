"""Say in plain words why torch.export refused a model, and what to write instead."""

from __future__ import annotations

from morph.contract.errors import JobError
from morph.cutting.source.guards import Guard

OR_MARK = (
    "; or mark where to cut: call a morph.CutPoint() on the hidden tensor in the forward, "
    "or name modules in Job(cut_points=[...])"
)


def explain(error: Exception, guard: Guard | None = None) -> tuple[str, str]:
    """Return (reason, what is allowed) for an exception of torch.export.

    Args:
        error: What it raised.
        guard: What the trace came to rely on, as far as it was seen.
    """
    reason, advice = _reason_and_advice(error, guard)
    return reason, advice + OR_MARK


def _reason_and_advice(error: Exception, guard: Guard | None) -> tuple[str, str]:
    text = str(error)
    if "Constraints violated" in text:
        inside = f", in a {guard.module}" if guard is not None and guard.module else ""
        if "specialized" in text:
            return (
                f"it fixes the number of samples in a micro-batch{inside}",
                "any number of samples; take it from tensor.shape[0] instead of writing it down",
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
    """Return the first line of an error's text that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def changes_requires_grad(name: str, line: str | None) -> JobError:
    """Say that a parameter is frozen or thawed while training."""
    return JobError(
        f"requires_grad of {name} changes while training",
        source=line,
        field="model",
        allowed="what Job.model sets it to, for the whole run; a schedule that sets the learning rate of a parameter "
        'group to 0 freezes it (docs/training.md, "Freezing by step")',
    )

"""What a finding means and what to do about it, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from morph.words import counted, size_text

if TYPE_CHECKING:
    from morph.tracing.recorder import Draft

_LISTED = 3
_ALLOW = "if it only lays values side by side or shows them, name its id in Job.allowed_dependencies"
_STATE = "keep it in optimizer.state[parameter], under a name, as a tensor or a number"
_REDUCING = ("norm", "stack", "cat", "add", "sum", "mean", "max", "min", "mul", "dot")


def describe(draft: Draft) -> tuple[str, str]:
    """Return (what it is, what to do about it)."""
    fixed = _FIXED.get(draft.kind)
    return fixed if fixed else _DESCRIBE[draft.kind](draft)


def _activation(draft: Draft) -> tuple[str, str]:
    far = f", some of it through up to {draft.detail} sections that do not use it" if draft.detail else ""
    return f"crosses cuts with the plan, and its gradient crosses back{far}", ""


def _tied(draft: Draft) -> tuple[str, str]:
    names = ", ".join(list(draft.names)[:_LISTED])
    more = f" and {len(draft.names) - _LISTED} more" if len(draft.names) > _LISTED else ""
    size = size_text(sum(draft.names.values()))
    cost = f"{size} tied: held, with optimizer state, and summed between these sections at every step"
    advice = ""
    if len(draft.names) > _LISTED:
        advice = "costly; a weight decay belongs into the optimizer, which adds it unit by unit"
    return f"{names}{more}; {cost}", advice


def _morph(draft: Draft) -> tuple[str, str]:
    return draft.detail, ""


def _mixing(draft: Draft) -> tuple[str, str]:
    if draft.handled:
        return "a Python number is computed from several units, but no weight was seen to depend on it", ""
    library = draft.place.library or ""
    flow = (
        f"; it flows into {counted(len(draft.reached), 'unit')}"
        if draft.reached
        else "; it reaches no weight as a tensor"
    )
    if "clip_grad" in library:
        return (
            f"the norm of the gradients of several units{flow}",
            "set Job.clip_grad_norm instead: Morph takes the norm over all units",
        )
    if draft.operator.startswith("_amp_") or draft.detail == "logical":
        return (
            f"a check over several units, such as for overflow{flow}",
            "leave fp16 loss scaling to Morph, which decides for all units: Job.precision and Job.loss_scaling",
        )
    if draft.detail == "number":
        flow = flow if draft.reached else "; in trials one optimizer for each unit ended elsewhere"
        return (
            f"a Python number is computed from several units, such as a norm or a step size for all{flow}",
            f"compute it for each parameter by itself, use another optimizer, or train with num_sections=1; {_ALLOW}",
        )
    if all(not shape for shape in draft.shapes) and any(word in draft.operator for word in _REDUCING):
        return (
            f"a number taken over several units, such as a global norm{flow}",
            f"take it for each parameter, or clip with Job.clip_grad_norm; {_ALLOW}",
        )
    return f"values of several units are mixed{flow}", f"treat each parameter by itself; {_ALLOW}"


def _leaves(draft: Draft) -> tuple[str, str]:
    if draft.detail == "met":
        return "its value is used by Python; where values of several units meet is a finding of its own", ""
    if draft.handled:
        return "its value is used by Python; in trials one optimizer for each unit gave the same bits", ""
    return (
        "its value is used by Python; in trials one optimizer for each unit ended elsewhere, or none could be made",
        f"keep it a tensor, use it for its own parameter only, and settle other violations first; {_ALLOW}",
    )


def _differs(draft: Draft) -> tuple[str, str]:
    return (
        f"in trials one optimizer for each unit ended elsewhere ({draft.detail}), and no operation shows why",
        "look for numbers taken from the list of parameters (its length, the position in it) or shared by Python",
    )


def _refused(draft: Draft) -> tuple[str, str]:
    return draft.detail, "let the function take any part of the parameters: leave out groups that are empty"


_FIXED = {
    "constant": ("made outside the step and only read, so it is the same on every worker", ""),
    "common": (
        "a tensor that is no parameter's own changes from step to step; each worker would have another, "
        "and a checkpoint has none",
        f"one for each parameter: {_STATE}",
    ),
    "unsaved": ("changes from step to step where a checkpoint or a move to another worker would lose it", _STATE),
    "random": (
        "random numbers in the optimizer would depend on the shape of the job",
        "draw from a generator seeded by the parameter's name and its step count",
    ),
}
_DESCRIBE = {
    "activation": _activation,
    "tied": _tied,
    "morph": _morph,
    "mixing": _mixing,
    "leaves": _leaves,
    "differs": _differs,
    "refused": _refused,
}

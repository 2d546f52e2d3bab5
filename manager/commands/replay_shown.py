"""The outcomes of ``morph replay`` as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from manager.accounting.account import TimeUse
from manager.report.picture import PARTS
from manager.simulation.replay import interval
from manager.simulation.spot.run_end import PolicyOutcome
from morph.contract.errors import ConfigError
from morph.pictures import INK, LINES, picture, plain_axes
from morph.tables import table, wide_console

WIDTH = 118
STYLES = ("-", "--", ":", "-.")


def by_policy(outcomes: Sequence[PolicyOutcome]) -> dict[str, list[PolicyOutcome]]:
    """Return outcomes by policy, in the order in which the policies were requested."""
    outcomes_of: dict[str, list[PolicyOutcome]] = {}
    for outcome in outcomes:
        outcomes_of.setdefault(outcome.policy, []).append(outcome)
    return outcomes_of


def show(name: str, outcomes: Sequence[PolicyOutcome]) -> None:
    """Print a row of means for each policy, with 95 % intervals of the speeds if there are several traces."""
    num = len({(outcome.trace, outcome.seed) for outcome in outcomes})
    rows = []
    for policy, ones in by_policy(outcomes).items():
        vm_s = sum(outcome.vm_s for outcome in ones)
        lost = (
            sum(outcome.parts_s[TimeUse.LOST] + outcome.parts_s[TimeUse.MORPH] for outcome in ones) / vm_s
            if vm_s
            else 0.0
        )
        rows.append(
            [
                policy,
                f"{_mean([outcome.hours for outcome in ones]):.4g}",
                f"{_mean([float(outcome.steps) for outcome in ones]):.5g}",
                _spread([outcome.examples_per_s for outcome in ones], ".4g"),
                f"{lost:.1%}",
                f"{_mean([float(outcome.lost_steps) for outcome in ones]):.4g}",
                f"{_mean([float(outcome.num_changes) for outcome in ones]):.4g}",
                "-" if ones[0].usd is None else f"{_mean([outcome.usd or 0.0 for outcome in ones]):.4g}",
                _spread([outcome.examples_per_usd for outcome in ones if outcome.examples_per_usd is not None], ".4g"),
            ]
        )
    columns = ["policy", "hours", "steps", "examples/s", "lost time", "lost steps", "changes", "$", "examples/$"]
    title = f"{name}: {num} trace{'s' if num > 1 else ''}" + (", means with 95 % intervals" if num > 1 else "")
    console = wide_console(WIDTH)
    console.print(table(title, columns, rows, left=1, light=True))
    for outcome in outcomes:
        if outcome.gave_up:
            console.print(f"{outcome.policy}{f' on {outcome.trace}' if num > 1 else ''} {outcome.gave_up}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    mean, low, high = interval(values)
    shown = format(mean, form)
    return shown if low == high else f"{shown} ({format(low, form)}-{format(high, form)})"


def draw(name: str, outcomes: Sequence[PolicyOutcome], path: Path) -> None:
    """Draw each policy's use of the VMs' time; below, the VMs and each policy's examples on the first trace."""
    policies = by_policy(outcomes)
    size = (10.0, 7.0 + 0.25 * len(policies))
    with picture(path, ConfigError, size, nrows=3, height_ratios=[1.3, 1, 1.2]) as (_, (above, middle, below)):
        for place, ones in enumerate(reversed(policies.values())):
            left, whole = 0.0, sum(outcome.vm_s for outcome in ones)
            for part, (color, _) in PARTS.items():
                share = sum(outcome.parts_s[part] for outcome in ones) / whole if whole else 0.0
                above.barh(place, share, left=left, color=color, height=0.7)
                left += share
        above.set(yticks=range(len(policies)), yticklabels=list(reversed(policies)), xlim=(0, 1))
        above.xaxis.set_major_formatter("{x:.0%}")
        above.set_xlabel("share of the paid time of VMs")
        above.set_title(f"{name}: use of the VMs' time", loc="left", fontsize=12)
        used = [part for part in PARTS if any(outcome.parts_s[part] > 1e-3 * outcome.vm_s for outcome in outcomes)]
        handles = [above.barh([0], [0], color=PARTS[part][0], label=part.words) for part in used]
        above.legend(handles=handles, frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
        plain_axes(above)
        first = outcomes[0]
        same = [outcome for outcome in outcomes if (outcome.trace, outcome.seed) == (first.trace, first.seed)]
        longest = max(outcome.hours for outcome in same)
        moments = first.moments
        middle.step(
            [*(moment.time_s / 3600 for moment in moments), first.hours],
            [*(moment.num_vms for moment in moments), moments[-1].num_vms if moments else 0],
            where="post",
            color=INK,
            linewidth=1.2,
        )
        middle.set(ylabel="VMs", xlim=(0, longest), ylim=(0, None))
        middle.set_title(f"VMs and progress on one trace: {first.trace or 'the trace'}", loc="left", fontsize=11)
        plain_axes(middle, grid="y")
        for place, (label, (hours, done)) in enumerate(_curves(same).items()):
            color, style = LINES[place % len(LINES)], STYLES[place // len(LINES) % len(STYLES)]
            below.plot(hours, done, color=color, linestyle=style, label=label, linewidth=1.6)
        below.set(xlabel="hours", ylabel="examples trained", xlim=(0, longest), ylim=(0, None))
        below.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
        plain_axes(below, grid="y")


def _curves(outcomes: Sequence[PolicyOutcome]) -> dict[str, tuple[list[float], list[float]]]:
    """Return the progress of policies. Those with equal progress share a curve, because one would hide the others."""
    curves: list[tuple[list[str], tuple[list[float], list[float]]]] = []
    for outcome in outcomes:
        curve = _progress(outcome)
        names = next((names for names, known in curves if known == curve), None)
        if names is None:
            curves.append(([outcome.policy], curve))
        else:
            names.append(outcome.policy)
    return {",\n".join(names): curve for names, curve in curves}


def _progress(outcome: PolicyOutcome) -> tuple[list[float], list[float]]:
    """Return hours, and examples trained by then at each shape's speed, scaled to end at the examples that count."""
    ends = [*(moment.time_s for moment in outcome.moments[1:]), outcome.hours * 3600]
    hours, done = [0.0], [0.0]
    for moment, end_s in zip(outcome.moments, ends, strict=True):
        hours.append(end_s / 3600)
        done.append(done[-1] + moment.examples_per_s * max(0.0, end_s - moment.time_s))
    whole = done[-1] or 1.0
    assert all(before <= after for before, after in pairwise(done))
    return hours, [examples * outcome.examples / whole for examples in done]

"""Several policies on the same traces, side by side."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from manager.simulation.policies.bounds import play_ideal, play_on_demand
from manager.simulation.policies.morph import play_mix, play_morph
from manager.simulation.policies.pipelines import play_pipelines
from manager.simulation.policies.restart import play_restart
from manager.simulation.spot.job import OneVmJob, SpotJob
from manager.simulation.spot.run_end import PolicyOutcome, SpotPrices, Until
from morph.contract.errors import ConfigError
from morph.contract.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

RESAMPLES = 2000
Aim = Literal["examples", "dollars"]
_QUICK = 0.02
"""The time to play a policy without the controller, as a share of the time with it."""
BOUND = "ideal"
OTHER_BATCHES = ("drop", "bamboo", "bamboo-lflb")
"""Policies that train with smaller batches than requested while pipelines are missing, however fast they are."""
MOST = {"restart": 10**9, "mix": 99}


Play = Callable[..., PolicyOutcome]
"""Plays a job (``SpotJob``) on a trace; further arguments by name: ``until``, ``seed``, ``prices`` and ``name``."""
POLICIES: Mapping[str, tuple[Play, str]] = {
    "morph": (
        play_morph,
        "Morph in place: the shape changes between steps, and state comes from the remaining workers",
    ),
    "morph-salvage": (
        partial(play_morph, redundancy="salvage"),
        "Morph, with a follower for state and partial sums that only one VM has, even if it does not pay",
    ),
    "morph-state": (
        partial(play_morph, redundancy="state"),
        "Morph, with a follower for state that only one VM has; an abandoned step is repeated",
    ),
    "morph-off": (partial(play_morph, redundancy="off"), "Morph without followers: lost steps are repeated"),
    "restart": (play_restart, "every loss restarts the job from a checkpoint, saved at the interval of least cost"),
    "adaptive": (
        partial(play_restart, adaptive=True),
        "the same, but only notices cause saves, if every notice leaves time for one",
    ),
    "restart-100": (partial(play_restart, every_steps=100), "the same, saved every 100 steps"),
    "drop": (
        partial(play_pipelines, redundant=None),
        "a pipeline that lost a VM pauses, the others train on with fewer samples",
    ),
    "bamboo": (
        partial(play_pipelines, redundant="eflb"),
        "each VM computes forward for its successor, and takes over its stage (redundant computation)",
    ),
    "bamboo-lflb": (
        partial(play_pipelines, redundant="lflb"),
        "the same, but nothing is computed for a successor until it is lost",
    ),
    "mix-50": (partial(play_mix, on_demand_share=0.5), "Morph on as many VMs, half of which are never taken"),
    "on-demand": (play_on_demand, "the average number of VMs, never taken, at the on-demand price"),
    "ideal": (play_ideal, "the bound: changes are free and instant, nothing is lost, and pipelines may differ"),
}
COMPARED = tuple(name for name in POLICIES if not name.startswith("morph-"))
"""All policies except those that measure the worth of one part of Morph."""


@dataclass(frozen=True)
class Replay:
    """Policies and traces to play, by name; each trace has a seed, which also draws numbers between bounds."""

    job: SpotJob | OneVmJob
    policies: tuple[str, ...]
    traces: tuple[tuple[str, int, Trace], ...]
    until: Until
    prices: SpotPrices | None

    def run(self, num_processes: int, show_share: Callable[[float], None] = lambda _share: None) -> list[PolicyOutcome]:
        """Play everything; ``show_share`` is called with the growing share of the work that is done.

        All policies are played on one trace after another. Outcomes are ordered by policy, then by trace.
        """
        cases = [(policy, case) for case in self.traces for policy in self.policies]
        weights = [1.0 if by_controller(policy) else _QUICK for policy, _ in cases]
        outcomes: dict[int, PolicyOutcome] = {}
        if num_processes == 1:
            whole = sum(weights)
            for place, (policy, case) in enumerate(cases):
                share = partial(_share_of, sum(weights[:place]) / whole, weights[place] / whole, show_share)
                outcomes[place] = self.play(policy, *case, show_share=share)
                share(1.0)
        else:
            with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
                requested = {pool.submit(self.play, policy, *case): place for place, (policy, case) in enumerate(cases)}
                for future in as_completed(requested):
                    outcomes[requested[future]] = future.result()
                    show_share(sum(weights[place] for place in outcomes) / sum(weights))
        num = len(self.policies)
        return [outcomes[trace * num + policy] for policy in range(num) for trace in range(len(self.traces))]

    def play(
        self, policy: str, name: str, seed: int, trace: Trace, show_share: Callable[[float], None] | None = None
    ) -> PolicyOutcome:
        """Play one policy on one trace; ``show_share``: called with the share of the trace that is played."""
        job = self.job if isinstance(self.job, SpotJob) else self.job.drawn(seed)
        more: dict[str, Any] = {"show_share": show_share} if show_share is not None and by_controller(policy) else {}
        return play_of(policy)(job, trace, until=self.until, seed=seed, prices=self.prices, name=name, **more)


def _share_of(before: float, part: float, show_share: Callable[[float], None], share: float) -> None:
    """Report the share of all work that is done, including the running part."""
    show_share(before + part * share)


def by_controller(policy: str) -> bool:
    """Return whether the controller of real runs decides event by event, which takes nearly all of the time."""
    return policy.split("-")[0] in ("morph", "mix")


def play_of(policy: str) -> Play:
    """Return the player of one of ``POLICIES``, ``restart-N`` (saves every N steps) or ``mix-N`` (N % on demand)."""
    if policy in POLICIES:
        return POLICIES[policy][0]
    kind, _, number = policy.partition("-")
    if not number.isdecimal() or kind not in ("restart", "mix") or not 1 <= int(number) <= MOST[kind]:
        raise KeyError(policy)
    if kind == "restart":
        return partial(play_restart, every_steps=int(number))
    return partial(play_mix, on_demand_share=int(number) / 100)


def policies_of(text: str) -> tuple[str, ...]:
    """Read names separated by commas, "compared" or "all"; a ConfigError names a policy that does not exist."""
    groups = {"all": tuple(POLICIES), "compared": COMPARED}
    names = groups.get(text) or tuple(name.strip() for name in text.split(","))
    for name in names:
        try:
            play_of(name)
        except KeyError:
            allowed = f"compared, all, or of {', '.join(POLICIES)}; restart-N for N steps, mix-N for N % on demand"
            raise ConfigError("is not a policy", field="--policy", value=name, allowed=allowed) from None
    return tuple(dict.fromkeys(names))


def types_of(text: str, gpus_per_vm: int, policies: Sequence[str]) -> dict[str, str]:
    """Read types of GPU by instance type, as ``p3.2xlarge=v100,g4dn.xlarge=t4``.

    Raises ConfigError if the text is malformed, or a policy supports only one type.
    """
    field, types = "--node-types", {}
    for part in text.split(","):
        instance_type, _, node_type = (each.strip() for each in part.partition("="))
        if not instance_type or not node_type or instance_type in types:
            allowed = "each instance type once, as p3.2xlarge=v100,g4dn.xlarge=t4"
            raise ConfigError("are not types", field=field, value=text, allowed=allowed)
        types[instance_type] = node_type
    if gpus_per_vm > 1:
        raise ConfigError("is for VMs with one GPU", field=field, value=text, allowed="without --gpus-per-vm")
    if others := [name for name in policies if not name.startswith("morph")]:
        allowed = "--policy morph, or variants of it"
        raise ConfigError(f"is not supported by {others[0]}", field=field, value=text, allowed=allowed)
    return types


def frame_of(outcomes: Sequence[PolicyOutcome]) -> pd.DataFrame:
    """Return a table with one row for each outcome; columns ``share_*`` are the uses of the VMs' time, 0 to 1."""
    import pandas as pd  # its import is slow

    return pd.DataFrame(
        [
            {
                "policy": outcome.policy,
                "trace": outcome.trace,
                "seed": outcome.seed,
                "hours": outcome.hours,
                "steps": outcome.steps,
                "finished": outcome.finished,
                "gave_up": outcome.gave_up,
                "examples": outcome.examples,
                "examples_per_s": outcome.examples_per_s,
                "usd": outcome.usd,
                "examples_per_usd": outcome.examples_per_usd,
                "lost_steps": outcome.lost_steps,
                "losses": outcome.num_losses,
                "set_back": outcome.num_fatal,
                "changes": outcome.num_changes,
                "vm_hours": outcome.vm_s / 3600,
                **{
                    f"share_{part.value}": spent / outcome.vm_s if outcome.vm_s else 0.0
                    for part, spent in outcome.parts_s.items()
                },
            }
            for outcome in outcomes
        ]
    ).astype({"usd": float, "examples_per_usd": float})  # empty, not absent, if nothing has a price


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval (bootstrap); for a single value, only the value."""
    array = np.asarray(values, dtype=float)
    if len(array) < 2:
        return float(array.mean()), float(array.mean()), float(array.mean())
    drawn = np.random.default_rng(seed).choice(array, (RESAMPLES, len(array))).mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(array.mean()), float(low), float(high)


def advice(outcomes: Sequence[PolicyOutcome], aim: Aim | None = None) -> str:
    """Return a sentence on which policy to take, and why; only policies that train with the requested batch count.

    ``aim``: the measure, examples per second or per dollar; None: per dollar if everything has a price.
    """
    worth: dict[str, list[float]] = {}
    priced = aim != "examples" and all(outcome.examples_per_usd is not None for outcome in outcomes)
    for outcome in outcomes:
        if outcome.policy != BOUND:
            value = outcome.examples_per_usd if priced else outcome.examples_per_s
            worth.setdefault(outcome.policy, []).append(value or 0.0)
    means = {policy: sum(values) / len(values) for policy, values in worth.items()}
    order = sorted(means, key=lambda policy: -means[policy])
    what = "examples per dollar" if priced else "examples per second"
    if order and not means[order[0]]:
        return "No policy makes progress on these VMs."
    if len(order) < 2:
        return "".join(f"{policy}: {means[policy]:.4g} {what}" for policy in order)
    best = next((policy for policy in order if policy not in OTHER_BATCHES), order[0])
    compared = ", ".join(
        f"{means[best] / means[other]:.2f} times {other}" if means[other] else f"{other} makes no progress"
        for other in order
        if other != best
    )
    smaller = " and ".join(policy for policy in order if policy in OTHER_BATCHES)
    but = f" ({smaller}: smaller batches while VMs are missing)" if smaller else ""
    return f"Take {best}: {means[best]:.4g} {what}, {compared}{but}."

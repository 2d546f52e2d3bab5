"""Several policies on the same traces, side by side."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from manager.simulation.policies.bounds import play_ideal, play_on_demand
from manager.simulation.policies.morph import play_morph
from manager.simulation.policies.restart import play_restart
from manager.simulation.spot.job import SpotJob
from manager.simulation.spot.outcome import Outcome
from manager.simulation.spot.until import SpotPrices, Until
from morph.contract.errors import ConfigError
from morph.contract.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

RESAMPLES = 2000


class Play(Protocol):
    """Plays a job on a trace."""

    def __call__(
        self, job: SpotJob, trace: Trace, *, until: Until, seed: int, prices: SpotPrices | None, name: str
    ) -> Outcome:
        """Return what it came to."""


POLICIES: Mapping[str, tuple[Play, str]] = {
    "morph": (play_morph, "Morph in place: the shape changes between two steps, and state comes from who is left"),
    "restart": (play_restart, "every loss restarts the job from a checkpoint, saved as often as costs least"),
    "restart-100": (partial(play_restart, every_steps=100), "the same, saved every 100 steps"),
    "on-demand": (play_on_demand, "as many VMs as there are on average, never taken, at their price"),
    "ideal": (play_ideal, "changes of shape are free and instant, and nothing is ever lost: the bound"),
}
BOUND = "ideal"


@dataclass(frozen=True)
class Replay:
    """What to play: policies by name, traces by name, each with a seed."""

    job: SpotJob
    policies: tuple[str, ...]
    traces: tuple[tuple[str, int, Trace], ...]
    until: Until
    prices: SpotPrices | None

    def run(self, num_processes: int, done: Callable[[], None] = lambda: None) -> list[Outcome]:
        """Play everything; ``done`` is called after each. Outcomes are in order of policies, then traces."""
        cases = [(policy, case) for policy in self.policies for case in self.traces]
        if num_processes == 1:
            return list(self._one_by_one(cases, done))
        found: dict[int, Outcome] = {}
        with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            asked = {pool.submit(self.play, policy, *case): place for place, (policy, case) in enumerate(cases)}
            for future in as_completed(asked):
                found[asked[future]] = future.result()
                done()
        return [found[place] for place in range(len(cases))]

    def _one_by_one(
        self, cases: Sequence[tuple[str, tuple[str, int, Trace]]], done: Callable[[], None]
    ) -> Iterator[Outcome]:
        for policy, case in cases:
            yield self.play(policy, *case)
            done()

    def play(self, policy: str, name: str, seed: int, trace: Trace) -> Outcome:
        """Play one policy on one trace."""
        play, _ = POLICIES[policy]
        return play(self.job, trace, until=self.until, seed=seed, prices=self.prices, name=name)


def policies_of(text: str) -> tuple[str, ...]:
    """Read names with commas, or "all".

    Raises:
        ConfigError: naming one that there is not.
    """
    names = tuple(POLICIES) if text == "all" else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in POLICIES:
            allowed = f"all, or of {', '.join(POLICIES)}"
            raise ConfigError("is no policy", field="--policy", value=name, allowed=allowed)
    return tuple(dict.fromkeys(names))


def frame_of(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row for each outcome; columns ``share_*`` are what the VMs' time went into, 0 to 1."""
    import pandas as pd  # slow to import

    return pd.DataFrame(
        [
            {
                "policy": one.policy,
                "trace": one.trace,
                "seed": one.seed,
                "hours": one.hours,
                "steps": one.steps,
                "finished": one.finished,
                "examples": one.examples,
                "examples_per_s": one.examples_per_s,
                "usd": one.usd,
                "examples_per_usd": one.examples_per_usd,
                "lost_steps": one.lost_steps,
                "losses": one.num_losses,
                "set_back": one.num_fatal,
                "changes": one.num_changes,
                "vm_hours": one.vm_s / 3600,
                **{f"share_{part.value}": spent / one.vm_s if one.vm_s else 0.0 for part, spent in one.parts_s.items()},
            }
            for one in outcomes
        ]
    )


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the mean, and between what it lies with 95 % (bootstrap); of one value only itself."""
    array = np.asarray(values, dtype=float)
    if len(array) < 2:
        return float(array.mean()), float(array.mean()), float(array.mean())
    drawn = np.random.default_rng(seed).choice(array, (RESAMPLES, len(array))).mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(array.mean()), float(low), float(high)


def advice(outcomes: Sequence[Outcome]) -> str:
    """Say which policy to take, and why: the most examples per dollar, or per second where nothing has a price."""
    worth: dict[str, list[float]] = {}
    priced = all(one.examples_per_usd is not None for one in outcomes)
    for one in outcomes:
        if one.policy != BOUND:
            value = one.examples_per_usd if priced else one.examples_per_s
            worth.setdefault(one.policy, []).append(value or 0.0)
    if not worth:
        return ""
    means = {policy: sum(values) / len(values) for policy, values in worth.items()}
    best, *others = sorted(means, key=lambda policy: -means[policy])
    what = "examples per dollar" if priced else "examples per second"
    if not others:
        return f"{best}: {means[best]:.4g} {what}"
    compared = ", ".join(
        f"{means[best] / means[other]:.2f} times {other}" if means[other] else f"{other} makes no progress"
        for other in others
    )
    return f"Take {best}: {means[best]:.4g} {what}, {compared}."

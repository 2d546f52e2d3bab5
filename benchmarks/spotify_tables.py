"""The tables of the thesis on Spotify (6.1 to 6.3, figure 6.3), from a simulated spot cluster of one VM.

    python -m benchmarks spotify_tables --seeds 100

The thesis does not print the ten parameters of its simulator. Those here are inferred from its totals divided by its
counts (``LIGHT`` and ``HEAVY``); MTTP, notice, VM and prices are its own. Published figures are printed for comparison.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import head, row
from manager.accounting.account import TimeUse
from manager.simulation.replay import play_of
from manager.simulation.spot.job import OneVmJob, SpotJob
from manager.simulation.spot.run_end import PolicyOutcome, SpotPrices, Until
from simulator import spot_model

MTTP_S, NOTICE_S = 10_800.0, 30.0
PRICES = SpotPrices(spot_usd_per_h=2.3, on_demand_usd_per_h=6.2)
STEPS = 100_000


@dataclass(frozen=True)
class Inferred:
    """A job of the thesis. All in seconds; ``published``: by policy, overhead over on demand in percent, hours, $."""

    name: str
    step_s: float
    stall_s: float
    durable_s: float
    allocation_s: float
    preparation_s: float
    published: dict[str, tuple[float, float]]
    """hours in total, dollars"""

    @property
    def job(self) -> SpotJob:
        """What is simulated."""
        numbers = OneVmJob(
            name=self.name,
            step_s=(self.step_s, self.step_s),
            save_s=(self.stall_s, self.stall_s),
            upload_s=(self.durable_s, self.durable_s),
            preparation_s=(self.preparation_s, self.preparation_s),
        )
        return numbers.drawn(0)


def hours(days: int, clock: str) -> float:
    """``5, "11:31:28"`` in hours."""
    parts = [int(part) for part in clock.split(":")]
    return 24 * days + parts[0] + parts[1] / 60 + parts[2] / 3600


LIGHT = Inferred(
    "GPT-117M",
    4.6,
    2.55,
    20.0,
    132.0,
    153.0,
    {
        "adaptive": (hours(5, "11:31:28"), 303.1),
        "restart-10": (hours(5, "19:18:59"), 321.1),
        "restart-51": (hours(5, "14:41:34"), 310.3),
        "restart-100": (hours(5, "15:35:35"), 312.5),
        "on-demand": (hours(5, "7:51:54"), 793.4),
    },
)
HEAVY = Inferred(
    "GPT-1.3B",
    19.75,
    19.5,
    108.0,
    136.0,
    323.0,
    {
        "adaptive": (hours(25, "16:35:27"), 1421.1),
        "restart-10": (hours(26, "19:10:54"), 1482.4),
        "restart-33": (hours(25, "16:51:55"), 1421.7),
        "restart-100": (hours(27, "0:26:57"), 1494.5),
        "on-demand": (hours(22, "21:17:22"), 3408.3),
    },
)
PROCESSED = (
    (LIGHT, 1500.0, 7310, 6910, "12:00:51", "12:06:22"),
    (LIGHT, 2700.0, 8390, 8090, "12:07:16", "12:10:58"),
    (LIGHT, 5400.0, 8910, 8420, "12:05:11", "11:54:10"),
    (HEAVY, 1500.0, 1070, 1000, "12:06:08", "11:56:20"),
    (HEAVY, 2400.0, 1400, 1380, "12:00:57", "11:54:44"),
    (HEAVY, 4500.0, 1860, 1770, "12:12:39", "12:12:32"),
)
"""Table 6.1: MTTP, steps that 12 hours really brought (adaptive, static), hours of the thesis' simulator for them."""


def play(of: Inferred, policy: str, steps: int, mttp_s: float, seeds: int) -> list[PolicyOutcome]:
    """Train so many steps on one VM that is taken and replaced."""
    model = spot_model(
        1,
        losses_per_vm_h=3600 / mttp_s,
        bulk_share=0.0,
        replacement_s=of.allocation_s,
        num_zones=1,
        noticed=1.0,
        notice_s=NOTICE_S,
    )
    bound_s = 3 * steps * of.step_s + 86_400
    return [
        play_of(policy)(
            of.job,
            model.draw(seed, bound_s),
            until=Until(kind="steps", amount=steps),
            seed=seed,
            prices=PRICES,
            name="",
        )
        for seed in range(seeds)
    ]


def mean(values: Sequence[float]) -> float:
    """Return the mean over seeds."""
    return statistics.fmean(values)


def breakdown(of: Inferred, seeds: int) -> None:
    """Tables 6.2 and 6.3."""
    plain_h = STEPS * of.step_s / 3600
    print(f"{of.name}, {STEPS} steps, MTTP {MTTP_S:g} s")
    head("policy | again, h | saves | allocation | preparation | total | published | off | $ | published $")
    for policy, (published_h, published_usd) in of.published.items():
        ones = play(of, policy, STEPS, MTTP_S, seeds if policy != "on-demand" else 1)
        assert all(one.finished for one in ones)
        whole_h = mean([one.hours for one in ones])
        parts = {part: mean([one.parts_s[part] for one in ones]) / 3600 for part in TimeUse}
        missing_h = mean([one.hours - one.vm_s / 3600 for one in ones])
        hours_of = (
            parts[TimeUse.LOST],
            parts[TimeUse.CHECKPOINT],
            missing_h,
            parts[TimeUse.WARMING],
            whole_h,
            published_h,
        )
        off, usd = f"{whole_h / published_h - 1:+.1%}", mean([one.usd or 0.0 for one in ones])
        row(policy, *(f"{each_h:.2f}" for each_h in hours_of), off, f"{usd:.1f}", published_usd)
    print(f"without any loss or save: {plain_h:.2f} h\n")


def accuracy(seeds: int) -> None:
    """Table 6.1: what the simulator says of the steps that 12 real hours brought; 12:00:00 is right."""
    print("table 6.1: hours for the steps of 12 real hours (standard deviation), and those of the thesis' simulator")
    head("job | MTTP | adaptive: steps | here | the thesis's | fixed: steps | here | the thesis's")
    for of, mttp_s, adaptive, static, told_adaptive, told_static in PROCESSED:
        every = {LIGHT.name: 51, HEAVY.name: 33}[of.name]
        cells: list[object] = []
        for policy, steps, told in (("adaptive", adaptive, told_adaptive), (f"restart-{every}", static, told_static)):
            found = [one.hours for one in play(of, policy, steps, mttp_s, seeds)]
            cells += [steps, f"{mean(found):.2f} ({statistics.stdev(found):.2f})", f"{hours(0, told):.2f}"]
        row(of.name, f"{mttp_s:.0f} s", *cells)


def frequencies(seeds: int) -> None:
    """Figure 6.3: the overhead of the heavy job over no loss, by MTTP."""
    plain_h = STEPS * HEAVY.step_s / 3600
    head("figure 6.3, GPT-1.3B, adaptive: MTTP | overhead")
    for mttp_h in (1, 2, 3, 4, 6, 8, 12):
        ones = play(HEAVY, "adaptive", STEPS, 3600.0 * mttp_h, seeds)
        row(f"{mttp_h} h", f"{mean([one.hours for one in ones]) / plain_h - 1:+.1%}")


def main(seeds: int = 100) -> None:
    breakdown(LIGHT, seeds)
    breakdown(HEAVY, seeds)
    accuracy(seeds)
    frequencies(seeds)

"""Work that policies complete on recorded traces, as shares of an upper bound, and per dollar.

python -m benchmarks spot_shares ../shared/traces/bamboo_p3.csv
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from benchmarks.harness import PROFILES, head, option, row, words
from manager.simulation.replay import play_of
from manager.simulation.spot.job import job_from_profile, with_redundant_costs
from manager.simulation.spot.run_end import SpotPrices, Until
from morph.contract.profile import load_profile
from simulator.traces.importers import import_trace

POLICIES = "morph,morph-off,restart,restart-100,drop,bamboo,bamboo-lflb,on-demand,mix-50"


def main(
    traces: list[Path],
    profile: Annotated[str, option("of configs/profiles")] = "gpt2-2.5b",
    policies: Annotated[str, option("names with commas")] = POLICIES,
    price: float = 0.9,
    on_demand_price: float = 3.06,
) -> None:
    names = words(policies)
    values = ("over on-demand", "over restart", "over half on demand")
    head(f"trace | hours, losses | {' | '.join(names)} | Morph's value {' | '.join(values)}")
    for path in traces:
        trace = import_trace(path).from_first_event()
        measured = load_profile(PROFILES / f"{profile}.json")
        job = with_redundant_costs(job_from_profile(measured, trace.max_nodes), measured, trace.max_nodes)
        until = Until(kind="hours", amount=trace.duration_s / 3600)
        prices = SpotPrices(spot_usd_per_h=price, on_demand_usd_per_h=on_demand_price)
        done = {
            name: play_of(name)(job, trace, until=until, seed=0, prices=prices, name="") for name in [*names, "ideal"]
        }
        value = {name: outcome.examples_per_usd or 0.0 for name, outcome in done.items()}
        lost = done["ideal"].num_losses
        row(
            path.stem,
            f"{until.amount:.1f}, {lost}",
            *(f"{done[name].examples / done['ideal'].examples:.1%}" for name in names),
            *(
                f"{value['morph'] / value[other]:.2f}" if value.get(other) and "morph" in value else "-"
                for other in ("on-demand", "restart", "mix-50")
            ),
        )

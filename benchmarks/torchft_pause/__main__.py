"""How long a data-parallel job under torchft 0.2 stands still after kills: N replicas of one worker each, gloo.

    python benchmarks/torchft_pause --replicas 16 --kills 30              tuned time-outs
    python benchmarks/torchft_pause --replicas 8 --kills 3 --defaults     torchft's own

torchft is not a dependency of Morph: install it beside the project, `pip install "torchft==0.2.*"`.

A worker sleeps for a step's compute, averages 128 KiB of gradients and commits. One, two or three workers are
killed at once at a random moment (seeded); new ones come when the rest has gone on, and heal from a peer. Prints the
time from the kill to the first step that a survivor commits without the dead, and until every survivor has.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from group import Group
from replica import Setting

TUNED = Setting(
    "tuned",
    heartbeat_timeout_s=0.3,
    heartbeat_interval_s=0.05,
    quorum_tick_s=0.01,
    join_timeout_s=0.1,
    timeout_s=1.0,
)
SETTLE_STEPS = (3, 8)
SETTLE_TIMEOUT_S = 120.0
PAUSE_TIMEOUT_S = 150.0


@dataclass(frozen=True)
class Loss:
    """One kill: seconds until the first survivor commits without the dead, and until every one has."""

    num_killed: int
    first_s: float
    all_s: float


def settle(group: Group, num_replicas: int, steps: int) -> None:
    """Wait until every replica has committed so many more steps with all the others."""
    since = {index: len(replica.commits) for index, replica in group.replicas.items()}

    def settled() -> bool:
        return all(
            len(new := replica.commits[since[index] :]) >= steps and new[-1].num_participants == num_replicas
            for index, replica in group.replicas.items()
        )

    group.watch(settled, SETTLE_TIMEOUT_S, f"{num_replicas} replicas to train")


def lose(group: Group, chooser: random.Random, count: int) -> Loss:
    """Kill some replicas now; the others go on."""
    victims = chooser.sample(sorted(group.replicas), count)
    left = len(group.replicas) - count
    killed_s = group.kill(victims)

    def resumed() -> list[float]:
        firsts = []
        for replica in group.replicas.values():
            after = [
                entry.time_s for entry in replica.commits if entry.time_s > killed_s and entry.num_participants <= left
            ]
            firsts += after[:1]
        return firsts

    group.watch(lambda: len(resumed()) == left, PAUSE_TIMEOUT_S, "every survivor to commit a step")
    loss = Loss(count, min(resumed()) - killed_s, max(resumed()) - killed_s)
    for victim in victims:
        group.start(victim)
    return loss


def quantiles(values: list[float]) -> str:
    ordered = sorted(values)
    p95 = ordered[max(0, -(-95 * len(ordered) // 100) - 1)]
    return f"median {statistics.median(ordered):.2f} s, p95 {p95:.2f} s, worst {ordered[-1]:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--together", type=int, default=3, help="most replicas killed at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.05, help="a step's compute")
    parser.add_argument("--defaults", action="store_true", help="torchft's own time-outs")
    for name in ("heartbeat-timeout-s", "join-timeout-s", "timeout-s"):
        parser.add_argument(f"--{name}", type=float, default=None, help="instead of the tuned one")
    parser.add_argument("--out", type=Path, default=None, help="also write every pause as JSON")
    options = parser.parse_args()
    if importlib.util.find_spec("torchft") is None:
        sys.exit('torchft is not installed: pip install "torchft==0.2.*" (it is not a dependency of Morph)')
    importlib.import_module("torchft")  # once, for all that are forked from here
    asked = {name: getattr(options, name) for name in ("heartbeat_timeout_s", "join_timeout_s", "timeout_s")}
    given = {name: value for name, value in asked.items() if value is not None}
    setting = replace(Setting("defaults") if options.defaults else TUNED, **given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # its processes are ended first
    load, chooser = os.getloadavg()[0], random.Random(options.seed)
    losses: list[Loss] = []
    with tempfile.TemporaryDirectory(prefix="torchft-pause-") as directory:
        group = Group(setting, options.replicas, options.step_s, Path(directory))
        try:
            for _ in range(options.kills):
                settle(group, options.replicas, chooser.randint(*SETTLE_STEPS))
                threading.Event().wait(chooser.uniform(0.0, 2 * options.step_s))
                losses.append(lose(group, chooser, chooser.randint(1, options.together)))
        except (TimeoutError, RuntimeError) as error:
            print(f"ended after {len(losses)} kills: {error}", file=sys.stderr)
        finally:
            group.close()
    print(
        f"torchft, {options.replicas} replicas, {setting}, {len(losses)} kills; {os.cpu_count()} cores, load {load:.1f}"
    )
    if losses:
        print(f"  first survivor: {quantiles([loss.first_s for loss in losses])}")
        print(f"  every survivor: {quantiles([loss.all_s for loss in losses])}")
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(loss) for loss in losses], indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if len(losses) == options.kills else 1)


if __name__ == "__main__":
    main()

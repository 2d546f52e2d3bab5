"""One history per seed: its faults and VMs are drawn, and every invariant is checked while it is played."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from cluster_invariants import INVARIANTS
from simulated_cluster import BrokenHistoryError, Faults, SimulatedCluster
from simulated_job import MIXED, PLANS, SPEEDS, TYPES, UNEQUAL, make_config

from manager.controller.state.actions import ReasonCode
from manager.controller.state.config import ControllerConfig, Offer
from manager.controller.state.state import Phase
from morph.contract.evaluation import EvaluationSize
from morph.contract.messages import FailureCause
from morph.contract.plan import Plan
from morph.contract.rules import PreCopyRules

QUIET_AFTER_S = 16.0
FATAL_ACTIONS = (
    "start_worker",
    "send_reshape",
    "send_step",
    "send_commit",
    "send_ahead",
    "abort",
    "end_worker",
    "end_worker",
    "probe_worker",
    "request_nodes",
    "write_manifest",
)
LONGEST_S = 400.0
LONG_NOTICES = 12.0
AHEAD = (
    PreCopyRules(when="always", patience_s=6.0, bytes_per_s=20.0),
    PreCopyRules(when="always", patience_s=2.0, bytes_per_s=100.0),
    PreCopyRules(when="if_worth", min_saved_s=0.0, bytes_per_s=100.0),
)


def random_faults(seed: int) -> tuple[Faults, int, int]:
    """Draw the faults of one history, its number of VMs at the start, and the number of requested VMs (0: none)."""
    draw = random.Random(f"faults {seed}")

    def now_and_then(share: float, *values: float) -> float:
        return draw.choice(values) if draw.random() < share else 0.0

    def moments(share: float, most: int) -> tuple[float, ...]:
        count = draw.randint(1, most) if draw.random() < share else 0
        return tuple(draw.uniform(0.5, 14) for _ in range(count))

    long = LONG_NOTICES if seed % 5 == 3 else 1.0  # faults during which members continue to train
    faults = Faults(
        num_devices=(1, 1, 1, 2 + seed // 4 % 2)[seed % 4],
        death_per_order=draw.choice([0, 0.02, 0.06]),
        deaths_after_s=((draw.uniform(1, 12), draw.choice([1, 2, 3])),),
        joins_after_s=tuple(draw.uniform(1, 12) for _ in range(draw.randrange(4))),
        comeback=now_and_then(0.3, 0.5, 1.0),
        notices_after_s=tuple((time_s, draw.choice([None, long * draw.uniform(0, 4)])) for time_s in moments(0.5, 3)),
        notice_withdrawn=now_and_then(0.3, 0.5),
        silent_death=now_and_then(0.5, 0.3),
        late_loss=now_and_then(0.5, 0.3),
        doubled=now_and_then(0.5, 0.2),
        lost_message=now_and_then(0.3, 0.01),
        late_message=now_and_then(0.4, 0.05),
        broken_stream=now_and_then(0.4, 0.2, 0.6),
        overflow=now_and_then(0.3, 0.1),
        non_finite=now_and_then(0.3, 0.2),
        stuck=now_and_then(0.3, 0.01),
        spurious_abort=now_and_then(0.3, 0.02),
        write_failure=now_and_then(0.3, 0.1),
        slow=now_and_then(0.3, 0.5, 1.0),
        refused=now_and_then(0.7, 0.3, 0.8),
        unanswered=now_and_then(0.5, 0.2, 0.6),
        restarts_after_s=moments(0.3, 2),
        dies_before=draw.choice(FATAL_ACTIONS) if draw.random() < 0.25 else "",
        fresh_starts_after_s=moments(0.05, 1),
        clock_jumps=tuple((time_s, draw.uniform(-8, 8)) for time_s in moments(0.2, 2)),
        stop_after_s=draw.uniform(0, 12) if draw.random() < 0.25 else None,
        quiet_after_s=QUIET_AFTER_S,
    )
    num_nodes, target = draw.randrange(2, 8), draw.choice([0, 0, 4, 6])
    # without replacements otherwise
    causes: tuple[FailureCause, ...] = ("job", "device", "memory") if target else ("job",)
    faults = replace(faults, order_error=now_and_then(0.3, 0.02, 0.1), error_causes=causes)
    if draw.random() < 0.15:  # all VMs are lost and replaced; the newest loadable checkpoint is loaded
        gone_s = draw.uniform(8, 16)
        deaths = (*faults.deaths_after_s, (gone_s, 20))
        joins = (*faults.joins_after_s, *(gone_s + draw.uniform(0, 0.5) for _ in range(draw.randint(2, 5))))
        failure = draw.choice([0, 0.3, 0.9])
        faults = replace(faults, deaths_after_s=deaths, joins_after_s=joins, load_failure=failure, quiet_after_s=24.0)
    return faults, num_nodes, target


def play(seed: int, num_steps: int = 8, evaluation: EvaluationSize | None = None) -> SimulatedCluster:
    """Play one history to its end, and check every invariant after every event.

    ``evaluation``: the job's evaluation, where the run acts on it.

    Raises:
        BrokenHistoryError: An invariant does not hold, or the run does not end as it should; the error has the history.
    """
    faults, num_nodes, target = random_faults(seed)
    plans: dict[Any, Plan] = UNEQUAL if seed // 2 % 2 else PLANS
    config = make_config(plans=plans, num_steps=num_steps, target_nodes=target, section_compute_s=(1.0,) * 6)
    if seed % 6 == 5:  # GPUs of two types
        times_s = {name: (1.0 / SPEEDS[name],) * 6 for name in TYPES}
        offers = tuple(Offer(node_type=name, usd_per_h=SPEEDS[name] + 0.1) for name in TYPES)
        typed = {"plans": MIXED, "type_compute_s": times_s, "offers": offers}
        config = ControllerConfig.model_validate(dict(config) | typed)
        faults = replace(faults, node_types=TYPES)
    rules = config.policy.rules
    stutter = rules.stutter.model_copy(update={"windows": 1 + seed % 2})
    wait = rules.wait.model_copy(update={"morph_s": float(seed % 2)})  # with 0, steps are given up for newcomers
    rules = rules.model_copy(update={"ahead": AHEAD[seed % len(AHEAD)], "stutter": stutter, "wait": wait})
    most = (40, 40, 2, 1)[seed // 3 % 4]  # 40 is more than the faults of a history
    every = None if seed % 4 == 3 else config.policy.checkpoint_every_steps  # None: as often as costs least
    update = {"max_fruitless_generations": most, "rules": rules, "checkpoint_every_steps": every}
    policy = config.policy.model_copy(update=update)
    config = config.model_copy(update={"policy": policy})
    cluster = SimulatedCluster(seed, config, faults, observers=INVARIANTS)
    cluster.crew.evaluation = evaluation
    finish = cluster.run(num_nodes)
    allowed = {"finished"} if faults.stop_after_s is None else {"finished", "stopped"}
    cluster.check(finish.outcome in allowed, f"ended as {finish.outcome}: {finish.sentence}")
    cluster.check(cluster.now_s < LONGEST_S, f"took {cluster.now_s:.0f} s")
    return cluster


def play_all(seeds: Iterable[int]) -> int:
    return len([play(seed).seed for seed in seeds])


@dataclass
class Reached:
    """Counts over histories: phases, reasons, and the phases in which workers and managers were lost."""

    num_histories: int = 0
    phases: Counter[Phase] = field(default_factory=Counter)
    codes: Counter[ReasonCode] = field(default_factory=Counter)
    lost_in: Counter[Phase] = field(default_factory=Counter)
    resumed_in: Counter[Phase] = field(default_factory=Counter)

    def add(self, cluster: SimulatedCluster) -> None:
        self.num_histories += 1
        for entry in cluster.log:
            if isinstance(entry, tuple):
                _, before, event, decision = entry
                self.phases[decision.state.phase] += 1
                self.codes[decision.reason.code] += 1
                self.lost_in[before.phase] += event.kind == "worker_lost"
                self.resumed_in[before.phase] += event.kind == "manager_resumed"


def reached_by(seeds: Iterable[int]) -> Reached:
    reached = Reached()
    for seed in seeds:
        reached.add(play(seed))
    return reached


def main() -> int:
    seed = int(sys.argv[1])
    print(random_faults(seed))
    try:
        print(play(seed).told())
    except BrokenHistoryError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One mini-batch of one shape: how long, where the time goes, and what limits it (Varuna, section 4.4)."""

from __future__ import annotations

from collections.abc import Sequence

from morph.contract import ranges
from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from morph.contract.profile import Profile
from simulator.answer import Simulation, deal, describe
from simulator.conditions import NUM_DRAWS, AllReduceStart, Conditions, Slow, check_slow, slow_workers
from simulator.layout import lay_out
from simulator.micro_batch import knee_micro_batch_size, num_micro_batches
from simulator.outcome import Rehearsal
from simulator.placement import node_sizes
from simulator.setting import Setting
from simulator.windows import Trial


def simulate(
    profile: Profile,
    *,
    boundaries: Sequence[int] | None = None,
    num_stages: int | None = None,
    num_replicas: int = 1,
    micro_batch_size: int | None = None,
    schedule: Schedule = "varuna",
    window_slope: int | None = None,
    compute_slots: int | None = None,
    recompute: bool = True,
    num_gpus_per_node: int | Sequence[int] | None = None,
    share_links: bool = True,
    slow: Slow | None = None,
    all_reduce: AllReduceStart = "overlapped",
    jitter_seed: int | None = None,
    num_draws: int = NUM_DRAWS,
) -> Simulation:
    """Simulate one mini-batch of one shape.

    Args:
        profile: What calibration measured.
        boundaries: First section of each stage, beginning with 0; or give ``num_stages``.
        num_stages: P; the stages are then balanced exactly.
        num_replicas: D.
        micro_batch_size: m; None: fixed by the job, else the knee (see :mod:`simulator.micro_batch`).
        schedule: "varuna", "gpipe" or "1f1b".
        window_slope: In-flight window slope, of GPipe the number of rounds; None: the smallest windows that are within
            1 % of the fastest.
        compute_slots: Tasks that can run at once on all workers together, which share one machine; None: one
            device per worker.
        recompute: False: no stage runs the forward again; each keeps the activations in flight.
        num_gpus_per_node: GPUs of every node, or of each one; None: every worker has a node of its own.
        share_links: Messages that leave or enter one node at the same time share its bandwidth.
        slow: How much slower the tasks of a worker are, by (stage, replica), or by stage for all its replicas.
        all_reduce: "overlapped": a stage reduces after its own last backward, as the executor does; "late": after
            the last backward of all.
        jitter_seed: Draw task and message times from the profile's quantiles; None: medians.
        num_draws: How many mini-batches are drawn.

    Raises:
        PlanError: naming the argument, its value and what is allowed.
    """
    ranges.check_counts(window_slope=window_slope)
    m = knee_micro_batch_size(profile, micro_batch_size)
    total = num_micro_batches(profile, m)
    _check_shape(profile, boundaries, num_stages, num_replicas, total)
    depth = len(boundaries) if boundaries is not None else (num_stages or 1)
    conditions = Conditions(
        compute_slots=compute_slots,
        node_sizes=None if num_gpus_per_node is None else node_sizes(depth * num_replicas, num_gpus_per_node),
        share_links=share_links,
        slow=slow_workers(slow),
        all_reduce=all_reduce,
        jitter_seed=jitter_seed,
        num_draws=num_draws,
    )
    check_slow(conditions.slow, depth, num_replicas)
    rehearsal = Rehearsal(conditions)
    trial = Trial(
        Setting(profile, m, recompute, (schedule,), None),
        rehearsal,
        lay_out(profile.contention, depth, num_replicas, conditions),
        depth,
        deal(total, num_replicas),
        None if boundaries is None else tuple(boundaries),
        window_slope,
        moves=False,
    )
    return describe(trial.best(), rehearsal)


def _check_shape(
    profile: Profile, boundaries: Sequence[int] | None, num_stages: int | None, num_replicas: int, total: int
) -> None:
    sections = profile.num_sections
    if (boundaries is None) == (num_stages is None):
        raise PlanError("give either boundaries or num_stages", field="num_stages", value=num_stages)
    if num_stages is not None and num_stages not in ranges.Range(1, sections, whole=True):
        raise PlanError(
            "the model cannot be cut so",
            field="pipeline_depth",
            value=num_stages,
            allowed=f"1 to {sections} (its sections)",
        )
    if boundaries is not None:
        cuts = list(boundaries)
        whole = cuts[:1] == [0] and all(cut in ranges.COUNT for cut in cuts[1:])
        if not whole or cuts != sorted(set(cuts)) or cuts[-1] >= sections:
            allowed = f"first sections of the stages, growing, from 0 to at most {sections - 1}"
            raise PlanError("is not a cut", field="boundaries", value=cuts, allowed=allowed)
    if num_replicas not in ranges.Range(1, total, whole=True):
        raise PlanError(
            "replicas cannot share the micro-batches",
            field="num_replicas",
            value=num_replicas,
            allowed=f"1 to {total} (micro-batches in a mini-batch)",
        )

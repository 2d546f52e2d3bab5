"""The result of a rehearsal, and the simulator's expectation."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from manager.rehearsal.measurements import WARM_UP_STEPS
from manager.rehearsal.planning import Planned
from morph.contract.pool import Pool

LATE_SHARE_AT_MOST = 0.01


@dataclass(frozen=True)
class Rehearsed:
    """The result of rehearsing one plan. Times are as measured, stretched by ``planned.scales.time``.

    ``planned`` has this plan's simulation. ``mini_batches_s``: every counted step. ``commit_s``: the real manager's
    measured round trip; it replaces the profile's in ``expected_s``. ``parts_s``: seconds per worker and step by kind
    of work. ``late_s``: the median delay of a step by the busy host. ``busy_share``: that of this machine's cores
    during the counted steps; ``others_share``: that taken by work other than the rehearsal.
    """

    planned: Planned
    mini_batches_s: tuple[float, ...]
    commit_s: float
    parts_s: dict[str, float]
    late_s: float
    busy_share: float
    others_share: float

    @property
    def measured_s(self) -> float:
        """The median mini-batch time; with jitter the mean, as in the simulator's result."""
        average = statistics.median if self.planned.spec.jitter_seed is None else statistics.mean
        return average(self.mini_batches_s)

    @property
    def expected_s(self) -> float:
        """The simulated mini-batch time; with jitter the mean over the same draws that were run."""
        simulation = self.planned.simulation
        expected_s = simulation.expected.mini_batch_s
        if simulation.jitter is not None:
            expected_s = statistics.mean(simulation.jitter.draws_s[WARM_UP_STEPS:])
        return expected_s + self.commit_s - self.planned.profile.commit.median_s

    @property
    def host_too_busy(self) -> bool:
        """Whether this machine's cores were so busy that they limited the measured times."""
        return self.late_s > LATE_SHARE_AT_MOST * self.measured_s

    @property
    def error(self) -> float:
        """The simulator's error as a share of the measured time; above 0: it expects more."""
        return self.expected_s / self.measured_s - 1


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal with changes of VMs.

    ``plans``: one for each plan with a counted step, which is a step that followed another with the same workers.
    ``changes``: (version, shape, pool) of every generation of workers that trained. ``lost``: types of the lost
    workers, in order; "" if all are of one type. ``num_left``: events of the trace that the run's end left unplayed.
    """

    plans: tuple[Rehearsed, ...]
    changes: tuple[tuple[int, str, Pool], ...]
    lost: tuple[str, ...]
    num_left: int

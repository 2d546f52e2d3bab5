"""What came of a rehearsal, beside what the simulator expects."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from manager.rehearsal.measured import WARM_UP_STEPS
from manager.rehearsal.planning import Planned

BUSY_SHARE_AT_MOST = 0.85
OTHERS_SHARE_AT_MOST = 0.25


@dataclass(frozen=True)
class Rehearsed:
    """What came of it. Times are as they were measured, stretched by ``planned.scales.time``.

    Attributes:
        planned: What was run.
        mini_batches_s: Of every step that counts.
        commit_s: The real manager's round trip, as measured; it takes the place of the profile's in ``expected_s``.
        parts_s: Seconds per worker and step by kind of work.
        late_s: The most by which the host was late with a task.
        busy_share: Of this machine's cores, while the steps that count ran.
        others_share: Likewise, with work that is not the rehearsal's.
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
        """Median mini-batch time; with jitter the mean, as the simulator's answer is then."""
        average = statistics.median if self.planned.spec.jitter_seed is None else statistics.mean
        return average(self.mini_batches_s)

    @property
    def expected_s(self) -> float:
        """The simulated mini-batch time, under jitter the mean over the very draws that were run."""
        simulation = self.planned.simulation
        expected_s = simulation.expected.mini_batch_s
        if simulation.jitter is not None:
            expected_s = statistics.mean(simulation.jitter.draws_s[WARM_UP_STEPS:])
        return expected_s + self.commit_s - self.planned.profile.commit.median_s

    @property
    def host_too_busy(self) -> bool:
        """Whether this machine's cores had so little room that it is they who were measured."""
        return self.busy_share > BUSY_SHARE_AT_MOST or self.others_share > OTHERS_SHARE_AT_MOST

    @property
    def error(self) -> float:
        """By which share of the measured time the simulator is off; above 0: it expects more."""
        return self.expected_s / self.measured_s - 1

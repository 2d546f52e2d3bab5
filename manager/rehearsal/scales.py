"""By what a rehearsal is stretched and shrunk so that this machine can carry it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from manager.rehearsal.spec import RehearsalSpec
from morph.contract.plan import Plan

TASK_CPU_S = 0.003
"""CPU time of one task of the executor with its messages, beside many other processes.

Measured with 4 to 36 workers on two cores: 2.5 to 4.5 ms, most of it waiting for memory that other processes have
pushed out of the caches; 1 ms where nothing else runs.
"""

ADD_CPU_S = 0.00015
"""Of adding one section's gradient to its sum, likewise."""

BUSY_SHARE = 0.35
"""Of the cores, that the workers should keep busy at most: more, and they wait for each other."""

MESSAGE_BYTES_PER_S = 100e6
"""Of all messages together."""

STATE_BYTES = 128 * 1024
"""Parameters of the whole model: the same in every shape, so that final weights can be compared."""


@dataclass(frozen=True)
class Scales:
    """See ``RehearsalSpec``."""

    time: float
    message: float
    state: float


def choose_scales(spec: RehearsalSpec, plan: Plan, num_cores: int) -> Scales:
    """The scales that are given, and for the others those that suit the plan, whose times are the profile's."""
    tasks = sum(len(order) for count in plan.micro_batches_per_replica for order in plan.orders[count])
    mini_batch_s = max(plan.expected.mini_batch_s, 1e-6)
    busy_s = tasks * TASK_CPU_S + plan.num_micro_batches * spec.profile.num_sections * ADD_CPU_S
    needed = busy_s / (BUSY_SHARE * num_cores * mini_batch_s)
    time_scale = spec.time_scale if spec.time_scale is not None else max(1.0, _rounded_up(needed))
    m, sections = plan.micro_batch_size, spec.profile.sections
    per_batch = sum(sections[stage.end_section - 1].output_bytes_per_sample * m for stage in plan.stages[:-1])
    sent_bytes = 2 * per_batch * plan.num_micro_batches
    allowed_bytes = MESSAGE_BYTES_PER_S * mini_batch_s * time_scale
    message = spec.message_scale
    if message is None:
        message = 1.0 if sent_bytes <= allowed_bytes else allowed_bytes / sent_bytes
    state = spec.state_scale
    if state is None:
        state = min(1.0, STATE_BYTES / max(1, sum(section.parameter_bytes for section in sections)))
    return Scales(time_scale, message, state)


def _rounded_up(value: float) -> float:
    """To one leading digit and a half: 1, 1.5, 2, 2.5 .. 9.5, 10, 15, 20 .."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(value)) / 2
    return math.ceil(value / unit) * unit

"""How the controller handles waits, node requests, flapping machines and stragglers: part of a cluster policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from morph.contract import ranges
from morph.contract.base import Value
from morph.contract.waits import Backoff

FILE_FLOOR_S = 600.0
SLOWEST_BYTES_PER_S = 5e6
"""Bytes per second below which storage counts as hanging."""

Seconds = Annotated[float, ranges.POLICY_SECONDS.field]
Count = Annotated[int, ranges.COUNT.field]


class WaitRules(Value):
    """Rules for changes that wait for a node that is about to be ready. Times in seconds."""

    morph_s: Seconds = Field(default=1.0, description="cost of a planned change, until one was measured")
    setup_s: Seconds = Field(default=5.0, description="time from a VM's boot to a ready worker, until measured")
    join_patience_s: Seconds = Field(default=10.0, description="bound: a new worker waits for another during training")
    hold_patience_s: Seconds = Field(default=2.0, description="bound: training pauses for a node that is nearly ready")
    vms_patience_s: Seconds = Field(default=7 * 86400.0, description="bound: paused with too few VMs")


class FlapRules(Value):
    """How long a machine that came back must stay ready before it joins. Times in seconds.

    Its first return is free; the n-th within ``memory_s`` waits ``hold_s * 2 ** (n - 2)``, at most ``hold_max_s``.
    """

    hold_s: Seconds = Field(default=10.0, description="from the second return on, doubled with each further one")
    hold_max_s: Seconds = Field(default=600.0, description="longest wait")
    memory_s: Seconds = Field(default=1800.0, description="an older return is forgotten")


class RequestRules(Value):
    """Requests for VMs to a provider. Times in seconds."""

    backoff_s: Seconds = Field(default=10.0, description="first wait after a refusal; each further one doubles it")
    backoff_max_s: Seconds = Field(default=600.0, description="longest wait")
    answer_s: Seconds = Field(
        default=60.0, description="a request without an answer is sent again, under the same name, after this"
    )
    boot_s: Seconds = Field(default=900.0, description="a granted VM that does not appear is given up after this")
    max_absent: Count = Field(default=5, description="grants in a row without a VM, after which no VM is requested")
    notice_grace_s: Seconds = Field(default=60.0, description="a VM that outlives its notice by this is used again")

    @property
    def backoff(self) -> Backoff:
        """Pauses after refusals in a row."""
        return Backoff(self.backoff_s, self.backoff_max_s)


class SetupRules(Value):
    """Limits for workers that cannot be set up, after which the run ends. Times in seconds."""

    alike: Count = Field(default=2, description="failures in a row of the same kind while no shape trains")
    beside_training_s: Seconds = Field(
        default=1800.0, description="the same number of failures ends the run after this while a shape trains"
    )


class StutterRules(Value):
    """Rules by which a worker counts as slow (Varuna, section 4.6), or as healthy again. Times in seconds."""

    samples: Count = Field(default=8, description="micro-batches in one window")
    windows: Count = Field(default=3, description="windows in a row until a worker counts as slow or healthy")
    ratio: Annotated[float, Field(strict=True, gt=1, le=ranges.FACTOR.high)] = Field(
        default=1.15, description="slow: this many times the expected time"
    )
    deviations: Annotated[float, ranges.DEVIATIONS.field] = Field(
        default=4.0, description="slow: and this many deviations above the expected time"
    )
    probe_every_s: Seconds = Field(
        default=20.0, description="time to the next probe; doubled each time the worker is still slow"
    )
    probe_every_max_s: Seconds = Field(default=600.0, description="longest time between probes")
    probe_passes: Count = Field(default=2, description="good probes in a row until a worker is used again")
    max_probes: Count = Field(default=16, description="a worker that is still slow after this is ended")

    @property
    def well_ratio(self) -> float:
        """The factor below which a worker is healthy; between the two factors nothing changes."""
        return 1 + (self.ratio - 1) / 2


class PreCopyRules(Value):
    """Pre-copy: sending state before a planned change, while training continues. Times in seconds.

    ``if_worth``: pre-copy if it is expected to shorten the change by ``min_saved_s``, if the gradients of a step travel
    in less than a step, and if training in the old shape meanwhile costs less than this saves. ``always``: keep the
    stop short, whatever the wait costs.
    """

    when: Literal["never", "if_worth", "always"] = Field(
        default="if_worth", description="whether units are sent before a planned change, during training"
    )
    bytes_per_s: Annotated[float, ranges.BYTES_PER_S.field] = Field(
        default=2.5e8, description="speed of sending state to one worker, until it was measured"
    )
    min_saved_s: Annotated[float, ranges.PATIENCE_S.field] = Field(
        default=0.1, description="smaller savings are not worth a pre-copy"
    )
    patience_s: Seconds | None = Field(
        default=None,
        description="bound: state that has not arrived by then is sent in the change; absent: 60 s, or four times the "
        "expected time if that is more",
    )


class CheckpointRules(Value):
    """Rules for further checkpoints besides the policy's, and for those that are retained.

    Others are deleted once a newer one is safe; checkpoints that a user keeps are always retained.
    """

    insurance: bool | None = Field(
        default=None,
        description="save as often as costs least, given the time of saves and the losses of VMs, besides "
        "checkpoint_every_steps; absent: only if checkpoint_every_steps is absent",
    )
    keep_newest: Count = Field(default=2, description="number of the newest that are retained")
    keep_every_steps: Count | None = Field(
        default=None, description="retain the first of each span of this many steps; absent: none"
    )
    file_timeout_s: Seconds | None = Field(
        default=None,
        description="bound on writing or reading a file; absent: 600 s, or the time at 5 MB/s if that is more",
    )
    bytes_per_s: Annotated[float, ranges.BYTES_PER_S.field] | None = Field(
        default=None,
        description="most bytes per second that each worker writes, which leaves the network to gradients; absent: any",
    )

    def file_limit_s(self, num_bytes: int) -> float:
        """Return the bound on writing or reading a file of this size (seconds)."""
        if self.file_timeout_s is not None:
            return self.file_timeout_s
        return max(FILE_FLOOR_S, num_bytes / SLOWEST_BYTES_PER_S)


class LossRules(Value):
    """Rules for a step whose loss or gradients are not finite, or whose loss rises sharply."""

    when_bad: Literal["stop", "skip", "go_back"] = Field(
        default="stop",
        description="stop: the version before it is saved, and the run ends; skip: the weights stay as they are; "
        "go_back: they go back to those of the last version that back_steps divides. Training continues with the "
        "samples of the step after it",
    )
    deviations: Annotated[float, ranges.DEVIATIONS.field] | None = Field(
        default=None,
        description="a loss that is this many deviations (each at least 0.1 % of the mean) above the mean of earlier "
        "losses is also bad; absent: only losses that are not finite",
    )
    window: Annotated[int, Field(ge=2, le=100_000)] = Field(
        default=100, description="steps in this mean; the first losses, as many, are not compared with it"
    )
    back_steps: Count = Field(
        default=100, description="with go_back: steps between checkpoints to go back to; one of them is retained"
    )
    most: Count = Field(
        default=10,
        description="bad steps allowed between two versions that back_steps divides; a further one ends the run",
    )


class Rules(Value):
    """All rules."""

    checkpoints: CheckpointRules = CheckpointRules()
    ahead: PreCopyRules = PreCopyRules()
    wait: WaitRules = WaitRules()
    flaps: FlapRules = FlapRules()
    requests: RequestRules = RequestRules()
    setups: SetupRules = SetupRules()
    stutter: StutterRules = StutterRules()
    losses: LossRules = LossRules()

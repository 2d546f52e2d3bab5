"""How the controller handles waits, node requests, flapping machines and stragglers: part of a cluster policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from morph.contract import ranges
from morph.contract.base import Value
from morph.contract.waits import Backoff

FILE_FLOOR_S = 600.0
SLOWEST_BYTES_PER_S = 5e6
"""Storage that is slower counts as storage that hangs."""

Seconds = Annotated[float, ranges.POLICY_SECONDS.field]
Count = Annotated[int, ranges.COUNT.field]


class WaitRules(Value):
    """When a change waits for a node that is about to be ready. Times in seconds."""

    morph_s: Seconds = Field(default=1.0, description="what a planned change costs, until one was measured")
    setup_s: Seconds = Field(default=5.0, description="from a VM that is up to a ready worker, until measured")
    join_patience_s: Seconds = Field(default=10.0, description="bound: a newcomer waits for another while training")
    hold_patience_s: Seconds = Field(default=2.0, description="bound: training stands for a node about to be ready")
    vms_patience_s: Seconds = Field(default=7 * 86400.0, description="bound: paused with too few VMs")


class FlapRules(Value):
    """How long a machine that came back must stay ready before it is taken in. Times in seconds.

    Its first return is free; the n-th within ``memory_s`` waits ``hold_s * 2 ** (n - 2)``, at most ``hold_max_s``.
    """

    hold_s: Seconds = Field(default=10.0, description="from the second return on, doubled with each further one")
    hold_max_s: Seconds = Field(default=600.0, description="and never longer than this")
    memory_s: Seconds = Field(default=1800.0, description="an older return is forgotten")


class RequestRules(Value):
    """Asking a provider for VMs. Times in seconds."""

    backoff_s: Seconds = Field(default=10.0, description="first wait after a refusal, doubled with each further one")
    backoff_max_s: Seconds = Field(default=600.0, description="and never longer than this")
    answer_s: Seconds = Field(default=60.0, description="a request without an answer is sent again under its name")
    boot_s: Seconds = Field(default=900.0, description="a VM that was granted and does not appear is given up")
    max_absent: Count = Field(default=5, description="grants in a row of which no VM appears: then none is requested")
    notice_grace_s: Seconds = Field(default=60.0, description="a VM that outlives its notice by this is taken back")

    @property
    def backoff(self) -> Backoff:
        """Pauses after refusals in a row."""
        return Backoff(self.backoff_s, self.backoff_max_s)


class SetupRules(Value):
    """When workers that cannot be set up end the run. Times in seconds."""

    alike: Count = Field(default=2, description="workers in a row that fail in the same way, while no shape trains")
    beside_training_s: Seconds = Field(
        default=1800.0, description="as many that fail so, while a shape trains without them, end it after this"
    )


class StutterRules(Value):
    """Which worker counts as slow (Varuna, section 4.6), and when it counts as well again. Times in seconds."""

    samples: Count = Field(default=8, description="micro-batches that make one window")
    windows: Count = Field(default=3, description="windows in a row until a worker is slow, or well")
    ratio: Annotated[float, Field(strict=True, gt=1, le=ranges.FACTOR.high)] = Field(
        default=1.15, description="slow: this many times what is expected"
    )
    deviations: Annotated[float, ranges.DEVIATIONS.field] = Field(
        default=4.0, description="and this many deviations above it"
    )
    probe_every_s: Seconds = Field(default=20.0, description="doubled with each probe that finds it slow still")
    probe_every_max_s: Seconds = Field(default=600.0, description="and never more rarely than this")
    probe_passes: Count = Field(default=2, description="good probes in a row until a worker is taken back")
    max_probes: Count = Field(default=16, description="a worker that is not well by then is ended")

    @property
    def well_ratio(self) -> float:
        """Below this a worker is well; between the two nothing changes."""
        return 1 + (self.ratio - 1) / 2


class PreCopyRules(Value):
    """Pre-copy: sending state before a planned change, while training continues. Times in seconds.

    ``if_worth``: where it is expected to shorten the change by ``min_saved_s``, the gradients of a step travel in less
    than a step, and training in the old shape meanwhile costs less than it saves. ``always``: the stop is to be short
    whatever the wait for it costs.
    """

    when: Literal["never", "if_worth", "always"] = Field(
        default="if_worth", description="whether units travel before a planned change, while training goes on"
    )
    bytes_per_s: Annotated[float, ranges.BYTES_PER_S.field] = Field(
        default=2.5e8, description="of state to one worker, until it was measured"
    )
    min_saved_s: Annotated[float, ranges.PATIENCE_S.field] = Field(default=0.1, description="less is not worth it")
    patience_s: Seconds | None = Field(
        default=None,
        description="bound: what has not arrived by then is sent in the change; absent: 60 s, or four times what it is "
        "expected to take if that is more",
    )


class CheckpointRules(Value):
    """When checkpoints are written beside the policy's, and which stay.

    Others go once a newer one is safe; those that a user keeps stay in any case.
    """

    insurance: bool | None = Field(
        default=None,
        description="as often as costs least, by what saves take and how often VMs are lost, beside what "
        "checkpoint_every_steps asks for; absent: only where that is absent",
    )
    keep_newest: Count = Field(default=2, description="so many of the newest stay")
    keep_every_steps: Count | None = Field(
        default=None, description="of each span of so many steps the first stays for good; absent: of none"
    )
    file_timeout_s: Seconds | None = Field(
        default=None,
        description="a file that takes longer to be written or read is given up; absent: after 600 s, or what it takes "
        "at 5 MB/s if that is more",
    )
    bytes_per_s: Annotated[float, ranges.BYTES_PER_S.field] | None = Field(
        default=None,
        description="that each worker writes at most, which leaves the network to gradients; absent: any",
    )

    def file_limit_s(self, num_bytes: int) -> float:
        """Return within what a file of this size is written or read (seconds)."""
        if self.file_timeout_s is not None:
            return self.file_timeout_s
        return max(FILE_FLOOR_S, num_bytes / SLOWEST_BYTES_PER_S)


class LossRules(Value):
    """What is done with a step whose loss, or one of whose gradients, is not finite, or whose loss leaps up."""

    when_bad: Literal["stop", "skip", "go_back"] = Field(
        default="stop",
        description="stop: the version before it is saved, and the run ends; skip: the weights stay as they are; "
        "go_back: they go back to those of the last version that back_steps divides. Then training continues with the "
        "samples of the step after it",
    )
    deviations: Annotated[float, ranges.DEVIATIONS.field] | None = Field(
        default=None,
        description="a loss that is so many deviations (0.1 % of the mean at least) above the mean of those before is "
        "bad too; absent: only what is not finite",
    )
    window: Annotated[int, Field(ge=2, le=100_000)] = Field(
        default=100, description="steps that this mean reaches back, and before which no loss is held against it"
    )
    back_steps: Count = Field(
        default=100, description="with go_back: a checkpoint so often, one of which stays, to go back to"
    )
    most: Count = Field(
        default=10, description="bad steps between two versions that back_steps divides: a further one ends the run"
    )


class Rules(Value):
    """All of them."""

    checkpoints: CheckpointRules = CheckpointRules()
    ahead: PreCopyRules = PreCopyRules()
    wait: WaitRules = WaitRules()
    flaps: FlapRules = FlapRules()
    requests: RequestRules = RequestRules()
    setups: SetupRules = SetupRules()
    stutter: StutterRules = StutterRules()
    losses: LossRules = LossRules()

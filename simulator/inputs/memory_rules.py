"""What a run holds besides what a step needs."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.inputs.conditions import RedundantName


@dataclass(frozen=True)
class MemoryRules:
    """What a run holds besides what a step needs.

    Attributes:
        keeps_sums: A worker's own sums are kept when a step is given up.
        copies_sums: Copies of others' sums are kept for them.
        follows: With one replica each stage's state is kept in step by another worker too.
        changes: The shape changes while the run goes on.
        saves: Checkpoints are copied to host memory and kept there.
        mailboxes: Stages send through slots of their device's memory, which a worker keeps for as long as it lives.
        redundant_computation: For the next stage, as in the request.
    """

    keeps_sums: bool = True
    copies_sums: bool = True
    follows: bool = False
    changes: bool = True
    saves: bool = True
    mailboxes: bool = False
    redundant_computation: RedundantName = "off"

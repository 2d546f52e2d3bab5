"""A VM with several devices takes all of its workers along: their losses become one event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from manager.controller.events import WorkerLost
from manager.engine.inbox import Stamped
from morph.contract.vm_names import beside

GATHER_S = 0.25
"""Processes of one VM that are killed together end this far apart, or less: the kernel first frees their memory."""


def with_its_vm(
    lost: WorkerLost,
    known: Iterable[str],
    take: Callable[[float], Stamped | None],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[WorkerLost, list[Stamped]]:
    """Gather the losses of the workers beside a lost one, so that no shape is formed with one that is about to go.

    Blocks until all of them are lost, for ``GATHER_S`` at most; at once where there are none.

    Args:
        lost: The first loss.
        known: Workers that the controller knows.
        take: Takes what came next, waiting for so many seconds; None: nothing came.
        clock: Seconds, never going back.

    Returns:
        The loss of all that were gathered, and what else came meanwhile.
    """
    missing = dict.fromkeys(beside(lost.worker, known))
    gathered, others = list(lost.beside), list[Stamped]()
    until_s = clock() + GATHER_S
    while missing and (left_s := until_s - clock()) > 0 and (stamped := take(left_s)) is not None:
        item = stamped.item
        if isinstance(item, WorkerLost) and item.worker in missing:
            gathered.append(item.worker)
            del missing[item.worker]
        else:
            others.append(stamped)
    return lost.model_copy(update={"beside": tuple(gathered)}), others

"""Cases of the grid of kills (which worker dies when), and the runs that play them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tests.grids import cells

MOST_CASES = 12
"""The most cases of one run, which the first failure ends."""
LAST = -1

DEPTHS = (4, 3, 6, 5)
REPLICAS = (1, 2)
VICTIMS = ("middle", "last", "first", "two adjacent", "two apart", "two of a stage")
NOTICED = (False, True)
FILLING = ("send_ahead", "receive_ahead")
"""Phases while a worker without a replica sends its state to a follower: some steps at the beginning of a run."""
CHANGING = ("reshape", "transfer")
"""Phases while the shape changes because another VM is about to be taken."""
MOMENTS = (
    ("forward", 2),
    ("backward", 1),
    ("backward", LAST),
    ("before_commit", 0),
    ("share_gradients", 0),
    ("reduce", 0),
    ("after_commit", 0),
    ("checkpoint", 0),
    ("send_ahead", 0),
    ("share_sums", 0),
    ("receive_ahead", 0),
    ("applied", 0),
    ("transfer", 0),
    ("reshape", 0),
)


@dataclass(frozen=True)
class Case:
    """Which worker dies when: at ``phase``, for the ``nth`` time in a step, as in ``Fault``."""

    depth: int
    replicas: int
    moment: tuple[str, int]
    victims: str
    noticed: bool

    @property
    def is_reached(self) -> bool:
        """Whether these workers reach this phase, and at least one worker survives.

        With replicas, followers get no state of these stages; while the shape changes, one more worker leaves.
        """
        if self.moment[0] in CHANGING and len(self.stages()) + 1 == self.depth * self.replicas:
            return False
        if self.replicas == 1:
            return self.victims != "two of a stage"
        return self.moment[0] not in (*FILLING, "share_gradients")

    def stages(self) -> tuple[tuple[int, int], ...]:
        last = self.depth - 1
        return {
            "first": ((0, 0),),
            "last": ((last, 0),),
            "middle": ((1, 0),),
            "two adjacent": ((1, 0), (2, 0)),
            "two apart": ((0, 0), (2, 0)),
            "two of a stage": ((1, 0), (1, 1)),
        }[self.victims]

    def __str__(self) -> str:
        return f"{self.victims} at {self.moment[0]} {self.moment[1]}{', noticed' if self.noticed else ''}"


ALWAYS = (
    Case(4, 1, ("backward", LAST), "middle", noticed=True),  # its follower only has to prepare the step
)
"""Cases of former defects, which are tested whatever the grid is."""


def runs() -> list[list[Case]]:
    grid = dict.fromkeys([*itertools.starmap(Case, cells(DEPTHS, REPLICAS, MOMENTS, VICTIMS, NOTICED)), *ALWAYS])
    cases = [case for case in grid if case.is_reached]
    found = []
    for shape in dict.fromkeys((case.depth, case.replicas) for case in cases):
        of_shape = [case for case in cases if (case.depth, case.replicas) == shape]
        begin = [[case] for case in of_shape if case.moment[0] in FILLING] or [[]]
        others = [case for case in of_shape if case.moment[0] not in FILLING]
        begin[0] += others[:MOST_CASES]
        found += begin
        found += [others[index : index + MOST_CASES] for index in range(MOST_CASES, len(others), MOST_CASES)]
    return found

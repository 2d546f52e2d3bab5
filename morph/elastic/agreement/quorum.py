"""Who may go on without the others: dynamic voting.

Source: Lotem, Keidar, Dolev, Dynamic Voting for Consistent Primary Components, PODC 1997. An accepted ring of which it
is not known whether all accepted it may have been formed by somebody, so it votes too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from morph.elastic.agreement.words import Report, Ring


def is_majority(left: Collection[int], of: Collection[int]) -> bool:
    """Whether more than half is left, or exactly half with the lowest member."""
    num_left = sum(member in left for member in of)
    return 2 * num_left > len(of) or (2 * num_left == len(of) and min(of) in left)


def voters(reports: Iterable[Report]) -> list[Ring]:
    """Return the newest ring that was formed, and all that may have been formed after it."""
    told = list(reports)
    formed = [report.ring for report in told if report.ring is not None]
    newest = formed[0]
    for ring in formed:
        newest = ring if ring.ballot.beats(newest.ballot) else newest
    open_ones = {ring for report in told for ring in report.accepted if ring.ballot.beats(newest.ballot)}
    return [newest, *sorted(open_ones)]


def outvoting(left: Collection[int], reports: Iterable[Report]) -> Ring | None:
    """Return a ring of which too few are left; None: those who are left may go on."""
    return next((ring for ring in voters(reports) if not is_majority(left, ring.members)), None)

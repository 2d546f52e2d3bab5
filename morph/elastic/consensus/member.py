"""Lets the members of a ring agree on the next ring, after losses or when a worker joins (Spotnik 3.2). Pure.

An attempt is a token that goes round three times, from each remaining member to the next:

1. *reconcile* collects the lost members and the knowledge of each remaining one. A member that receives the token
  leaves the ring, reports how many steps its state has, and applies no more steps. It also adds the losses that it
  found itself.
2. *accept* names the next ring, which has every member that the first round reached, and the newest state, from which
  the ring continues. A member that passes the token on is ready to be in that ring.
3. *restart* says that all members are ready and train again.

A member that finds a loss unknown to the attempt that it follows begins another attempt with a higher epoch. Of two
attempts in one epoch, the one with the lower initiator wins; a beaten token ends at the first member that follows a
better token. A member watches only the next member, to which it sends, so a token is lost only with its receiver. So K
losses need few more than K attempts. Each attempt costs a member at most three messages, and one more for each member
that is left out.

A member that is wrongly suspected is left out like a lost one, and receives ``Excluded``. The paper repeats rounds
until a list comes back unchanged; here the second round names the ring, so a loss found late needs no further round.

============  ==================================================================================================
phase         invariant
============  ==================================================================================================
``joining``   has no state; is in no ring
``running``   is in ``ring``, promised nothing better than its ballot, applies steps once its state is the ring's
``agreeing``  follows the attempt ``promised``; applies nothing
``halted``    has stopped for good
============  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from morph.elastic.consensus.messages import (
    Accept,
    Admit,
    Apply,
    Ballot,
    Copied,
    Enter,
    Excluded,
    Halt,
    Input,
    Leave,
    Lost,
    Message,
    Output,
    Received,
    Reconcile,
    Reduced,
    Report,
    Restart,
    Ring,
    Send,
    Stop,
)

NONE_YET = Ballot(-1, 0)
Outputs = tuple[Output, ...]


def is_majority(left: Collection[int], of: Collection[int]) -> bool:
    """Whether more than half of the members are left, or exactly half including the lowest member."""
    num_left = sum(member in left for member in of)
    return 2 * num_left > len(of) or (2 * num_left == len(of) and min(of) in left)


def voters(reports: Iterable[Report]) -> list[Ring]:
    """Return the newest ring that was formed, and all rings that may have been formed after it."""
    answers = list(reports)
    formed = [report.ring for report in answers if report.ring is not None]
    newest = formed[0]
    for ring in formed:
        newest = ring if ring.ballot.beats(newest.ballot) else newest
    open_ones = {ring for report in answers for ring in report.accepted if ring.ballot.beats(newest.ballot)}
    return [newest, *sorted(open_ones)]


def outvoting(left: Collection[int], reports: Iterable[Report]) -> Ring | None:
    """Return a ring of which too few members are left; None if the remaining members may continue."""
    return next((ring for ring in voters(reports) if not is_majority(left, ring.members)), None)


@dataclass(frozen=True)
class MemberState:
    """One member. ``around``: the members on which the current attempt still counts, or else the ring.

    ``joiners``: the members that attempts since the ring would have let in. ``met``: the members of such attempts, and
    those that sent a beaten token; those that are left out receive ``Excluded``. ``goal``: the number of steps from
    which the ring continued; ``num_steps`` is lower until that state has arrived.
    """

    me: int
    phase: Literal["joining", "running", "agreeing", "halted"]
    num_steps: int
    promised: Ballot
    around: tuple[int, ...]
    ring: Ring | None = None
    accepted: tuple[Ring, ...] = ()
    suspects: frozenset[int] = frozenset()
    joiners: frozenset[int] = frozenset()
    met: frozenset[int] = frozenset()
    goal: int = 0
    source: int = 0
    behind: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()

    def report(self) -> Report:
        """Return this member's report in the first round."""
        return Report(self.me, self.num_steps, self.ring, self.accepted)

    def known(self) -> set[int]:
        """Return the members of its ring, and of the rings that it has accepted since."""
        return set(() if self.ring is None else self.ring.members).union(*(ring.members for ring in self.accepted))


def founder(me: int, members: tuple[int, ...]) -> MemberState:
    """Return a member of the first ring, whose epoch is 0."""
    ring = Ring(Ballot(0, members[0]), members)
    return MemberState(me, "running", 0, ring.ballot, members, ring, source=members[0])


def joiner(me: int) -> MemberState:
    """Return a member that waits to be let in."""
    return MemberState(me, "joining", -1, NONE_YET, (me,))


def watched(state: MemberState) -> int | None:
    """Return the member whose loss this member must notice: the one to which it sends. None if there is none."""
    is_one_of_several = state.phase in ("running", "agreeing") and len(state.around) > 1
    return _next(state) if is_one_of_several else None


def step(state: MemberState, happened: Input) -> tuple[MemberState, Outputs]:
    """Return the next state, and the actions to take, in this order."""
    if state.phase == "halted":
        return state, ()
    match happened:
        case Received(sender, message):
            return _on_message(state, sender, message)
        case Lost(member):
            return _on_lost(state, member)
        case Reduced(ballot):
            return _on_reduced(state, ballot)
        case Copied(ballot):
            return _on_copied(state, ballot)
        case Admit(joiners) if state.phase != "running":
            return state, ()
        case Admit(joiners):
            return initiate(state, joiners) if may_admit(state) or not joiners else (state, ())


def _on_message(state: MemberState, sender: int, message: Message) -> tuple[MemberState, Outputs]:
    if isinstance(message, Excluded):
        return _on_excluded(state, message.ballot)
    if state.ring is not None and _is_from_outside(state, sender, message):
        return state, (Send(sender, Excluded(state.ring.ballot)),)
    if isinstance(message, Reconcile):
        return _on_reconcile(state, sender, message)
    return _on_later_round(state, sender, message)


def _is_from_outside(state: MemberState, sender: int, message: Message) -> bool:
    """Whether a member of a ring hears from a member that is neither in the ring nor joining it."""
    if state.phase != "running" or sender in state.known():
        return False
    if not isinstance(message, Reconcile):
        return True
    return sender not in message.joiners or not message.ballot.beats(state.promised)


def may_admit(state: MemberState) -> bool:
    """Whether this member is the one that lets joiners in: the lowest of the ring."""
    return state.phase == "running" and state.ring is not None and state.me == state.ring.members[0]


def _on_lost(state: MemberState, member: int) -> tuple[MemberState, Outputs]:
    if member == state.me or member in state.suspects:
        return state, ()
    state = replace(state, suspects=state.suspects | {member})
    if member not in state.around:
        return state, ()
    return initiate(state)


def initiate(state: MemberState, joiners: tuple[int, ...] = (), above: int = 0) -> tuple[MemberState, Outputs]:
    """Begin an attempt with a higher epoch than any that this member knows, and than ``above``."""
    if state.ring is None:
        return _halted(state, "the worker that let this one in is gone")
    members = state.known() | state.joiners | set(joiners)
    token = Reconcile(
        ballot=Ballot(max(state.promised.epoch, above) + 1, state.me),
        members=tuple(sorted(members)),
        lost=(),
        joiners=tuple(sorted(members.difference(state.ring.members))),
        reports=(),
    )
    state, outputs, token = _joined_attempt(state, token)
    if state.around == (state.me,):
        concluded, more = _conclude(state, token)
        return concluded, outputs + more
    return state, (*outputs, Send(_next(state), token))


def _joined_attempt(state: MemberState, token: Reconcile) -> tuple[MemberState, Outputs, Reconcile]:
    """Join an attempt: leave the ring, and add this member's knowledge to the token."""
    lost = set(token.lost) | (state.suspects & set(token.members))
    if state.ring is not None:
        lost |= (
            set(token.members) - state.known() - set(token.joiners)
        )  # these were left out of a ring that the initiator does not know
    left = tuple(member for member in token.members if member not in lost)
    token = token._replace(lost=tuple(sorted(lost)), reports=(*token.reports, state.report()))
    leaves: Outputs = (Leave(),) if state.phase == "running" else ()
    joiners, met = state.joiners.union(token.joiners), state.met.union(token.members)
    state = replace(state, phase="agreeing", promised=token.ballot, around=left, joiners=joiners, met=met)
    return state, leaves, token


def _next(state: MemberState) -> int:
    """Return the next member round the ring."""
    return state.around[(state.around.index(state.me) + 1) % len(state.around)]


def _on_reconcile(state: MemberState, sender: int, token: Reconcile) -> tuple[MemberState, Outputs]:
    initiator = token.ballot.initiator
    if initiator == state.me:
        return _conclude(state, token) if token.ballot == state.promised else (state, ())
    if not token.ballot.beats(state.promised):
        return _not_heard(state, sender)
    is_out = state.ring is not None and initiator not in state.known()
    if is_out or (initiator in state.suspects and initiator > state.me):
        return initiate(state, above=token.ballot.epoch)
    state = replace(state, suspects=state.suspects - {initiator})  # the initiator is alive, and the lower one wins
    state, outputs, token = _joined_attempt(state, token)
    return state, (*outputs, Send(_next(state), token))


def _not_heard(state: MemberState, sender: int) -> tuple[MemberState, Outputs]:
    is_left_out = state.phase == "agreeing" and sender not in state.around
    return replace(state, met=state.met | {sender}) if is_left_out else state, ()


def _conclude(state: MemberState, token: Reconcile) -> tuple[MemberState, Outputs]:
    """End the first round: propose the next ring, or stop if too few members are left."""
    left = tuple(member for member in token.members if member not in token.lost)
    reports = [report for report in token.reports if report.member in left]
    state = replace(state, around=left)
    too_few = outvoting(left, reports)
    if too_few is not None:
        return _on_stop(state, Stop(token.ballot, len(left), len(too_few.members)))
    num_steps = max(report.num_steps for report in reports)
    if num_steps < 0:
        return _on_stop(state, Stop(token.ballot, len(left), 0))
    source = min(report.member for report in reports if report.num_steps == num_steps)
    behind = tuple(sorted(report.member for report in reports if 0 <= report.num_steps < num_steps))
    fresh = tuple(sorted(report.member for report in reports if report.num_steps < 0))
    accept = Accept(Ring(token.ballot, left), num_steps, source, behind, fresh)
    state = _accepted(state, accept)
    if left == (state.me,):
        return _entered(state)
    return state, (Send(_next(state), accept),)


def _accepted(state: MemberState, token: Accept) -> MemberState:
    return replace(
        state,
        accepted=(*state.accepted, token.ring),
        around=token.ring.members,
        goal=token.num_steps,
        source=token.source,
        behind=token.behind,
        fresh=token.fresh,
    )


def _on_later_round(state: MemberState, sender: int, token: Accept | Restart | Stop) -> tuple[MemberState, Outputs]:
    ballot = token.ring.ballot if isinstance(token, Accept) else token.ballot
    if ballot != state.promised or state.phase != "agreeing":
        return _not_heard(state, sender)
    match token:
        case Accept():
            return _on_accept(state, token)
        case Restart():
            state, outputs = _entered(state)
            return state, (Send(_next(state), token), *outputs)
        case Stop():
            return _on_stop(state, token)


def _on_accept(state: MemberState, token: Accept) -> tuple[MemberState, Outputs]:
    ballot = token.ring.ballot
    if ballot.initiator == state.me:
        state, outputs = _entered(state)
        return state, (Send(_next(state), Restart(ballot)), *outputs)
    if state.suspects & set(token.ring.members):
        return initiate(state)
    state = _accepted(state, token)
    return state, (Send(_next(state), token),)


def _entered(state: MemberState) -> tuple[MemberState, Outputs]:
    """End the third round: train in the ring accepted last, and tell the members that are not in it."""
    ring = state.accepted[-1]
    left_out = (state.known() | state.met).difference(ring.members)
    excluded = tuple(Send(other, Excluded(ring.ballot)) for other in sorted(left_out))
    nobody: frozenset[int] = frozenset()
    state = replace(state, phase="running", ring=ring, accepted=(), suspects=nobody, joiners=nobody, met=nobody)
    return state, (*excluded, Enter(ring, state.goal, state.source, state.behind, state.fresh))


def _on_stop(state: MemberState, token: Stop) -> tuple[MemberState, Outputs]:
    reason = f"{token.num_left} of {token.num_before} workers are left, too few to continue without the others"
    if token.num_before == 0:
        reason = "all workers that had the model are gone"
    following = _next(state)
    state, outputs = _halted(state, reason)
    return state, (Send(following, token), *outputs) if following != token.ballot.initiator else outputs


def _on_excluded(state: MemberState, ballot: Ballot) -> tuple[MemberState, Outputs]:
    if state.ring is not None and not ballot.beats(state.ring.ballot):
        return state, ()
    return _halted(state, "the other workers assumed that this one was lost, and continue without it")


def _halted(state: MemberState, reason: str) -> tuple[MemberState, Outputs]:
    leaves: Outputs = (Leave(),) if state.phase == "running" else ()
    return replace(state, phase="halted"), (*leaves, Halt(reason))


def _on_reduced(state: MemberState, ballot: Ballot) -> tuple[MemberState, Outputs]:
    if not may_apply(state, ballot):
        return state, ()
    return replace(state, num_steps=state.num_steps + 1, goal=state.num_steps + 1), (Apply(),)


def may_apply(state: MemberState, ballot: Ballot) -> bool:
    """Whether sums reduced in this ballot's ring may still be applied: the member is in that ring and has its state."""
    is_there = state.phase == "running" and state.ring is not None and state.ring.ballot == ballot
    return is_there and state.num_steps == state.goal


def _on_copied(state: MemberState, ballot: Ballot) -> tuple[MemberState, Outputs]:
    if state.phase != "running" or state.ring is None or state.ring.ballot != ballot:
        return state, ()
    return replace(state, num_steps=state.goal), ()

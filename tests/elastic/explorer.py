"""Explores every history of a few members, some of which are lost: all orders of messages, losses and suspicions.

A scenario names the members that may be killed, and the pairs of which one may wrongly take the other for lost; each of
these happens at any moment, or never. What a member does alone (completing a reduction, receiving a state) is decided
as late as it can matter: right before the next event at this member. A member dies when its loss is found, because it
may have done nothing for any time before.

Partial-order reduction: if everything that can still happen to a member comes, in order, from one sender that stays,
the next event at this member is tried alone, because events elsewhere cannot change it (a persistent set). Histories
that reach a known state are not continued; the graph has no cycles, so that the most messages of a member are found
with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from morph.elastic.consensus import member
from morph.elastic.consensus.member import MemberState, is_majority
from morph.elastic.consensus.messages import (
    Admit,
    Apply,
    Ballot,
    Copied,
    Enter,
    Input,
    Lost,
    Received,
    Reduced,
    Ring,
    Send,
)


class BrokenError(AssertionError):
    """A broken invariant, and the history that led to it."""


class Scenario(NamedTuple):
    """Founders, and joiners that the first founder lets in at the beginning.

    ``num_members``: the founders. ``killed`` may die. ``doubts``: pairs of a member and a living one that it may take
    for lost.
    """

    num_members: int
    killed: tuple[int, ...] = ()
    doubts: tuple[tuple[int, int], ...] = ()
    num_joiners: int = 0


class World(NamedTuple):
    """States by member, -1 for a dead one; messages under way by (sender, receiver); and what other members depend on.

    ``facts``: (ballot, member) for each member that gives its sums to a ring, and (ballot, "state", steps) for each
    state sent in one. ``applied``: by member, the rings in which its steps were reduced.
    """

    states: tuple[int, ...]
    channels: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
    facts: frozenset[tuple[Any, ...]]
    applied: tuple[tuple[Ballot, ...], ...]
    doubted: frozenset[tuple[int, int]]


Label = tuple[object, ...]
DEAD = -1
NUM_STEPS = 1


@dataclass
class Explorer:
    """Walks the histories of one scenario."""

    scenario: Scenario
    most_worlds: int = 5_000_000
    _states: list[MemberState] = field(default_factory=list)
    _state_ids: dict[MemberState, int] = field(default_factory=dict)
    _inputs: list[Any] = field(default_factory=list)
    _input_ids: dict[Any, int] = field(default_factory=dict)
    _moves: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    _seen: dict[World, tuple[int, ...]] = field(default_factory=dict)
    ends: set[tuple[tuple[Ring | None, int, str], ...]] = field(default_factory=set)
    """The end of a history: ring, steps and phase of each living member."""
    _path: list[tuple[int, Label]] = field(default_factory=list)

    def run(self) -> tuple[int, int]:
        """Return the number of worlds, and a member's most messages; BrokenError: an invariant is broken."""
        scenario = self.scenario
        founders = tuple(range(scenario.num_members))
        everyone = tuple(range(scenario.num_members + scenario.num_joiners))
        self._may_leave = {*scenario.killed, *(other for _, other in scenario.doubts), *everyone[len(founders) :]}
        stays = set(founders) - self._may_leave
        self._goes_on = is_majority(stays, founders) and is_majority(stays, everyone)
        self._num = len(everyone)
        states = [member.founder(me, founders) for me in founders]
        states += [member.joiner(me) for me in everyone[len(founders) :]]
        ring = states[0].ring
        assert ring is not None
        world = World(
            tuple(self._state_id(state) for state in states),
            (),
            frozenset((ring.ballot, me) for me in founders),
            ((),) * self._num,
            frozenset(),
        )
        if scenario.num_joiners:
            # Members wait at the boundary while no reduction is under way.
            world = world._replace(facts=frozenset())
            world, _ = self._happens(world, 0, Admit(everyone[len(founders) :]))
        most = max(self._walk(world))
        return len(self._seen), most

    # -- walking

    def _walk(self, world: World) -> tuple[int, ...]:
        found = self._seen.get(world)
        if found is not None:
            return found
        if len(self._seen) > self.most_worlds:
            raise RuntimeError(f"more than {self.most_worlds} worlds")
        most = (0,) * self._num
        moved = False
        for label, me, following, num_sent in self._transitions(world):
            if following == world:
                continue
            moved = True
            self._path.append((me, label))
            behind = self._walk(following)
            self._path.pop()
            most = tuple(
                max(known, value + (num_sent if index == me else 0))
                for index, (known, value) in enumerate(zip(most, behind, strict=True))
            )
        if not moved or self._is_at_rest(world):
            self._check_end(world)
        self._seen[world] = most
        return most

    def _transitions(self, world: World) -> Iterator[tuple[Label, int, World, int]]:
        beaten = self._without_beaten(world)
        if beaten is not world:
            yield ("beaten tokens end",), 0, beaten, 0
            return
        chosen = self._one_that_decides_alone(world) if self._goes_on else None
        for me in range(self._num) if chosen is None else (chosen,):
            yield from self._of_member(world, me)

    def _of_member(self, world: World, me: int) -> Iterator[tuple[Label, int, World, int]]:
        if world.states[me] == DEAD:
            return
        state = self._states[world.states[me]]
        heads = [(pair[0], messages[0]) for pair, messages in world.channels if pair[1] == me]
        if state.phase == "halted":
            return
        before = [world, *self._alone(world, me)]
        for sender, message in heads:
            for ready in before:
                taken = self._taken(ready, sender, me)
                happened = self._inputs[message]
                following, num = self._happens(taken, me, Received(sender, happened))
                yield ("gets", happened, "from", sender), me, following, num
        other = member.watched(state)
        if other is not None:
            for now, note in self._losses(world, me, other):
                for ready in [now, *self._alone(now, me)]:
                    following, num = self._happens(ready, me, Lost(other))
                    yield ("loses", other, note), me, following, num

    def _losses(self, world: World, me: int, other: int) -> Iterator[tuple[World, str]]:
        is_gone = world.states[other] == DEAD or self._states[world.states[other]].phase == "halted"
        # Everything that it sent before its death has arrived or is lost with it: connections end in order.
        is_silent = not any(pair == (other, me) for pair, _ in world.channels)
        if is_gone:
            if is_silent:
                yield world, "gone"
            return
        if is_silent and other in self.scenario.killed:
            yield self._killed(world, other), "killed"
        if (me, other) in self.scenario.doubts and (me, other) not in world.doubted:
            yield world._replace(doubted=world.doubted | {(me, other)}), "wrongly"

    def _one_that_decides_alone(self, world: World) -> int | None:
        waiting: dict[int, list[int]] = {}
        for (sender, receiver), _ in world.channels:
            waiting.setdefault(receiver, []).append(sender)
        for me, senders in waiting.items():
            before = self._nearest_before(world, me)
            if me in self._may_leave or before in self._may_leave or senders != [before]:
                continue
            state = self._states[world.states[me]]
            doubtful = {other for _, other in self.scenario.doubts if world.states[other] != DEAD}
            doubtful |= set(range(self.scenario.num_members, self._num))
            if member.watched(state) in doubtful:
                continue
            if state.phase == "running" and state.num_steps < NUM_STEPS and not list(self._alone(world, me)):
                continue  # whether the member can complete its step depends on the others
            return me
        return None

    def _without_beaten(self, world: World) -> World:
        """Drop messages without effect, which stay so because better attempts are never given up."""
        for (sender, me), messages in world.channels:
            while messages and self._changes_nothing(world, me, sender, messages[0]):
                world = self._taken(world, sender, me)
                messages = messages[1:]
        return world

    def _changes_nothing(self, world: World, me: int, sender: int, message: int) -> bool:
        if world.states[me] == DEAD:
            return False
        following, num_sent = self._happens(world, me, Received(sender, self._inputs[message]))
        return following is world and not num_sent

    def _nearest_before(self, world: World, me: int) -> int:
        before = (me - 1) % self._num
        while world.states[before] == DEAD:
            before = (before - 1) % self._num
        return before

    # -- what happens

    def _alone(self, world: World, me: int) -> Iterator[World]:
        """Return the states that a member may have reached by itself before its next event."""
        state = self._states[world.states[me]]
        if state.phase not in ("running", "agreeing") or state.ring is None:
            return
        ballot, members = state.ring
        if state.num_steps < state.goal:
            for fact in world.facts:
                if fact[:2] == (ballot, "state"):
                    applied = (*world.applied[:me], fact[2], *world.applied[me + 1 :])
                    before = world._replace(applied=applied)
                    now, _ = self._happens(before, me, Copied(ballot))
                    if now is not before:
                        yield now
        elif state.num_steps < NUM_STEPS and all((ballot, other) in world.facts for other in members):
            now, _ = self._happens(world, me, Reduced(ballot))
            if now is not world:
                yield now

    def _happens(self, world: World, me: int, happened: Input) -> tuple[World, int]:
        state_id = world.states[me]
        key = (me, state_id, self._input_id(happened))
        if key not in self._moves:
            state, outputs = member.step(self._states[state_id], happened)
            self._moves[key] = (self._state_id(state), outputs)
        following, outputs = self._moves[key]
        if following == state_id and not outputs:
            return world, 0
        states = (*world.states[:me], following, *world.states[me + 1 :])
        world = world._replace(states=states)
        num_sent = 0
        for output in outputs:
            match output:
                case Send(to, message):
                    num_sent += 1
                    if world.states[to] != DEAD and self._states[world.states[to]].phase != "halted":
                        world = self._sent(world, me, to, self._input_id(message))
                case Enter(ring, num_steps, source):
                    world = self._entered(world, me, ring, num_steps, source)
                case Apply():
                    world = self._applied(world, me)
        if self._states[following].phase == "halted":
            world = self._without_channels_to(world, me)
        return world, num_sent

    def _entered(self, world: World, me: int, ring: Ring, num_steps: int, source: int) -> World:
        state = self._states[world.states[me]]
        for other in ring.members:
            there = world.states[other]
            if there == DEAD:
                continue
            its = self._states[there]
            later = its.ring is not None and (its.ring.ballot == ring.ballot or its.ring.ballot.beats(ring.ballot))
            if its.num_steps > num_steps and not later and not its.promised.beats(ring.ballot):
                self._broken(f"{other} applied a step that ring {ring} will not have")
        if me == source:
            if state.num_steps != num_steps:
                self._broken(f"{me} is to give a state that it has not")
            world = world._replace(facts=world.facts | {(ring.ballot, "state", world.applied[me])})
        if state.num_steps > num_steps:
            self._broken(f"{me} has more steps than ring {ring}, which goes on from {num_steps}")
        if num_steps < NUM_STEPS and state.num_steps == num_steps:
            world = world._replace(facts=world.facts | {(ring.ballot, me)})
        self._check_one_ring(world)
        return world

    def _applied(self, world: World, me: int) -> World:
        state = self._states[world.states[me]]
        if state.ring is None or state.phase != "running":
            self._broken(f"{me} applies a step outside of a ring")
        applied = (*world.applied[me], state.ring.ballot)
        return world._replace(applied=(*world.applied[:me], applied, *world.applied[me + 1 :]))

    def _check_one_ring(self, world: World) -> None:
        found = [self._states[one] for one in world.states if one != DEAD]
        running = {state.me: state.ring for state in found if state.phase == "running"}
        live = {ring for ring in running.values() if ring and all(running.get(other) == ring for other in ring.members)}
        if len(live) > 1:
            self._broken(f"rings that train side by side: {sorted(live)}")

    def _is_at_rest(self, world: World) -> bool:
        """Return whether nothing is under way; doubts and deaths that have not come may never come."""
        if world.channels:
            return False
        watched = {member.watched(self._states[one]) for one in world.states if one != DEAD}
        gone = {me for me, one in enumerate(world.states) if one == DEAD or self._states[one].phase == "halted"}
        return not watched & gone

    def _check_end(self, world: World) -> None:
        changed = True
        while changed:
            changed = False
            for me, one in enumerate(world.states):
                if one != DEAD and (found := list(self._alone(world, me))):
                    world, changed = found[0], True
        found = [None if one == DEAD else self._states[one] for one in world.states]
        self.ends.add(tuple((one.ring, one.num_steps, one.phase) if one else (None, 0, "") for one in found))
        living = [self._states[one] for one in world.states if one != DEAD]
        # A joiner whose attempt lost is let in at a later boundary.
        training = [state for state in living if state.phase not in ("halted", "joining")]
        if any(state.phase != "running" for state in training):
            self._broken(f"it does not end: {training}")
        rings = {state.ring for state in training}
        members = tuple(state.me for state in training)
        if training and (len(rings) != 1 or next(iter(rings)).members != members):  # type: ignore[union-attr]
            self._broken(f"{members} train, in {rings}")
        if any(state.num_steps != state.goal for state in training):
            self._broken(f"steps differ: {training}")
        if len({world.applied[state.me] for state in training}) > 1:
            self._broken(f"states differ: {world.applied}")
        if not self.scenario.num_joiners and any(state.num_steps != NUM_STEPS for state in training):
            self._broken("the step was never made")
        if not training and self._goes_on:
            self._broken("nobody goes on, though enough are left")

    # -- bookkeeping

    def _broken(self, what: str) -> None:
        history = [f"  {me} {' '.join(map(str, label))}" for me, label in self._path]
        raise BrokenError("\n".join([what, f"in {self.scenario}, after:", *history]))

    def _killed(self, world: World, me: int) -> World:
        states = (*world.states[:me], DEAD, *world.states[me + 1 :])
        return self._without_channels_to(world._replace(states=states), me)

    def _without_channels_to(self, world: World, me: int) -> World:
        return world._replace(channels=tuple(entry for entry in world.channels if entry[0][1] != me))

    def _sent(self, world: World, sender: int, receiver: int, message: int) -> World:
        channels = dict(world.channels)
        channels[(sender, receiver)] = (*channels.get((sender, receiver), ()), message)
        return world._replace(channels=tuple(sorted(channels.items())))

    def _taken(self, world: World, sender: int, receiver: int) -> World:
        channels = dict(world.channels)
        rest = channels.pop((sender, receiver))[1:]
        if rest:
            channels[(sender, receiver)] = rest
        return world._replace(channels=tuple(sorted(channels.items())))

    def _state_id(self, state: MemberState) -> int:
        if state not in self._state_ids:
            self._state_ids[state] = len(self._states)
            self._states.append(state)
        return self._state_ids[state]

    def _input_id(self, value: Any) -> int:
        key = (type(value), value)
        if key not in self._input_ids:
            self._input_ids[key] = len(self._inputs)
            self._inputs.append(value)
        return self._input_ids[key]

"""Play a run with faults drawn from a seed, and judge its end."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.world import Setting, Size, World

POLL_S = 0.2
LAST_SHARE = 0.9
"""Share of the steps after which no faults follow, because a command repeated after its run's end is refused."""
STEPS_BETWEEN = 3
STOPPED = 130
"""The exit code of a run that Ctrl-C stopped."""
RECOVERS = 0.7
"""The share of faults after which the run trains again before the next one."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of a played run, in seconds unless stated otherwise.

    Faults are inflicted for some time once the run trains. A run without a new step for a certain time is stuck. It is
    left alone after each fault, and after most of them until it has trained a few steps again, but for ``patience_s``
    at most. With ``apart_steps``, a range, that many steps are decided between two faults instead, and the size of the
    run is measured before each fault. With ``piece_s`` the run is stopped after that time, and kept for the next piece.
    """

    faults_s: float
    stuck_s: float
    calm_s: tuple[float, float] = (1.0, 5.0)
    patience_s: float = 20.0
    apart_steps: tuple[int, int] | None = None
    piece_s: float | None = None


@dataclass
class Played:
    """What became of one run, or of several; ``failures`` is empty if everything is as in an undisturbed run."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    steps: int = 0
    redone: int = 0
    pauses_s: list[float] = field(default_factory=list)
    sizes: list[Size] = field(default_factory=list)
    status_cpu_s: float = 0.0
    num_runs: int = 0
    is_piece: bool = False

    def add(self, other: Played) -> None:
        self.num_runs += 1
        self.faults += other.faults
        self.steps += other.steps
        self.redone += other.redone
        self.pauses_s += other.pauses_s

    def told(self) -> str:
        pauses = "no pause"
        if self.pauses_s:
            pauses = f"{len(self.pauses_s)} pauses, median {statistics.median(self.pauses_s):.2f} s"
            pauses += f", worst {max(self.pauses_s):.1f} s"
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return f"{self.faults.total()} faults ({kinds}); {self.steps} steps, {self.redone} run again; {pauses}"


def play(
    seed: int,
    setting: Setting,
    reference: Callable[[], Mapping[str, str]],
    folder: Path,
    bounds: Bounds,
    faults: Sequence[Fault] = FAULTS,
) -> Played:
    """Start the command, disturb it for a while, and let it end; failures are in the result.

    ``reference`` returns the digests of an undisturbed run; it is called once all steps are done.
    """
    played, draw = Played(seed), random.Random(seed)
    possible = [fault for fault in faults if fault.possible()]
    with World(setting, folder, is_kept=bounds.piece_s is not None) as world:
        world.start()
        began_s = time.monotonic()
        code = _disturbed(world, played, draw, possible, bounds)
        played.lines.append(f"{time.monotonic() - began_s:6.1f} s  exit code {code}")
        if code is None:
            played.failures.append(f"no new step for {bounds.stuck_s:g} s, at version {world.version()}")
        elif code != (STOPPED if played.is_piece else 0):
            played.failures.append(f"exit code {code}")
        else:
            if not played.is_piece and world.digests() != reference():
                played.failures.append("the final weights differ from those of the undisturbed run")
            played.status_cpu_s = world.status_cpu_s()
            played.failures += [f"left behind: {what}" for what in world.left()]
            report = world.report()
            played.steps, played.redone = len(report.steps), report.steps_redone
            played.pauses_s = [morph.pause_ms / 1e3 for morph in report.morphs if morph.pause_ms is not None]
        if played.failures:
            played.lines.append(world.story())
    return played


def _disturbed(world: World, played: Played, draw: random.Random, faults: list[Fault], bounds: Bounds) -> int | None:
    """Inject one fault after another once the run trains; return the exit code, or None if the run does not end."""
    began_s = time.monotonic()
    deck: list[Fault] = []
    trains_s = next_s = None
    goal, newest, moved_s = 0, 0, began_s
    first = world.version()  # above 0 in a piece that continues an earlier one
    while (code := world.ended()) is None:
        now_s = time.monotonic()
        if bounds.piece_s is not None and now_s - began_s > bounds.piece_s and trains_s is not None:
            played.is_piece = True
            return world.stop()
        version = world.version()
        if version > newest:
            newest, moved_s = version, now_s
        if now_s - moved_s > bounds.stuck_s:
            return None
        if trains_s is None or next_s is None:
            trains_s = next_s = now_s if version > first else None
        elif bounds.apart_steps is not None:
            if goal <= version < LAST_SHARE * world.steps:
                with suppress(psutil.Error, OSError):  # the manager, or one of its files, may have just disappeared
                    played.sizes.append(world.size())
                if goal:
                    deck = deck or draw.sample(faults, len(faults))
                    _inflict(world, played, draw, deck.pop(), began_s)
                goal = world.version() + draw.randint(*bounds.apart_steps)
        elif now_s >= next_s and version < goal and now_s < next_s + bounds.patience_s:
            pass
        elif next_s <= now_s < trains_s + bounds.faults_s and version < LAST_SHARE * world.steps:
            deck = deck or draw.sample(faults, len(faults))  # every kind is used once before any is repeated
            _inflict(world, played, draw, deck.pop(), began_s)
            next_s = time.monotonic() + draw.uniform(*bounds.calm_s)
            goal = world.version() + STEPS_BETWEEN if draw.random() < RECOVERS else 0
        world.family.look()
        time.sleep(POLL_S)
    return code


def _inflict(world: World, played: Played, draw: random.Random, fault: Fault, began_s: float) -> None:
    at_s, version = time.monotonic() - began_s, world.version()
    try:
        done = fault.inflict(world, draw)
    except psutil.Error:
        done = ""  # its victim has just ended
    played.lines.append(f"{at_s:6.1f} s  v{version}  {fault.name}: {done or 'nothing there'}")
    if done:
        played.faults[fault.name] += 1

"""Kills VMs at random moments of a step and requests new ones later, in a thread of its own."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from manager.controller.state.state import ControllerState, Phase
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed

DONE = "enough kills"
STEPS_BETWEEN = (3, 8)
SETTLE_TIMEOUT_S = 60.0


class Killer:
    """An observer of the driver.

    The full group trains some steps; then one, two or three VMs are killed at once, at a random moment. The others
    train some steps, new VMs come and join, and so on. Then the run is ended.

    Args:
        fleet: The run's fleet.
        nodes: The VMs at the start.
        kills: Number of kills.
        together: The most VMs killed at once.
        seed: For drawing victims and moments.
    """

    def __init__(self, fleet: VmFleet, nodes: Sequence[str], kills: int, together: int, seed: int) -> None:
        self._fleet, self._nodes, self._kills, self._together = fleet, list(nodes), kills, together
        self._random = random.Random(seed)
        self._news = threading.Condition()
        self._state: ControllerState | None = None
        self._stop: Callable[[str], None] = lambda _: None
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)
        self._thread.start()

    def __call__(self, observed: Observed) -> None:
        """Handle one observed decision."""
        with self._news:
            self._state, self._stop = observed.decision.state, observed.request_stop
            self._news.notify_all()

    def _run(self) -> None:
        try:
            for _ in range(self._kills):
                self._settle(len(self._nodes))
                victims = self._random.sample(self._nodes, self._random.randint(1, self._together))
                self._fleet.revoke(*victims)
                self._settle(len(self._nodes) - len(victims))
                for victim in victims:
                    self._fleet.request(victim)
            self._settle(len(self._nodes))
        except TimeoutError as error:
            self.error = str(error)
        self._stop(DONE if self.error is None else self.error)

    def _settle(self, num_workers: int) -> None:
        """Wait until a shape of this many workers has trained some steps, and then for a part of a step.

        Raises:
            TimeoutError: it did not within ``SETTLE_TIMEOUT_S``.
        """
        target: int | None = None
        steps = self._random.randint(*STEPS_BETWEEN)

        def trained() -> bool:
            nonlocal target
            state = self._state
            if state is None or state.phase is not Phase.TRAINING or len(state.workers) != num_workers:
                target = None
                return False
            best = state.config.best_plan(num_workers)
            if best is None or len(state.slots) != best.num_workers:
                target = None
                return False
            target = state.version + steps if target is None else target
            return state.version >= target

        with self._news:
            if not self._news.wait_for(trained, SETTLE_TIMEOUT_S):
                phase = "nothing" if self._state is None else self._state.phase
                raise TimeoutError(f"{num_workers} workers did not train within {SETTLE_TIMEOUT_S:g} s: {phase}")
        threading.Event().wait(self._random.uniform(0.0, 0.15))

"""Flapping machines: how long a machine must stay ready before it is used in a shape again."""

from __future__ import annotations

from manager.controller.state.state import Flaps
from manager.controller.state.transition import Transition
from morph.contract.waits import Backoff


def record_flap(transition: Transition, host: str) -> None:
    """Record that a machine that had been ready became unreliable; forget old records."""
    state, now_s = transition.state, transition.now_s
    memory_s = state.config.policy.rules.flaps.memory_s
    recent = {name: entry for name, entry in state.provisioning.flaps.items() if now_s < entry.last_s + memory_s}
    num = recent[host].num + 1 if host in recent else 1
    transition.change_provisioning(flaps={**recent, host: Flaps(num=num, last_s=now_s)})


def hold_s(transition: Transition, host: str) -> float:
    """Return how long (seconds) a machine that is ready again must remain ready before it is used; 0: not at all."""
    rules, entry = transition.state.config.policy.rules.flaps, transition.state.provisioning.flaps.get(host)
    if entry is None or entry.num < 2 or transition.now_s >= entry.last_s + rules.memory_s:
        return 0.0
    return Backoff(rules.hold_s, rules.hold_max_s).pause_s(entry.num - 2)

"""Machines that come and go: how long one must stay ready before a shape is built on it again."""

from __future__ import annotations

from manager.controller.state.draft import Draft
from manager.controller.state.state import Flaps
from morph.contract.waits import Backoff


def flapped(draft: Draft, host: str) -> None:
    """Note that a machine which had been ready is not to be counted on any more; forget what was long ago."""
    state, now_s = draft.state, draft.now_s
    memory_s = state.config.policy.rules.flaps.memory_s
    recent = {name: entry for name, entry in state.provisioning.flaps.items() if now_s < entry.last_s + memory_s}
    num = recent[host].num + 1 if host in recent else 1
    draft.change_provisioning(flaps={**recent, host: Flaps(num=num, last_s=now_s)})


def hold_s(draft: Draft, host: str) -> float:
    """Return how long (seconds) a machine that is ready again must stay so before it is taken in; 0: no time."""
    rules, entry = draft.state.config.policy.rules.flaps, draft.state.provisioning.flaps.get(host)
    if entry is None or entry.num < 2 or draft.now_s >= entry.last_s + rules.memory_s:
        return 0.0
    return Backoff(rules.hold_s, rules.hold_max_s).pause_s(entry.num - 2)

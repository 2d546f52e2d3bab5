"""Decides when to save, to request a VM and to move, for one script on one VM. Pure.

============  =====================================================================
phase         invariant
============  =====================================================================
``waiting``   a VM was requested; the script runs nowhere
``running``   the script runs, and its VM is not known to be taken
``leaving``   there is a notice; another VM was requested
``ended``     for good, with the script's exit code
============  =====================================================================

Saves come at the interval of least cost (Young; Spotify, section 4.2): every sqrt(2 delta (MTTF + R)), counting only
losses without a complete save before them; the first save comes soon, to be measured. If a notice leaves time for a
step, a save and its upload, they are made (section 4.4); then the VM is released.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from manager.controller.state.config import ExpectedLosses
from morph.contract.rules import RequestRules
from morph.contract.waits import cheapest_interval_s

PRIOR, REQUESTS = ExpectedLosses(), RequestRules()
FIRST_SAVE_S, MARGIN_S = 1.0, 1.0
"""Seconds: the assumed stall of a save before one was observed; the time that a notice must leave beyond its save."""
FIRST_AFTER_S = 30.0
"""The seconds of training before the first save, which shows the cost of saves."""
STAYS_S = 60.0
"""Seconds. A VM that still exists this long after its announced end stays: notices may be withdrawn or mere advice."""


@dataclass(frozen=True)
class Came:
    """The requested VM is up."""

    vm: str


@dataclass(frozen=True)
class Denied:
    """The requested VM does not come."""

    sentence: str


@dataclass(frozen=True)
class Stepped:
    """The script did a step."""

    seconds: float


@dataclass(frozen=True)
class Saved:
    """The script has saved, by order ``number``; ``seconds``: the time without training; None: no save was ordered."""

    number: int
    seconds: float | None


@dataclass(frozen=True)
class Uploaded:
    """A save is complete in storage."""

    number: int
    seconds: float


@dataclass(frozen=True)
class Refused:
    """A save could not be copied on the VM's disk, or storage did not accept it."""

    number: int
    sentence: str


@dataclass(frozen=True)
class Noticed:
    """The script's VM will be taken after this number of seconds."""

    lead_s: float


@dataclass(frozen=True)
class Gone:
    """The script's VM was taken, or has vanished."""


@dataclass(frozen=True)
class Ended:
    """The script ended by itself."""

    code: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Came | Denied | Stepped | Saved | Uploaded | Refused | Noticed | Gone | Ended | Tick


@dataclass(frozen=True)
class Ask:
    """Request a VM from the provider."""


@dataclass(frozen=True)
class Start:
    """Start the script on a VM."""

    vm: str


@dataclass(frozen=True)
class Save:
    """Order the script to save."""

    number: int


@dataclass(frozen=True)
class Release:
    """Give back the script's VM; the script ends with it."""


Action = Ask | Start | Save | Release
Answer = tuple["SpotState", tuple[Action, ...], str]


@dataclass(frozen=True)
class SpotState:
    """``spare``: a VM that is up before it is needed. ``lasting``: the newest order whose save is in storage.

    ``num_denied``: consecutive requests without a VM; ``ask_s`` is then the time of the next one. ``num_losses``:
    losses without a complete save before them; ``watched_s``: the total time that VMs were up.
    """

    phase: Literal["waiting", "running", "leaving", "ended"] = "waiting"
    is_requesting: bool = False
    spare: str | None = None
    requested_s: float | None = None
    num_denied: int = 0
    ask_s: float = 0.0
    since_s: float = 0.0
    ordered: int = 0
    lasting: int = 0
    saved_s: float = 0.0
    emergency: int | None = None
    until_s: float = 0.0
    step_s: float | None = None
    stall_s: float | None = None
    upload_s: float | None = None
    restart_s: float | None = None
    num_losses: int = 0
    watched_s: float = 0.0
    code: int | None = None


def decide(state: SpotState, event: Event, now_s: float) -> Answer:
    """Return the next state, the actions, and the reason."""
    if state.phase == "ended":
        return state, (), ""
    match event:
        case Came(vm):
            return _came(state, vm, now_s)
        case Denied(sentence):
            wait_s = REQUESTS.backoff.pause_s(state.num_denied)
            state = replace(state, is_requesting=False, num_denied=state.num_denied + 1, ask_s=now_s + wait_s)
            return state, (), f"no VM yet: {sentence}; the next request in {wait_s:g} s"
        case Stepped(seconds):
            if state.step_s is None and state.requested_s is not None:
                state = replace(state, restart_s=max(0.0, now_s - state.requested_s - seconds), saved_s=now_s - seconds)
            return _ticked(replace(state, step_s=seconds), now_s)
        case Saved(_, seconds):
            return replace(state, stall_s=state.stall_s if seconds is None else seconds, saved_s=now_s), (), ""
        case Uploaded(number, seconds):
            return _uploaded(replace(state, lasting=max(number, state.lasting), upload_s=seconds), number)
        case Refused(_, sentence):
            state = replace(state, lasting=state.ordered, saved_s=now_s, emergency=None)
            return state, (), f"a save was not stored: {sentence}"
        case Noticed(lead_s):
            return _noticed(state, lead_s, now_s)
        case Gone():
            return _gone(state, now_s)
        case Ended(code):
            return replace(state, phase="ended", code=code), (Release(),), f"the script ended with code {code}"
        case Tick():
            return _ticked(state, now_s)


def interval_s(state: SpotState, now_s: float) -> float:
    """Return the seconds between saves with the least cost, and at least the time until a save is complete."""
    watched_s = state.watched_s + (now_s - state.since_s if state.phase == "running" else 0.0)
    mttf_s = (3600.0 / PRIOR.per_vm_h + watched_s) / (1 + state.num_losses)  # the prior counts as one loss
    restart_s = PRIOR.allocation_s + PRIOR.preparation_s if state.restart_s is None else state.restart_s
    if state.stall_s is None:
        return max(FIRST_AFTER_S, state.step_s or 0.0)
    best_s = cheapest_interval_s(state.stall_s, mttf_s, restart_s)
    return max(best_s, state.stall_s + (state.upload_s or 0.0), state.step_s or 0.0)


def emergency_s(state: SpotState) -> float:
    """Return how long before a VM's end an emergency save must begin: a step, a save and its upload."""
    stall_s = FIRST_SAVE_S if state.stall_s is None else state.stall_s
    return (state.step_s or 0.0) + stall_s + (stall_s if state.upload_s is None else state.upload_s) + MARGIN_S


def _came(state: SpotState, vm: str, now_s: float) -> Answer:
    state = replace(state, is_requesting=False, num_denied=0)
    if state.phase in ("running", "leaving"):
        return replace(state, spare=vm), (), f"{vm} waits for the script"
    return _started(state, vm, now_s)


def _started(state: SpotState, vm: str, now_s: float) -> Answer:
    state = replace(
        state, phase="running", spare=None, since_s=now_s, saved_s=now_s, emergency=None, step_s=None,
        ordered=state.lasting,
    )  # fmt: skip
    return state, (Start(vm),), f"the script begins on {vm}"


def _ticked(state: SpotState, now_s: float) -> Answer:
    is_missing = state.phase == "waiting" or (state.phase == "leaving" and state.spare is None)
    if is_missing and not state.is_requesting and (not state.num_denied or now_s >= state.ask_s):
        requested_s = state.requested_s if state.num_denied else now_s
        return (
            replace(state, is_requesting=True, requested_s=requested_s),
            (Ask(),),
            "" if state.num_denied else "there is no VM",
        )
    is_free = state.ordered == state.lasting  # one save at a time
    if state.phase == "leaving" and is_free and state.emergency is None and state.step_s is not None:
        return _on_notice(state, now_s)
    if state.phase != "running" or not is_free or state.step_s is None:
        return state, (), ""
    pause_s = interval_s(state, now_s)
    if now_s - state.saved_s < pause_s:
        return state, (), ""
    return _ordered(state, f"one save every {pause_s:.3g} s costs least")


def _ordered(state: SpotState, reason: str) -> Answer:
    number = state.ordered + 1
    return replace(state, ordered=number), (Save(number),), reason


def _noticed(state: SpotState, lead_s: float, now_s: float) -> Answer:
    if state.phase != "running":
        return state, (), ""
    asks: tuple[Action, ...] = () if state.is_requesting or state.spare else (Ask(),)
    state = replace(state, phase="leaving", is_requesting=state.spare is None, until_s=now_s + lead_s)
    state = replace(state, requested_s=now_s if asks else state.requested_s)
    if state.step_s is None:
        return state, asks, f"the VM goes in {lead_s:.3g} s, before the script has done a step"
    state, orders, reason = _on_notice(state, now_s)
    why = f"the VM goes in {lead_s:.3g} s, and a save may take {emergency_s(state):.3g} s: it trains on"
    return state, asks + orders, reason or why


def _on_notice(state: SpotState, now_s: float) -> Answer:
    """Save if there is time, or if the VM should have been gone for long, because its end is then unknown."""
    left_s = state.until_s - now_s
    if -STAYS_S <= left_s < emergency_s(state):
        return state, (), ""
    state, orders, _ = _ordered(state, "")
    goes = f"the VM goes in {left_s:.3g} s" if left_s > 0 else "the VM was not taken"
    return replace(state, emergency=state.ordered), orders, f"{goes}: the script saves"


def _uploaded(state: SpotState, number: int) -> Answer:
    if state.phase == "leaving" and number == state.emergency:
        return state, (Release(),), "all that was trained is in storage: the VM is released"
    return state, (), ""


def _gone(state: SpotState, now_s: float) -> Answer:
    is_saved = state.emergency is not None and state.lasting >= state.emergency
    state = replace(
        state,
        num_losses=state.num_losses + (not is_saved),
        watched_s=state.watched_s + now_s - state.since_s,
        phase="waiting",
    )
    if state.spare is not None:
        return _started(state, state.spare, now_s)
    if state.is_requesting:
        return state, (), "the VM is gone"
    return replace(state, is_requesting=True, num_denied=0, requested_s=now_s), (Ask(),), "the VM is gone"

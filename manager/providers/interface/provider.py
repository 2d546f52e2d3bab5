"""The interface of every source of VMs, its errors, and a function that ends all VMs of a run.

ProviderError
├── Refused            ask for fewer, or later
│   ├── QuotaExceeded  the account may have no more
│   └── CapacityShort  there are none of them now
├── Throttled          the same call again, after ``retry_after_s``
├── Transient          the same call again, soon, or after ``retry_after_s``
└── Misconfigured      fix the input
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import Field

from manager.run_dir import VMS, write_in_run_dir
from morph.contract.base import Value, read_json
from morph.contract.errors import MorphError, RunDirError
from morph.contract.vm_names import MAX_DEVICES, workers_of
from morph.contract.waits import Backoff

NAME_CHARACTERS = 48
ENDED = "ended: "
"""Begins the first line of a boot log if the cloud says why the VM ended."""
MESSAGE_CHARACTERS = 300
"""The number of characters at the beginning of a message of a cloud that Morph's own message keeps."""
BOOT_LOG_CHARACTERS = 2000
"""The number of characters at the end of a VM's boot log that a journal keeps."""
PATIENCE_S = 900.0
"""Seconds for attempts: longer than providers ask to wait. A forgotten VM ends itself after about this time."""
RETRIES = Backoff(first_s=2.0, most_s=120.0)


class ProviderError(MorphError):
    """A provider's call failed; ``retry_after_s``: how long the provider asks to wait; None: it does not say."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Refused(ProviderError):
    """The requested VMs are not available now."""


class QuotaExceeded(Refused):
    """The account may have no more."""


class CapacityShort(Refused):
    """The provider has no such VMs now."""


class Throttled(ProviderError):
    """Too many calls."""


class Transient(ProviderError):
    """The call may or may not have been carried out; repeating it is safe."""


class Misconfigured(ProviderError):
    """The user must fix something: an account, a name, a permission, a lock."""


RETRYABLE = (Throttled, Transient)
"""Errors after which the same call may succeed."""


def not_ended(left: Mapping[str, ProviderError]) -> ProviderError:
    """Return the error for resources that could not be ended, by name: Transient if a retry may help for any."""
    text = "; ".join(f"{name} is left: {error}" for name, error in sorted(left.items()))
    again = [error for error in left.values() if isinstance(error, RETRYABLE)]
    if not again:
        return Misconfigured(text)
    return Transient(
        text, max((error.retry_after_s for error in again if error.retry_after_s is not None), default=None)
    )


class Vm(Value):
    """One VM that exists, or is being made. Each of its devices has a worker, which the controller treats as a node."""

    name: str
    request: str = Field(description="the request that it answers")
    provider: str = ""
    region: str = ""
    zone: str = "unknown"
    size: str = ""
    usd_per_h: float | None = Field(default=None, ge=0, description="None: not known")
    paid_since_s: float | None = Field(
        default=None,
        description="when its billing began, in seconds since 1970 by this machine's clock; None: at its grant",
    )
    num_devices: int = Field(default=1, ge=1, le=MAX_DEVICES, description="devices that Morph uses")
    node_type: str = Field(
        default="", description="type of its GPUs; empty: all are alike", exclude_if=lambda given: not given
    )
    waits: bool = Field(default=False, description="it is in its market's queue, and costs nothing until it begins")
    waits_for: str = Field(
        default="", description="the market's reason why it waits; empty: the usual", exclude_if=lambda given: not given
    )
    never_begins: bool = Field(
        default=False, description="that reason is the user's to mend", exclude_if=lambda given: not given
    )

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of its workers, by device."""
        return workers_of(self.name, self.num_devices)


class Granted(tuple[Vm, ...]):
    """The VMs that a request got; ``missing``: why fewer came; None: nothing is missing, or ``max_vms`` is reached.

    ``decisions``: sentences about choices that the user pays for.
    """

    missing: ProviderError | None
    decisions: tuple[str, ...]

    def __new__(
        cls, vms: Iterable[Vm] = (), missing: ProviderError | None = None, decisions: Sequence[str] = ()
    ) -> Granted:
        """Make the answer to one request."""
        granted = super().__new__(cls, vms)
        granted.missing, granted.decisions = missing, tuple(decisions)
        return granted


class Price(Value):
    """The price of one VM while it exists."""

    usd_per_h: float = Field(ge=0)
    source: str = Field(description="the source of this price")


class Capabilities(Value):
    """The capabilities of a provider."""

    spot: bool
    zones: tuple[str, ...] = ()
    max_vms: int | None = Field(default=None, ge=0, description="None: not known beforehand")
    notices: str = Field(default="", description="name of the notice source on its VMs; empty: none")
    ending: str = Field(default="", description="the command that ends the rest of a run; empty: none is needed")


class Provider(Protocol):
    """Requests VMs and ends them. Every implementation passes ``tests/providers/test_contract.py``.

    Calls block for a bounded time. Only one thread at a time calls ``request``; meanwhile others may make the other
    calls, also several at once, but must not end VMs of the request under way, except after ``stop``. An unreadable
    answer about the existing VMs is an error, and never means that there are none.
    """

    def request(self, request: str, count: int, max_vms: int | None = None, *, node_type: str = "") -> tuple[Vm, ...]:
        """Get VMs that together have ``count`` devices.

        Repeating a request under its name, from any process, gets no further VMs. A VM is made only while the other VMs
        have fewer devices, so that no VM is superfluous; the last VM may bring more devices than were missing. The
        result has fewer devices if the limit ``max_vms`` (None: ``count``) is reached, or if some VMs did not come:
        then it is a ``Granted`` with the reason. Trouble with one VM ends no other one: an error is raised only if none
        came.

        ``node_type``: the user's name for the type of their GPUs; empty: any type.

        Refused: not even one VM is available. Throttled: repeat the request later, under the same name. Transient:
        repeat the request, under the same name. Misconfigured: repeating the request does not help.
        """

    def list(self) -> tuple[Vm, ...]:
        """Return every VM of this run that exists or is being made, including those that another manager requested.

        ProviderError: which VMs exist is not known.
        """

    def delete(self, names: Sequence[str]) -> None:
        """End VMs and all that belongs to them; other names are ignored. ProviderError: the error names the rest."""

    def evict(self, name: str) -> bool:
        """Make the provider revoke a VM, with its usual notice, for tests; return at once whether it can."""

    def boot_log(self, name: str) -> str:
        """Return the end of the boot log of a VM of this run; empty if it is not known. Never fails.

        If the cloud says why the VM ended, the first line is ``ENDED`` and that reason.
        """

    def stop(self) -> None:
        """Make a request under way in another thread give up soon; VMs that it made are still listed."""

    def dismantle(self) -> Sequence[str]:
        """End every VM of this run, and all other resources made for it; a second call changes nothing.

        Returns descriptions of resources that lost VMs had left behind, with their prices.

        ProviderError: something is left, which the error names; the rest is ended.
        """

    def price(self, node_type: str = "") -> Price | None:
        """Return the price of the most expensive VM that may be granted, of ``node_type`` if given; None: not known."""

    def capabilities(self) -> Capabilities:
        """Return what this provider can do."""


def vm_name(request: str, index: int) -> str:
    """Return the name of a request's VM with this number: always the same, and valid as a host name."""
    return f"{request_part(request)}-{index}"


def request_part(request: str) -> str:
    """Return the common beginning, before the last hyphen, of the names of a request's VMs; unique to the request."""
    clean = re.sub(r"[^a-z0-9]+", "-", request.lower()).strip("-")
    if clean != request or len(clean) > NAME_CHARACTERS:
        digest = hashlib.sha256(request.encode()).hexdigest()[:8]
        clean = f"{clean[: NAME_CHARACTERS - 9].rstrip('-')}-{digest}".lstrip("-")
    return clean


def end_all(
    provider: Provider,
    *,
    say: Callable[[str], None] = lambda _sentence: None,
    patience_s: float = PATIENCE_S,
    pause: Callable[[float], object] | None = None,
    hurry: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Sequence[str]:
    """End every VM of a run and its other resources; blocks until they are gone, for about ``patience_s``.

    Returns descriptions of what lost VMs had left behind. After an error that a retry may fix, the call is repeated
    after a growing pause, or the one that the provider asks for; the last time at the end, or once ``hurry`` is set.
    ``say``: called with a sentence on what is left. ProviderError: something is left.
    """
    until_s, hurry = clock() + patience_s, hurry or threading.Event()
    pause = pause or hurry.wait
    for own_s in RETRIES.pauses():
        try:
            return provider.dismantle()
        except RETRYABLE as error:
            left_s = until_s - clock()
            if left_s <= 0 or hurry.is_set():
                raise
            next_s = min(own_s if error.retry_after_s is None else error.retry_after_s, left_s)
            say(f"{error}; again in {next_s:.3g} s")
        pause(next_s)
    raise AssertionError("pauses have no end")


# The name that marks a run's VMs: new for each run directory, and kept in it.


class RunName(Value):
    """The name of a run. ``num_starts``: how often the run was started afresh, each time with new VMs."""

    schema_version: int = Field(default=1, ge=1, le=1)
    run: str = Field(pattern=r"^[a-z0-9-]+$")
    job: str
    num_starts: int = Field(default=0, ge=0)

    @property
    def requests(self) -> str:
        """The prefix of the names of requests, which is new for each start."""
        return f"{self.run}-{self.num_starts}"


def name_of(run_dir: Path, job: str) -> RunName:
    """Return the run's name, or a new one; writes nothing. RunDirError: its file in the run directory is damaged."""
    path = run_dir / VMS
    if path.exists():
        return read_json(path, RunName, RunDirError)
    clean = vm_name(job, 0).rsplit("-", 1)[0][:24].strip("-")
    return RunName(run=f"{clean}-{secrets.token_hex(3)}", job=job)


def write_name(run_dir: Path, name: RunName) -> None:
    """Store the run's name; RunDirError: the name cannot be written."""
    write_in_run_dir(run_dir / VMS, name.model_dump_json(indent=2) + "\n")

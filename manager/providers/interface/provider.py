"""The interface of every source of VMs, the end of all that a run has of them, and the errors raised.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import Field

from manager.run_dir import VMS, write_in_run_dir
from morph.contract.base import Value, read_json
from morph.contract.errors import MorphError, RunDirError
from morph.contract.vm_names import MAX_DEVICES, workers_of
from morph.contract.waits import Backoff

NAME_CHARACTERS = 48
BOOT_LOG_CHARACTERS = 2000
"""Of the end of a VM's boot log, as a journal keeps it."""


class ProviderError(MorphError):
    """A provider did not do what it was asked; ``retry_after_s``: how long it asks to wait, None: it does not say."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Refused(ProviderError):
    """There are no such VMs for us now."""


class QuotaExceeded(Refused):
    """The account may have no more."""


class CapacityShort(Refused):
    """The provider has none of them now."""


class Throttled(ProviderError):
    """Too many calls."""


class Transient(ProviderError):
    """The call may have been carried out or not; made again it changes nothing more."""


class Misconfigured(ProviderError):
    """Something that the user gave is wrong: an account, a name, a right, a lock."""


RETRYABLE = (Throttled, Transient)
"""What the same call may mend."""


def not_ended(left: Mapping[str, ProviderError]) -> ProviderError:
    """Return the error for what could not be ended, by name: Transient where for one of them another try may help."""
    text = "; ".join(f"{name} is left: {error}" for name, error in sorted(left.items()))
    again = [error for error in left.values() if isinstance(error, RETRYABLE)]
    if not again:
        return Misconfigured(text)
    return Transient(
        text, max((error.retry_after_s for error in again if error.retry_after_s is not None), default=None)
    )


class Vm(Value):
    """One VM that exists, or is being made. Each of its devices has a worker, which is a node to the controller."""

    name: str
    request: str = Field(description="the request that it answers")
    provider: str = ""
    region: str = ""
    zone: str = "unknown"
    size: str = ""
    usd_per_h: float | None = Field(default=None, ge=0, description="None: not known")
    paid_since_s: float | None = Field(
        default=None,
        description="since when it is paid, in seconds since 1970 by this machine's clock; None: its grant",
    )
    num_devices: int = Field(default=1, ge=1, le=MAX_DEVICES, description="that Morph drives")
    node_type: str = Field(
        default="", description="of its GPUs; empty: all are alike", exclude_if=lambda given: not given
    )
    waits: bool = Field(default=False, description="in its market's queue; it costs nothing until it begins")

    @property
    def workers(self) -> tuple[str, ...]:
        """Their names, by device."""
        return workers_of(self.name, self.num_devices)


class Price(Value):
    """What one VM costs while it exists."""

    usd_per_h: float = Field(ge=0)
    source: str = Field(description="where the figure comes from")


class Capabilities(Value):
    """What a provider can do."""

    spot: bool
    zones: tuple[str, ...] = ()
    max_vms: int | None = Field(default=None, ge=0, description="None: not known beforehand")
    notices: str = Field(default="", description="name of the notice source on its VMs; empty: none")
    ending: str = Field(default="", description="the command that ends what a run left; empty: nothing can be left")


class Provider(Protocol):
    """Asks for VMs and ends them. Every implementation passes ``tests/providers/test_contract.py``.

    Calls block, for a bounded time. One thread at a time calls ``request``; others may make the other calls meanwhile,
    several of them at once, too, but end no VM of a request that is under way, except for its end with ``stop``.
    An answer that does not say which VMs there are is an error, and never "none".
    """

    def request(self, request: str, count: int, max_vms: int | None = None, *, node_type: str = "") -> tuple[Vm, ...]:
        """Get VMs that together have ``count`` devices under a name; the same name again gets no further ones.

        ``node_type``: whose GPUs are of this type, by the name that the user gave it; empty: of any.

        Whoever asks. A VM comes only while those that are there have fewer devices, so that none is one too many; the
        last one may bring more devices than were missing. All together have fewer where there are no more VMs, or where
        ``max_vms`` (None: ``count``) of them are there.

        Raises:
            Refused: there is not even one.
            Throttled: ask again later, under the same name.
            Transient: ask again, under the same name.
            Misconfigured: asking again does not help.
        """

    def list(self) -> tuple[Vm, ...]:
        """Return every VM of this run that exists or is being made, also those that another manager requested.

        Raises:
            ProviderError: which VMs there are is not known.
        """

    def delete(self, names: Sequence[str]) -> None:
        """End VMs and all that belongs to them; one that is not there, or not of this run, is passed over.

        Every end is begun before any is waited for.

        Raises:
            ProviderError: naming those that are left; the others are ended.
        """

    def evict(self, name: str) -> bool:
        """Take a VM of this run as the provider itself does, after its own notice: for trying things out.

        Returns at once; False: it has no means for that, and nothing was done.

        Raises:
            ProviderError: it was not taken.
        """

    def boot_log(self, name: str) -> str:
        """Return the end of what a VM of this run said as it booted; empty where that is not known. Never fails."""

    def stop(self) -> None:
        """Have a request that is under way in another thread give up soon; what came of it is still listed."""

    def dismantle(self) -> Sequence[str]:
        """End every VM of this run, and whatever was made beside them; called twice it changes nothing.

        Returns what VMs that are gone had left behind, in words, with its price.

        Raises:
            ProviderError: naming what is left; the rest is ended.
        """

    def price(self, node_type: str = "") -> Price | None:
        """Return the price of one VM, the dearest that may come, of this type if one is given; None: not known."""

    def capabilities(self) -> Capabilities:
        """Return what it can do."""


def vm_name(request: str, index: int) -> str:
    """Name the VM with this number of a request: the same one each time, fit for a host name."""
    return f"{request_part(request)}-{index}"


def request_part(request: str) -> str:
    """Return what the names of all VMs of a request begin with, before the last hyphen; it differs by request."""
    clean = re.sub(r"[^a-z0-9]+", "-", request.lower()).strip("-")
    if clean != request or len(clean) > NAME_CHARACTERS:
        digest = hashlib.sha256(request.encode()).hexdigest()[:8]
        clean = f"{clean[: NAME_CHARACTERS - 9].rstrip('-')}-{digest}".lstrip("-")
    return clean


PATIENCE_S = 900.0
"""How long it is tried: longer than providers ask to wait. A forgotten VM ends itself at about that time."""
RETRIES = Backoff(first_s=2.0, most_s=120.0)


def end_all(
    provider: Provider,
    *,
    told: Callable[[str], None] = lambda _sentence: None,
    patience_s: float = PATIENCE_S,
    pause: Callable[[float], object] | None = None,
    hurry: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Sequence[str]:
    """End every VM of a run and what was made beside them; blocks until they are gone, for about ``patience_s``.

    Returns what VMs that are gone had left behind.

    What the same call may mend is tried again, after the pause that the provider asks for or one that grows; the last
    time when the patience is over.

    Args:
        provider: Of the run.
        told: Hears what is left and when it is tried again.
        patience_s: In seconds.
        pause: Waits some seconds.
        hurry: Once it is set, the next try is the last one.
        clock: Seconds, never going back.

    Raises:
        ProviderError: naming what is left.
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
            told(f"{error}; again in {next_s:.3g} s")
        pause(next_s)
    raise AssertionError("pauses have no end")


# The name under which a run's VMs are known to their provider: new for each run directory, kept in it.


class RunName(Value):
    """Whose VMs they are. ``num_starts``: how often the run began anew, each time with VMs of its own."""

    schema_version: int = Field(default=1, ge=1, le=1)
    run: str = Field(pattern=r"^[a-z0-9-]+$")
    job: str
    num_starts: int = Field(default=0, ge=0)

    @property
    def requests(self) -> str:
        """What the names of requests begin with: no VM of an earlier start has one of these."""
        return f"{self.run}-{self.num_starts}"


def name_of(run_dir: Path, job: str) -> RunName:
    """Return the run's name, a new one if it has none; writes nothing.

    Raises:
        RunDirError: the file in the run directory is damaged.
    """
    path = run_dir / VMS
    if path.exists():
        return read_json(path, RunName, RunDirError)
    clean = vm_name(job, 0).rsplit("-", 1)[0][:24].strip("-")
    return RunName(run=f"{clean}-{secrets.token_hex(3)}", job=job)


def write_name(run_dir: Path, name: RunName) -> None:
    """Keep it.

    Raises:
        RunDirError: it cannot be written.
    """
    write_in_run_dir(run_dir / VMS, name.model_dump_json(indent=2) + "\n")

"""Code that the providers of clouds share, for tags of VMs, the order of sizes, prices, and the start of billing."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Generic, NamedTuple, TypeVar

from pydantic import Field

from manager.providers.interface.provider import (
    Granted,
    Misconfigured,
    Price,
    ProviderError,
    QuotaExceeded,
    Refused,
    Throttled,
    Transient,
    Vm,
    vm_name,
)
from morph.contract.base import Value
from morph.contract.cluster import NodeType, UsdPerHour
from morph.contract.pool import type_and_zone
from morph.contract.vm_names import MAX_DEVICES

RUN_TAG, JOB_TAG, REQUEST_TAG, DEVICES_TAG = "morph-run", "morph-job", "morph-request", "morph-devices"

TAG_CHARACTERS = 256
"""The number of characters that a tag's value may have on AWS and on Azure."""
CHIEF = (Misconfigured, Throttled, Transient, QuotaExceeded, Refused, ProviderError)
RETRY_S = 600.0
"""Seconds after which a price that the list did not have is looked up again."""
AGREE_S = 2.0
"""Clocks that differ by fewer seconds count as equal: HTTP dates have whole seconds, and answers take time."""
KeyT = TypeVar("KeyT")
FigureT = TypeVar("FigureT")


@dataclass(frozen=True)
class Bounds:
    """Limits (seconds): lists may omit new things for ``list_s``; ``poll_s`` between polls, unless a cloud says."""

    make_s: float = 600.0
    delete_s: float = 300.0
    list_s: float = 300.0
    poll_s: float = 5.0


class Finding(NamedTuple):
    """The result of one check before a run."""

    is_well: bool
    sentence: str


@dataclass(frozen=True)
class Identity:
    """The tags that mark a run's resources."""

    run: str
    job: str

    def owns(self, tags: Mapping[str, str] | None) -> bool:
        """Whether a resource with these tags belongs to the run."""
        return tags is not None and tags.get(RUN_TAG) == self.run and tags.get(JOB_TAG) == self.job

    def tags(self, request: str | None = None) -> dict[str, str]:
        """Return the tags of a resource of the run, with those of the request that it answers, if given."""
        return {RUN_TAG: self.run, JOB_TAG: self.job, **({} if request is None else {REQUEST_TAG: request})}


class Size(Value):
    """A kind of VM that may be used."""

    name: str
    num_gpus: int = Field(
        default=1, ge=0, le=MAX_DEVICES, description="those that Morph uses; 0: the processor, as one"
    )
    usd_per_h: UsdPerHour | None = Field(default=None, description="None: as listed by the cloud")
    node_type: NodeType | None = Field(
        default=None, description="type of its GPUs, by its name in the profile; None: all sizes are alike"
    )

    @property
    def num_devices(self) -> int:
        """The number of devices, each of which has a worker."""
        return max(1, self.num_gpus)

    def may_be_in(self, zone: str | None) -> bool:
        """Whether such a VM may be in a zone: a type that names its zone (``v100@us-east-1a``) is in no other."""
        return type_and_zone(self.node_type or "")[1] in ("", zone)


SizeT = TypeVar("SizeT", bound=Size)


def of_type(sizes: Iterable[SizeT], node_type: str) -> tuple[SizeT, ...]:
    """Return the sizes with GPUs of one type; empty: all."""
    return tuple(size for size in sizes if node_type in ("", size.node_type))


def check_types(sizes: Iterable[Size], zones: Collection[str], field: str) -> None:
    """Raise ValueError for GPU types that only some sizes have, and those in zones that the cloud file lacks."""
    types = {size.node_type for size in sizes}
    if None in types and len(types) > 1:
        raise ValueError(f"{field}: some have a node_type, others do not")
    for zone in {type_and_zone(name or "")[1] for name in types} - {"", *zones}:
        raise ValueError(f"{field}: no zone {zone}, which a node_type names; allowed: {', '.join(zones) or 'none'}")


def dearest(sizes: Iterable[SizeT], find: Callable[[SizeT], float | None], listed: str) -> Price | None:
    """Return the price of one hour of the most expensive size; None: some size's price is unknown.

    ``find``: the price of a size that has none in the file, from the source ``listed``; None: not known.
    """
    sizes = tuple(sizes)
    figures = [find(size) if size.usd_per_h is None else size.usd_per_h for size in sizes]
    known = [figure for figure in figures if figure is not None]
    if len(known) < len(figures):
        return None
    theirs = any(size.usd_per_h is None for size in sizes)
    return Price(usd_per_h=max(known), source=listed if theirs else "the cluster file")


def turns(sizes: Iterable[Size], count: int, max_vms: int) -> list[int]:
    """Return the numbers of devices per VM to try: fewest first, unless that takes over ``max_vms`` VMs."""
    known = sorted({size.num_devices for size in sizes})
    enough = [number for number in known if number * max_vms >= count]
    return enough + [number for number in reversed(known) if number not in enough]


def missing(request: str, known: Mapping[str, int], count: int, most: int, num_devices: int) -> list[tuple[int, str]]:
    """Return number and name of each VM that a request lacks; ``known``: devices by VM; ``most``: the limit on VMs."""
    num_vms = max(0, min(-(-(count - sum(known.values())) // num_devices), most - len(known)))
    free = ((index, name) for index in itertools.count() if (name := vm_name(request, index)) not in known)
    return list(itertools.islice(free, num_vms))


def outcome(
    request: str, made: Iterable[Vm], errors: Mapping[str, ProviderError], decisions: Sequence[str] = ()
) -> Granted:
    """Return a request's VMs, with the most important error as ``missing``; raise that error if none came.

    The most important are those that the user must mend, then those after which the request may get more.
    """
    granted = tuple(made)
    chief = min(
        errors.values(), key=lambda error: next(n for n, of in enumerate(CHIEF) if isinstance(error, of)), default=None
    )
    if not granted:
        raise chief or Transient(f"{request}: its VMs were made and are gone")
    return Granted(granted, chief, decisions)


def gone_at_once(names: Iterable[str]) -> dict[str, ProviderError]:
    """Return the errors of VMs that were made and are not there any more: they are missing, and were not refused."""
    return {name: Transient(f"VM {name} was made, and was gone at once") for name in names}


def larger(
    request: str, num_vms: int, sizes: Iterable[Size], num_devices: int, refused: Mapping[str, ProviderError]
) -> str:
    """Return the sentence on the choice of sizes with more devices, because those with fewer were refused."""
    names = " or ".join(size.name for size in sizes if size.num_devices == num_devices)
    return (
        f"{request}: {num_vms} of {names} with {num_devices} devices requested, because {next(iter(refused.values()))}"
    )


def priced(what: str, usd_per_h: float | None) -> str:
    """Return the name of a billed resource with its price."""
    cost = "its price is not known" if usd_per_h is None else f"{usd_per_h:.4f} dollars an hour"
    return f"{what}, {cost}"


class Remembered(Generic[KeyT, FigureT]):
    """A thread-safe cache of listed prices, each kept for ``keep_s``, and longer if the list has no newer one.

    ``find`` may block, and returns None if the list has none: it is looked up again after ``RETRY_S``.
    """

    def __init__(
        self,
        find: Callable[[KeyT], FigureT | None],
        keep_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find, self._keep_s, self._clock = find, keep_s, clock
        self._known: dict[KeyT, FigureT] = {}
        self._ask_at_s: dict[KeyT, float] = {}
        self._lock = threading.Lock()

    def __call__(self, key: KeyT) -> FigureT | None:
        """Return the price; None: not known. May block."""
        with self._lock:
            if self._clock() >= self._ask_at_s.get(key, float("-inf")):
                value = self._find(key)
                self._ask_at_s[key] = self._clock() + (RETRY_S if value is None else self._keep_s)
                if value is not None:
                    self._known[key] = value
            return self._known.get(key)


def paid_since_s(created: datetime | None, answered: str | None, now_s: float) -> float | None:
    """Return when a VM's billing began (seconds since 1970, by this machine's clock); None: not known.

    ``created`` and ``answered`` are by the cloud's clock, ``now_s`` is this machine's when the answer came.
    """
    if created is None:
        return None
    ahead_s = 0.0
    if answered is not None:
        try:
            ahead_s = parsedate_to_datetime(answered).timestamp() - now_s
        except ValueError:
            ahead_s = 0.0
    if abs(ahead_s) < AGREE_S:
        ahead_s = 0.0
    return min(created.timestamp() - ahead_s, now_s)

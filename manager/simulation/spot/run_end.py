"""The end of a simulated job: its bound, the prices of its VMs, and its outcome."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple

from pydantic import Field

from manager.accounting.account import TimeUse
from morph.contract.base import Value
from morph.contract.cluster import LocalVms, ProvidedVms
from morph.contract.errors import InputError

_FORM = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>h|d|usd|)")
_ALLOWED = "steps (100000), hours or days (48h, 2d), a date (2027-01-31T18:00) or dollars (300usd)"


class Until(Value):
    """The bound of a job: a number of steps, hours or dollars."""

    kind: Literal["steps", "hours", "usd"]
    amount: float = Field(gt=0)

    @classmethod
    def parse(cls, text: str, now: datetime) -> Until:
        """Read a user's bound. The job begins ``now``: a date, in the same time zone if it names none, becomes hours.

        Raises InputError if the text is not a bound; the error says what is allowed.
        """
        if "-" in text[1:]:
            try:
                date = datetime.fromisoformat(text.strip())
            except ValueError:
                raise InputError("is not a date", field="--until", value=text, allowed=_ALLOWED) from None
            if date.tzinfo is None:
                date = date.replace(tzinfo=now.tzinfo)
            if date <= now:
                raise InputError("is in the past", field="--until", value=text, allowed="a future date")
            return cls(kind="hours", amount=(date - now).total_seconds() / 3600)
        match = _FORM.fullmatch(text.strip().lower())
        amount = float(match["number"]) if match else 0.0
        if match is None or amount <= 0 or (not match["unit"] and not amount.is_integer()):
            raise InputError("is not a bound", field="--until", value=text, allowed=_ALLOWED)
        match match["unit"]:
            case "h":
                return cls(kind="hours", amount=amount)
            case "d":
                return cls(kind="hours", amount=24 * amount)
            case "usd":
                return cls(kind="usd", amount=amount)
            case _:
                return cls(kind="steps", amount=amount)

    @property
    def num_steps(self) -> int | None:
        """The steps, if they are the bound."""
        return round(self.amount) if self.kind == "steps" else None

    @property
    def end_s(self) -> float | None:
        """The seconds, if they are the bound."""
        return 3600 * self.amount if self.kind == "hours" else None


class SpotPrices(Value):
    """The dollars an hour of one VM."""

    spot_usd_per_h: float | None = Field(default=None, ge=0)
    on_demand_usd_per_h: float | None = Field(default=None, ge=0)


def most_vms(vms: LocalVms | ProvidedVms, usd_per_h: float | None, source: str, gpus_per_vm: int = 1) -> int | None:
    """Return how many VMs a cluster file requests at once, for its workers and within its limits; None: it does not
    say.

    ``source`` names the file in errors. Raises InputError if its limits allow no VM.
    """
    limits = vms.limits
    affordable = None if not usd_per_h or limits.usd_per_h is None else math.floor(limits.usd_per_h / usd_per_h)
    if affordable == 0:
        allowed = f"at least what one VM costs, {usd_per_h:g}"
        field, value = "vms.limits.usd_per_h", limits.usd_per_h
        raise InputError("allows no VM", source=source, field=field, value=value, allowed=allowed)
    keep = None if vms.keep is None else -(-vms.keep // gpus_per_vm)
    return min((bound for bound in (keep, limits.max_vms, affordable) if bound is not None), default=None)


class Moment(NamedTuple):
    """The state from ``time_s`` on: the number of VMs, the shape that trains (or "") and its examples/s."""

    time_s: float
    num_vms: int
    shape: str
    examples_per_s: float


@dataclass(frozen=True)
class PolicyOutcome:
    """One job under one policy on one trace.

    ``steps``: the steps whose result counts at the end. ``examples``: the samples in them; fewer than steps times the
    batch if a policy drops samples. ``lost_steps``: steps that were run and undone. ``parts_s``: worker-seconds by use;
    they add up to ``vm_s``. ``usd``: None without prices. ``finished``: whether all requested steps are done.
    ``gave_up``: when and why the controller ended the run early, in words; its time goes on without VMs.
    """

    policy: str
    trace: str
    seed: int
    hours: float
    steps: int
    examples: float
    lost_steps: int
    num_losses: int
    num_fatal: int
    num_changes: int
    vm_s: float
    parts_s: dict[TimeUse, float]
    usd: float | None
    finished: bool
    gave_up: str = ""
    moments: tuple[Moment, ...] = field(default=(), repr=False)

    @property
    def examples_per_s(self) -> float:
        """The average speed over the whole time."""
        return self.examples / (self.hours * 3600) if self.hours else 0.0

    @property
    def examples_per_usd(self) -> float | None:
        """The value of the training, as defined by Bamboo; None without prices."""
        return self.examples / self.usd if self.usd else None

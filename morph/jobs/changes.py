"""Finds changes in a job since its run began, except in its code: settings and data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from morph.contract.base import Value
from morph.contract.errors import JobError
from morph.contract.job_facts import JobFacts

_FIXED = re.compile(r"master_weights|micro_batch_size|num_sections|optimizer\([^)]*\)( groups| needs)?")
_UNIT = re.compile(r"^(optimizer|lr_scheduler)\(([^)]*)\)")


class Change(Value):
    """One change in a job since the run began: of a setting, or of an entry of its data."""

    what: Literal["setting", "data"]
    name: str
    now: str | int
    was: str | int

    def refusal(self, source: str) -> JobError:
        """Return the error that reports this change of a job."""
        message = f"is not the {self.what} that the run began with"
        return JobError(message, source=source, field=self.name, value=self.now, allowed=str(self.was))

    @property
    def cannot_apply(self) -> str | None:
        """Why the run cannot resume from its checkpoints with this change; None: it can."""
        if self.what == "data" or not _FIXED.fullmatch(self.name):
            return None
        if not self.name.endswith(" needs"):
            return "cannot be changed within a run"
        lacking = sorted(set(str(self.now).split(", ")) - {*str(self.was).split(", "), ""})
        names = ", ".join(map(repr, lacking))
        return f"cannot be met: the run's checkpoints do not hold {names} of the optimizer's state" if lacking else None


def told(accepted: Iterable[Change]) -> str:
    """Return a sentence on accepted changes; a change that parameter units share is named once."""
    units: dict[tuple[str, str | int, str | int], list[str]] = {}
    for change in accepted:
        unit = _UNIT.match(change.name)
        key = (_UNIT.sub(r"\1", change.name), change.now, change.was)
        if not change.name.endswith(" needs"):
            units.setdefault(key, []).extend(unit.groups()[1:] if unit else ())
    return "; ".join(
        f"{name}{' of ' + ', '.join(found) if found else ''}: {now} (was {was})"
        for (name, now, was), found in units.items()
    )


def changes(found: JobFacts, began: JobFacts) -> Iterator[Change]:
    """Yield every difference between a job as it was loaded here and the job with which a run began.

    Facts that ``began`` lacks are not compared, nor are settings that are missing here: other versions of torch may
    have more settings.
    """
    for name, was in began.settings.items():
        now = found.settings.get(name, was)
        if now != was:
            yield Change(what="setting", name=name, now=now, was=was)
    for name, had in began.data.items():
        has = found.data.get(name)
        if has is None:
            yield Change(what="data", name=name, now="none", was=f"{had.num_samples} samples")
        elif has.num_samples != had.num_samples:
            yield Change(what="data", name=f"len({name}())", now=has.num_samples, was=had.num_samples)
        else:
            if None not in (has.fingerprint, had.fingerprint) and has.fingerprint != had.fingerprint:
                name_of = f"{name}().fingerprint()"
                yield Change(what="data", name=name_of, now=str(has.fingerprint), was=str(had.fingerprint))
            for ours, theirs in zip(has.samples, had.samples, strict=True):
                for key in sorted(ours.entries.keys() | theirs.entries.keys()):
                    now, was = ours.entries.get(key, "absent"), theirs.entries.get(key, "absent")
                    if now != was:
                        yield Change(what="data", name=f"{name}()[{ours.index}][{key!r}]", now=now, was=was)
            num = has.most_compared(had)
            if has.rows.get(num) != had.rows.get(num):
                name_of = f"{name}(), {num} of its {has.num_samples} samples compared"
                yield Change(what="data", name=name_of, now=f"sha256 {has.rows[num]}", was=f"sha256 {had.rows[num]}")


def require_same(found: JobFacts, began: JobFacts, source: str) -> None:
    """Check that a job as it was ``found`` here is the job with which a run ``began``."""
    first = next(changes(found, began), None)
    if first is not None:
        raise first.refusal(source)

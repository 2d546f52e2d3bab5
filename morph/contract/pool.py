"""A pool: the number of GPUs of each type."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from morph.contract import ranges
from morph.contract.errors import PlanError


@dataclass(frozen=True, order=True)
class Pool:
    """Counts of GPUs by type: ``t4=4,v100=12``; or ``8`` if there is only one type.

    A type may name its zone, ``v100@us-east-1a=8``; see :func:`type_and_zone`. Required GPUs without a type may be of
    any type: ``8,t4=4`` fits in ``t4=12``. ``counts``: (type, count) in the order of the names, none of them 0; made by
    ``of``, ``parse`` and ``counting``. ``pool["t4"]`` is 0 if there is none. In JSON a pool is its text, also as a key
    of an object.
    """

    EXAMPLE: ClassVar[str] = "a number of GPUs, or numbers by type such as v100=12,t4=4"

    counts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, counts: Mapping[str, int] | int) -> Pool:
        """Make a pool from counts by type, or from one count without a type."""
        by_type = {"": counts} if isinstance(counts, int) else counts
        return cls(tuple(sorted((name, count) for name, count in by_type.items() if count)))

    @classmethod
    def counting(cls, types: Iterable[str]) -> Pool:
        """Make a pool from the types of its GPUs."""
        return cls.of(Counter(types))

    @classmethod
    def parse(cls, text: str, field: str = "pool", source: str | None = None) -> Pool:
        """Read a pool's text; types may be in any order."""
        counts: dict[str, int] = {}
        for part in text.split(","):
            name, equals, count = part.rpartition("=")
            name = name.strip()
            known = re.fullmatch(r"[0-9]{1,6}", count.strip())
            if known is None or bool(equals) != bool(name):
                raise PlanError("is not a pool", source=source, field=field, value=text, allowed=cls.EXAMPLE)
            if name in counts:
                twice = f"names {name or 'GPUs without a type'} twice"
                raise PlanError(twice, source=source, field=field, value=text, allowed="each type once")
            counts[name] = int(known[0])
        pool = cls.of(counts)
        if pool.num_gpus not in ranges.GPUS:
            allowed = f"{ranges.GPUS} in all"
            raise PlanError("is out of range", source=source, field=field, value=text, allowed=allowed)
        return pool

    @property
    def types(self) -> tuple[str, ...]:
        """The types in the pool, in the order of their names."""
        return tuple(name for name, _ in self.counts)

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones that the types name, in the order of their names; "" stands for types without a zone."""
        return tuple(sorted({type_and_zone(name)[1] for name in self.types}))

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of all types."""
        return sum(count for _, count in self.counts)

    def fits_in(self, other: Pool) -> bool:
        """Return whether the other pool has at least as many of each type and as many in all."""
        there = dict(other.counts)
        return self.num_gpus <= other.num_gpus and all(count <= there.get(name, 0) for name, count in self if name)

    def __getitem__(self, name: str) -> int:
        return next((count for known, count in self.counts if known == name), 0)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.counts)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __add__(self, other: Pool) -> Pool:
        return Pool.of(Counter(dict(self.counts)) + Counter(dict(other.counts)))

    def __sub__(self, other: Pool) -> Pool:
        """Return the difference; a type of which the other pool has more is left out."""
        return Pool.of(Counter(dict(self.counts)) - Counter(dict(other.counts)))

    def __str__(self) -> str:
        return ",".join(f"{name}={count}" if name else str(count) for name, count in self.counts) or "0"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._read,
            json_schema_input_schema=core_schema.str_schema(),
            serialization=core_schema.to_string_ser_schema(),
        )

    @classmethod
    def _read(cls, given: object) -> Pool:
        """Read a pool, its text, or a number of GPUs."""
        if isinstance(given, cls):
            return given
        if isinstance(given, bool) or not isinstance(given, int | str):
            raise ValueError(f"is not a pool: {cls.EXAMPLE}")
        try:
            return cls.parse(str(given))
        except PlanError as error:
            raise ValueError(str(error)) from error


def type_and_zone(name: str) -> tuple[str, str]:
    """Return the type of GPU and the zone in a name of a pool: ``v100`` and ``a`` of ``v100@a``. Both may be empty."""
    node_type, _, zone = name.partition("@")
    return node_type, zone


def several_types(types: Iterable[str]) -> str:
    """Return a sentence on the effect of several types of GPUs on a run; empty if there is only one, in any zones."""
    names = sorted({type_and_zone(name)[0] for name in types})
    if len(names) < 2:
        return ""
    return (
        f"GPUs of {len(names)} types ({', '.join(names)}) round differently: weights are equal to the bit only where "
        "one type does all the work"
    )

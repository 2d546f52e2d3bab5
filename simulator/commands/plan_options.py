"""The meaning of the options of ``morph plan`` and ``morph simulate``, and combinations that are refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from morph.cli.reading.errors import places
from morph.contract import ranges
from morph.contract.errors import PlanError
from morph.contract.pool import Pool, type_and_zone
from morph.yaml_files import SET
from simulator.commands.settings import Conditions

if TYPE_CHECKING:
    from morph.contract.profile import Profile
    from simulator import PlanRequest

_MOST_NUMBERS = 4096


def request_of(context: typer.Context, settings: Conditions) -> PlanRequest:
    """Return a request from the options and settings whose names are those of its fields.

    PlanError if the text of an option cannot be read.
    """
    from simulator import PlanRequest

    given = context.params | settings.model_dump(exclude_unset=True)
    read: dict[str, Any] = {
        "memory_bytes": memory_bytes_of(given.get("memory_gib")),
        "host_memory_bytes": memory_bytes_of(settings.host_memory_gib, "--set host_memory_gib"),
        "usd_per_gpu_hour": None if given.get("usd_per_gpu_hour") is None else price_of(given["usd_per_gpu_hour"]),
        "slow": slow_of(given.get("slow") or ()),
        "tolerance": None if given.get("tolerance_percent") is None else given["tolerance_percent"] / 100,
    }
    if given.get("nodes") is not None:
        read["num_gpus_per_node"] = node_list(given["nodes"])
    elif isinstance(given.get("num_gpus_per_node"), str):
        read["num_gpus_per_node"] = gpus_per_node_of(given["num_gpus_per_node"])
    known = {field.name: read.get(field.name, given.get(field.name)) for field in fields(PlanRequest)}
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in known.items()}
    return PlanRequest(**{name: value for name, value in plain.items() if value is not None})


def profile_to_plan(path: Path, node_type: str | None = None, pool: Pool | None = None) -> Profile:
    """Load a profile for planning on a type of node or a pool; warn about times that nobody measured."""
    from morph.contract.profile import estimates, load_profile
    from simulator.inputs.node_types import of_node_type

    profile = of_node_type(load_profile(path), node_type)
    for sentence in estimates(profile, () if pool is None else [type_and_zone(name)[0] for name in pool.types]):
        print(f"warning: {sentence}", file=sys.stderr)
    return profile


@contextmanager
def from_options(context: typer.Context, profile: Path, settings: Conditions) -> Iterator[None]:
    """Make errors name the option, the setting or the place in the profile that holds the refused value."""
    links = "inter_node, intra_node or all_reduce"
    names = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    names |= {name: f"{SET} {name}" for name in type(settings).model_fields}
    names |= {"num_gpus": "--gpus", "max_gpus": "--gpus", "memory_bytes": "--memory-gib"}
    names |= {"host_memory_bytes": f"{SET} host_memory_gib"}
    names |= {"batch_size": "job.batch_size", links: links}
    if context.params["micro_batch_size"] is None:
        names["micro_batch_size"] = "job.micro_batch_size"
    with places({str(field): (str(profile), name) for field, name in names.items()}):
        yield


def in_plan_file(plan: Path) -> dict[str, tuple[str, str]]:
    """Return, for ``places``, where a plan file holds each value with which a profile must agree."""
    names = ("fingerprint", "micro_batch_size", "num_micro_batches")
    return {name: (str(plan), name) for name in names} | {"pool": (str(plan), "stages.node_type")}


def given_options(context: typer.Context, settings: Conditions) -> dict[str, Any]:
    """Return the options and settings of the command line, by the names that they have there."""
    sources = {each: context.get_parameter_source(each.name or "") for each in context.command.params}
    chosen = {f"{SET} {name}": value for name, value in settings.model_dump(exclude_unset=True).items()}
    return chosen | {
        each.opts[0]: context.params[each.name or ""]
        for each, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def refuse_together(given: Mapping[str, object], option: str, others: Sequence[str], why: str) -> None:
    """Refuse options that contradict each other.

    ``given``: every option that was given, with its value. ``option``: an option with which none of the others may be
    given. ``others``: the other options. ``why``: the contradiction in a few words. PlanError if one of the others is
    given; the error names both.
    """
    clash = [name for name in others if name in given]
    if option in given and clash:
        raise PlanError(f"cannot be combined with {clash[0]}: {why}", field=option, value=_shown(given[option]))


def require(given: Mapping[str, object], option: str, needed: str) -> None:
    """Refuse an option without another option that it needs.

    PlanError if the other option is missing; the error names both.
    """
    if option in given and needed not in given:
        raise PlanError(f"needs {needed}", field=option, value=_shown(given[option]))


def _shown(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def gpu_range(text: str) -> range:
    """Parse ``6`` or ``16..128``; PlanError if the text is neither."""
    match = re.fullmatch(r"(-?\d{1,9})(?:\.\.(-?\d{1,9}))?", text.strip())
    if not match:
        raise PlanError(
            "is not a number of GPUs", field="--gpus", value=text, allowed="a number, or a range as 16..128"
        )
    first = int(match[1])
    if match[2] is None:
        if first > ranges.GPUS.high:
            ranges.GPUS.check("--gpus", first)
        return range(first, first + 1)
    last = int(match[2])
    if not 1 <= first <= last <= ranges.GPUS.high or last - first >= _MOST_NUMBERS:
        allowed = f"FIRST..LAST with 1 <= FIRST <= LAST <= {ranges.GPUS.high}, at most {_MOST_NUMBERS} numbers"
        raise PlanError("is not a range of GPUs", field="--gpus", value=text, allowed=allowed)
    return range(first, last + 1)


def node_list(text: str) -> tuple[int, ...]:
    """Return the GPUs of each node: ``16x1,4x4`` are 16 nodes with 1 GPU and 4 nodes with 4.

    PlanError if the text is anything else.
    """
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*x\s*(\d{1,4})\s*", part)
        number, size = (int(match[1]), int(match[2])) if match else (0, 0)
        if number < 1 or size < 1 or sum(sizes) + number * size not in ranges.GPUS:
            allowed = "NODESxGPUS, separated by commas, as 16x1,4x4 (16 nodes with 1 GPU, 4 with 4)"
            raise PlanError("is not a list of nodes", field="--nodes", value=text, allowed=allowed)
        sizes += [size] * number
    return tuple(sizes)


def gpus_per_node_of(text: str) -> int | dict[str, int]:
    """Parse ``4``, the GPUs of every node, or ``v100=4,t4=1``, the GPUs of each node by type.

    PlanError if the text is neither.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (each.strip() for each in part.rpartition("="))
        if re.fullmatch(r"-?[0-9]+", size) is None or name in sizes or ("" in sizes) or (sizes and not name):
            allowed = "a number, or a number for each type of the pool, such as v100=4,t4=1"
            raise PlanError("is not a number of GPUs", field="--gpus-per-node", value=text, allowed=allowed)
        ranges.GPUS.check("--gpus-per-node", int(size))
        sizes[name] = int(size)
    return sizes.get("", sizes)


def price_of(text: str) -> float | dict[int, float] | dict[str, float]:
    """Parse dollars per GPU-hour: ``0.9``, or by GPUs per node ``1:0.9,4:0.75``, or by type ``v100=0.9,t4=0.16``.

    PlanError if the text is none of them.
    """
    allowed = "dollars per GPU-hour, as 0.9, by GPUs per node, as 1:0.9,4:0.75, or by type, as v100=0.9,t4=0.16"
    if "=" in text:
        return _prices_of_types(text, allowed)
    prices: dict[int, float] = {}
    try:
        if ":" not in text:
            prices[0] = float(text)
        else:
            for part in text.split(","):
                size, price = part.split(":")
                if int(size) in prices or int(size) not in ranges.GPUS:
                    raise PlanError(
                        "gives a size twice, or a size that is out of range",
                        field="--price",
                        value=text,
                        allowed=allowed,
                    )
                prices[int(size)] = float(price)
    except ValueError:
        raise PlanError("is not a price", field="--price", value=text, allowed=allowed) from None
    if not all(price > 0 and price in ranges.USD_PER_HOUR for price in prices.values()):
        raise PlanError("is not a price", field="--price", value=text, allowed=allowed)
    return prices[0] if 0 in prices and len(prices) == 1 else prices


def _prices_of_types(text: str, allowed: str) -> dict[str, float]:
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, _, price = part.partition("=")
        known = re.fullmatch(r"[0-9]*\.?[0-9]+", price.strip())
        if not name.strip() or known is None or name.strip() in prices or float(price) not in ranges.USD_PER_HOUR:
            raise PlanError("is not a price of each type", field="--price", value=text, allowed=allowed)
        prices[name.strip()] = float(price)
    return prices


def slow_of(texts: Sequence[str]) -> dict[int | tuple[int, int], float]:
    """Parse ``2:1.3`` (stage 2 of every replica) and ``2/0:1.3`` (stage 2 of replica 0).

    PlanError if a text is anything else.
    """
    slow: dict[int | tuple[int, int], float] = {}
    for text in texts:
        match = re.fullmatch(r"(\d{1,6})(?:/(\d{1,6}))?:(\d+(?:\.\d*)?|\.\d+)", text.strip())
        allowed = f"STAGE:FACTOR or STAGE/REPLICA:FACTOR, such as 2:1.3, each worker once; FACTOR {ranges.FACTOR}"
        if not match or float(match[3]) not in ranges.FACTOR:
            raise PlanError("is not a slow worker", field="--slow", value=text, allowed=allowed)
        where = int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))
        if where in slow:
            raise PlanError("is given twice", field="--slow", value=text, allowed=allowed)
        slow[where] = float(match[3])
    return slow


def memory_bytes_of(memory_gib: float | None, option: str = "--memory-gib") -> int | None:
    """Convert GiB to bytes; PlanError if the value is not a size."""
    if memory_gib is None:
        return None
    ranges.MEMORY_GIB.check(option, memory_gib)
    return max(1, int(memory_gib * 2**30))

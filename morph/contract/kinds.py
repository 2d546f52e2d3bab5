"""Kinds of files that a user gives to commands: how each is recognised, and which command writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

_TOP_LEVEL_KEY = re.compile(r'^"?(\w+)"?[ \t]*:', re.MULTILINE)
_JOB = re.compile(r"\.py:\w+(\(.*\))?$")


@dataclass(frozen=True)
class Kind:
    """A kind of file. ``keys``: a file with any of them, and with none of an earlier kind, is of this kind.

    ``what``: its name in an error about a file in the wrong place; ``wanted``: what is allowed where it should be.
    """

    what: str
    wanted: str
    keys: frozenset[str]


PROFILE = Kind(
    "a profile", "a JSON file that `morph calibrate JOB -o FILE` wrote", frozenset({"sections", "environment"})
)
PLAN = Kind("a plan", "a file that `morph plan PROFILE -o FILE` wrote", frozenset({"orders", "num_micro_batches"}))
MODEL = Kind(
    "a model of spot traces",
    "a file that `morph trace generate --save-model FILE` wrote",
    frozenset({"together", "noticed"}),
)
_RUN = Kind("a file of a run", "", frozenset({"fingerprint"}))
JOB_FILE = Kind("a job file of `morph run`", "a job file, such as configs/runs/tiny_gpt.yaml", frozenset({"job"}))
_CLOUD_KEYS = frozenset({"subscription_id", "resource_group", "location", "region", "subnets", "partition"})
CLOUD = Kind("a cloud file, which `morph cloud dry-run` checks", "a cloud file, as in configs/clouds", _CLOUD_KEYS)
_HOSTS = Kind("a file of hosts, which a cluster file names as vms.cloud", CLOUD.wanted, frozenset({"hosts"}))
_SPOT_JOB = Kind("a job file of `morph spot-run`", "a job file of `morph spot-run`", frozenset({"storage"}))
CLUSTER = Kind(
    "a cluster file", "a cluster file, such as configs/clusters/local.yaml", frozenset({"vms", "policy", "samples"})
)
TRACE = Kind("a spot trace", "a trace, as `morph trace generate -o FILE` writes one", frozenset())
_KINDS = (PROFILE, PLAN, MODEL, _RUN, JOB_FILE, CLOUD, _HOSTS, _SPOT_JOB, CLUSTER)


def kind_of(keys: Iterable[str]) -> Kind | None:
    """Return the kind of a file with these keys, or of one whose value has these fields; None if it is unknown."""
    given = set(keys)
    return next((kind for kind in _KINDS if kind.keys & given), None)


def kind_in(text: str) -> Kind | None:
    """Return the kind of a file with this text, which may be JSON, YAML or CSV; None if it is unknown."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        header = text.partition("\n")[0].strip().split(",")
        return TRACE if "time_s" in header else kind_of(_TOP_LEVEL_KEY.findall(text))
    return kind_of(data) if isinstance(data, dict) else None


def mistaken(given: Path, otherwise: str) -> str:
    """Return what is wrong with a path that a user gave: what it is, as far as that is known, else ``otherwise``.

    A similar name beside a missing file is added, because the name may be misspelt.
    """
    if _JOB.search(given.name) and not given.exists():
        return "is a job"
    if given.is_dir():
        return "is the folder of a run" if (given / "run.json").is_file() else "is a folder"
    try:
        if given.suffix == ".py" and given.exists():
            return "is Python code"
        kind = kind_in(given.read_text(encoding="utf-8-sig"))
    except OSError:
        beside = given.parent.iterdir() if not given.exists() and given.parent.is_dir() else ()
        near = get_close_matches(given.name, [path.name for path in beside], 1, 0.8)
        return otherwise + (f" (is {given.with_name(near[0])} meant?)" if near else "")
    except UnicodeDecodeError:
        return otherwise
    return otherwise if kind is None else f"is {kind.what}"

"""Keeps the result of each comparison with a plain model, in one file per job, code and version of torch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import morph
from morph.cutting import CutModel, ExportedJob
from morph.cutting.exporting.exported_job import GraphJob, MarkedJob
from morph.cutting.exporting.user_functions import UserFunction
from morph.jobs.files import file_of
from morph.jobs.job import Job
from morph.preflight.plain_comparison import Comparison, Limits, compare_with_plain
from morph.runtime.workloads.job_workload import settings
from morph.user_cache import cache_folder, keep, read_kept

_FOLDER = "agreements"


def compare_once(job: Job, exported: ExportedJob, model: CutModel, limits: Limits) -> Comparison:
    """Return the result, and compare only if this user has not done so: see ``morph.preflight.plain_comparison``."""
    folder = cache_folder()
    key = comparison_key(job, exported, model.fingerprint, limits.device, settings(job, model))
    kept = cached_comparison(folder, key)
    if kept is not None:
        return kept
    comparison = compare_with_plain(job, exported, len(model.sections), limits)
    all_was_tried = limits.steps and limits.shorten
    is_complete = comparison.num_steps and (job.own_program is None or comparison.with_program)
    if comparison.how != "none" and (is_complete or all_was_tried):  # a result that others may improve is not kept
        cache_comparison(folder, key, comparison)
    return comparison


def comparison_key(
    job: Job, exported: ExportedJob, fingerprint: str, device: torch.device, settings: Mapping[str, str]
) -> str:
    """Return a key of the cut model, its training settings, the code behind it, and the software that runs it."""
    lines = [fingerprint, torch.__version__, morph.__version__, platform.python_version(), device.type]
    lines += sorted(f"{name} {value}" for name, value in settings.items())
    names = set(_module_names(job, exported))
    packages = {name.partition(".")[0] for name in names}
    lines += sorted(f"{name} {getattr(sys.modules.get(name), '__version__', None)}" for name in packages)
    files = {_file_of(sys.modules.get(name)) for name in names} - {None}
    folder = _file_of(sys.modules.get(_defined(job.loss).__module__))
    if folder is not None:
        near = folder.parent.name  # making a path for each of thousands of modules takes longest
        loaded = [_file_of(module) for module in list(sys.modules.values()) if near in (file_of(module) or "")]
        files |= {file for file in loaded if file is not None and file.is_relative_to(folder.parent)}
    digests = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file is not None)
    return hashlib.sha256("\n".join(lines + digests).encode()).hexdigest()


def cached_comparison(folder: Path, key: str) -> Comparison | None:
    """Return the result in the user's cache; None if there is none, or it cannot be read."""
    content = read_kept(folder / _FOLDER, key)
    with contextlib.suppress(ValueError, TypeError):
        return Comparison(**json.loads(content)) if content is not None else None
    return None


def cache_comparison(folder: Path, key: str, comparison: Comparison) -> None:
    """Write a result to the user's cache; see ``user_cache.keep``."""
    keep(folder / _FOLDER, key, json.dumps(asdict(comparison)).encode())


def _module_names(job: Job, exported: ExportedJob) -> Iterator[str]:
    for thing in (job.model, job.loss, job.dataset, job.optimizer):
        yield _defined(thing).__module__
    if isinstance(exported, MarkedJob):
        yield from (type(module).__module__ for module in exported.whole.modules())
    if isinstance(exported, GraphJob):
        for node in exported.graph_module.graph.nodes:
            if isinstance(node.target, UserFunction):
                yield node.target.function.__module__
            for _, kind in (node.meta.get("nn_module_stack") or {}).values():
                yield kind.rpartition(".")[0] if isinstance(kind, str) else kind.__module__


def _defined(thing: Any) -> Any:
    return _defined(thing.func) if isinstance(thing, functools.partial) else thing


def _file_of(module: Any) -> Path | None:
    file = getattr(module, "__file__", None)
    path = Path(file) if isinstance(file, str) else None
    return path if path is not None and path.is_file() else None

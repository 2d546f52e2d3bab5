"""Finds the line of the user's code to which an exception refers."""

from __future__ import annotations

import functools
import inspect
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from morph.jobs.job import Job

SLICE = re.compile(r"\.?slice\([^)]*\)")  # from a model that iterates over a slice of a list of modules
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_OUR_FOLDER = f"{Path(__file__).parents[2]}/"
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def user_line(error: BaseException, job: Job, model: nn.Module | None) -> str | None:
    """Return ``file:line`` of the deepest frame in the job's or the model's files, or None without such a frame."""
    files = user_files(job, model)
    for link in _chain(error):
        frames = [frame for frame in traceback.extract_tb(link.__traceback__) if frame.filename in files]
        if frames:
            return f"{frames[-1].filename}:{frames[-1].lineno}"
    return None


def node_line(node: Node) -> str | None:
    """Return the innermost ``file:line`` of the node's recorded stack outside torch and Morph; None without one."""
    lines = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")
    ]
    outside = [line for line in lines if not line.startswith((f'File "{_TORCH_FOLDER}', f'File "{_OUR_FOLDER}'))]
    if not outside:
        return None
    _, file, rest = outside[-1].split('"', 2)
    return f"{file}:{rest.split('line ')[1].split(',')[0]}"


def module_paths(node: Node) -> tuple[str, ...]:
    """Return the paths, in the user's model, of the modules that contain the node, from the outermost inwards."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = (SLICE.sub("", path).removeprefix("model").removeprefix(".") for path, _ in stack.values())
    return tuple(path for path in paths if path)


@functools.cache
def is_users(file: str) -> bool:
    """Whether code in a file may belong to the user, or to a library of models."""
    if file.startswith(("<", _TORCH_FOLDER, _OUR_FOLDER)):
        return False
    return "site-packages" in file or not file.startswith(_STANDARD_LIBRARY)


def calling_line(packages: Sequence[str] = ()) -> str | None:
    """Return ``file:line`` of the user's code that is running, outside some packages (``name.``)."""
    folders = tuple(f"/site-packages/{package.rstrip('.')}/" for package in packages)
    frames = [
        frame
        for frame in traceback.extract_stack()
        if is_users(frame.filename) and not any(folder in frame.filename for folder in folders)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def definition_line(thing: Any) -> str:
    """Return ``file:line`` where a function or class is defined; its repr if that is unknown."""
    target = inspect.unwrap(thing.func) if isinstance(thing, functools.partial) else inspect.unwrap(thing)
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return repr(thing)


def model_line(job: Job, model: nn.Module) -> str:
    """Return where the model's class is defined, or where the job builds it if the class is torch's own."""
    line = definition_line(type(model))
    return definition_line(job.model) if line.startswith(_TORCH_FOLDER) else line


def forward_line(job: Job, model: nn.Module) -> str:
    """Return where the model's forward is defined, or where the job builds it if its class is torch's own."""
    line = definition_line(type(model).forward)
    return definition_line(job.model) if line.startswith(_TORCH_FOLDER) else line


def user_files(job: Job, model: nn.Module | None) -> set[str]:
    """Return the files, outside torch and Morph, that define the job's functions and the model's modules."""
    things: list[Any] = [job.model, job.loss, job.dataset, job.optimizer]
    if model is not None:
        things.extend({type(module) for module in model.modules()})
    files: set[str] = set()
    for thing in things:
        target = thing.func if isinstance(thing, functools.partial) else thing
        try:
            file = inspect.getsourcefile(inspect.unwrap(target))
        except (OSError, TypeError):
            continue
        if file is not None and is_users(file):
            files.add(file)
    return files


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__

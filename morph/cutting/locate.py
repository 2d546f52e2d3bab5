"""Find the line of the user's code that an exception is about."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from morph.job import Job

_TORCH_FOLDER = str(Path(torch.__file__).parent)


def user_line(error: BaseException, job: Job, model: nn.Module | None) -> str | None:
    """Return ``file:line`` of the deepest frame in the job's or the model's files, or None when no frame is there."""
    files = _user_files(job, model)
    for link in _chain(error):
        frames = [frame for frame in traceback.extract_tb(link.__traceback__) if frame.filename in files]
        if frames:
            return f"{frames[-1].filename}:{frames[-1].lineno}"
    return None


def definition_line(thing: Any) -> str:
    """Return ``file:line`` where a function or class is defined; its repr when that is unknown."""
    target = inspect.unwrap(thing.func) if isinstance(thing, functools.partial) else inspect.unwrap(thing)
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return repr(thing)


def _user_files(job: Job, model: nn.Module | None) -> set[str]:
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
        if file is not None and not file.startswith(_TORCH_FOLDER):
            files.add(file)
    return files


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__

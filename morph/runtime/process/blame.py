"""The meaning of a worker's error for the run, and its origin in the user's code."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path
from types import TracebackType

import torch
from torch.fx import GraphModule

import morph
from morph.contract.errors import CheckpointError, JobError, MorphError
from morph.contract.messages import Failed, FailureCause

MAX_TEXT = 8000
_MORPH, _TORCH = (str(Path(package.__file__ or "").parent) for package in (morph, torch))
_GRAPH = "<eval_with_key>"
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_DEVICE = re.compile(r"\bCUDA (error|driver error)|\b(CUBLAS|CUDNN|CUSOLVER|NCCL)[A-Z_ ]*(STATUS|error)", re.IGNORECASE)


def failed(worker: str, generation: int, error: Exception, folders: tuple[str, str]) -> Failed:
    """Return the report to the manager. ``folders``: the folder of the job's files here, and the user's folder."""
    text = str(error) if isinstance(error, MorphError) else f"{type(error).__name__}: {error}"
    return Failed(
        worker=worker,
        generation=generation,
        error=text.replace(*folders),
        detail=type(error).__name__,
        cause=cause_of(error),
        traceback=user_traceback(error).replace(*folders),
    )


def cause_of(error: BaseException) -> FailureCause:
    """Return the cause: see ``Failed``. Errors that neither Morph nor the device raised come from the job."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "memory"
    if isinstance(error, CheckpointError):
        return "checkpoint"
    if isinstance(error, MorphError):
        return "job" if isinstance(error, JobError) else "run"
    if isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)):
        return "memory"
    if isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and _DEVICE.search(str(error))):
        return "device"
    return "job"


def user_traceback(error: BaseException) -> str:
    """Return the traceback from the user's first line on, without Morph's own frames; empty if there is none."""
    frames = _frames(error.__traceback__)
    first = next((index for index, frame in enumerate(frames) if not _is_inside(frame, _TORCH)), None)
    if first is None:
        return ""
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames[first:])]
    lines += traceback.format_exception_only(type(error), error)
    return "".join(lines)[-MAX_TEXT:]


def _frames(link: TracebackType | None) -> list[traceback.FrameSummary]:
    frames: list[traceback.FrameSummary] = []
    while link is not None:
        code = link.tb_frame.f_code
        if code.co_filename.startswith(_GRAPH):
            frames += _traced_from(link)
        else:
            frames.append(traceback.FrameSummary(code.co_filename, link.tb_lineno, code.co_name))
        link = link.tb_next
    return [frame for frame in frames if not _is_inside(frame, _MORPH)]


def _traced_from(link: TracebackType) -> list[traceback.FrameSummary]:
    """Return the source lines of a line in a graph's code."""
    module = link.tb_frame.f_locals.get("self")
    line = linecache.getline(link.tb_frame.f_code.co_filename, link.tb_lineno)
    name = line.strip().partition(" = ")[0]
    if not isinstance(module, GraphModule):
        return []
    node = next((node for node in module.graph.nodes if node.name == name), None)
    stack = str(node.meta.get("stack_trace") or "") if node is not None else ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', stack)
    return [traceback.FrameSummary(file, int(number), function) for file, number, function in frames]


def _is_inside(frame: traceback.FrameSummary, folder: str) -> bool:
    return frame.filename.startswith((folder + "/", "<"))

"""Compiles sections with torch.compile: once for each kind of section, and to the same kernels in every worker.

A section is compiled with its backward, as it is run, so every shape computes the same; with deterministic algorithms
Inductor chooses no kernels by timing them. Compiled code is kept in the user's cache folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule

from morph.contract.errors import MorphError, wrong_job
from morph.cutting.exporting.user_functions import UserFunction
from morph.cutting.sections.section import BoundaryTensor, CutModel, Section, SectionCode
from morph.jobs.job import Precision
from morph.runtime.step.stage import run_section, section_backward
from morph.user_cache import cache_folder

_FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_FOLDER = "compiled"
_SHOWN = 300
Compiled = dict[tuple[object, ...], SectionCode]


def compiled(model: CutModel) -> CutModel:
    """Return a cut model whose sections are compiled when first run; those with the user's own backward are not."""
    refuse_marked(model)
    _prepare()
    shared: Compiled = {}

    def change(model: CutModel) -> CutModel:
        kept = (
            replace(section, finish=partial(_finished, shared, section), _on_device={}) for section in model.sections
        )
        return replace(model, sections=tuple(kept))

    return model.mapped(change)


def refuse_marked(model: CutModel) -> None:
    """Raise JobError unless all sections are graphs."""
    if not all(isinstance(section.code, GraphModule) for section in model.sections):
        allowed = "False for a model that is cut at marks, or not cut, because torch.export refuses it"
        raise wrong_job("compile", "is not possible", True, allowed)


def compile_all(
    model: CutModel,
    load_batch: Callable[[Sequence[str]], Mapping[str, Tensor]],
    precision: Precision,
    device: torch.device,
) -> None:
    """Compile one section of each kind, by running it on zeros; ``load_batch``: entries of a micro-batch, by keys."""
    for section in {_kind(section, device): section for section in reversed(model.sections)}.values():
        tensors: dict[str, Tensor] = {}
        for name in (*section.parameters, *section.buffers):
            shape, dtype = model.specs[name]
            tensors[name] = torch.zeros(shape, dtype=dtype, device=device, requires_grad=name in section.parameters)
        try:
            inputs = [_zeros(spec, device) for spec in section.inputs]
            run = run_section(section, inputs, load_batch(section.batch_keys), tensors, precision)
            gradients = [_zeros(spec, device) if spec.requires_grad else None for spec in section.outputs]
            section_backward(section, run, gradients, tensors, lambda _name, _gradient: None)
        except (MorphError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            cause = " ".join(str(error).split())[:_SHOWN]
            raise wrong_job(
                "compile", f"section {section.index} ({section.label}) cannot be compiled: {cause}", True, "False"
            ) from error


def _prepare() -> None:
    """Set the folder of Inductor's code; keep Inductor from starting processes, which might outlive a lost worker."""
    import torch._inductor.config as inductor
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(_FOLDER_VARIABLE) in {None, default_cache_dir()}:  # torch sets this value itself
        folder = cache_folder() / _FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[_FOLDER_VARIABLE] = str(folder)
    inductor.compile_threads = 1
    inductor.max_autotune = False
    if torch.are_deterministic_algorithms_enabled():
        # Inductor learns of this only in torch.use_deterministic_algorithms, which would load all of Inductor
        if hasattr(inductor, "deterministic"):
            inductor.deterministic = True
        else:  # torch 2.9, in which this is the only choice by timing
            inductor.shape_padding = False


def _finished(shared: Compiled, section: Section, code: SectionCode, device: torch.device) -> SectionCode:
    assert isinstance(code, GraphModule)
    if any(isinstance(node.target, UserFunction) for node in code.graph.nodes):
        return code
    made: SectionCode = torch.compile(code, fullgraph=True, dynamic=False)
    if any(True for _ in code.children()):  # a nested graph, which the signature of the section does not cover
        return made
    return shared.setdefault(_kind(section, device), made)


def _kind(section: Section, device: torch.device) -> tuple[object, ...]:
    gradients = tuple(spec.requires_grad for spec in section.inputs)
    return section.signature, gradients, len(section.parameters), len(section.buffers), device


def _zeros(spec: BoundaryTensor, device: torch.device) -> Tensor:
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)

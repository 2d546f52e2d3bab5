"""Runs one stage's sections in order, and keeps the tensors for the backward of each micro-batch in flight.

Its random numbers depend only on (job seed, step, micro-batch, section), never on the shape."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from morph.cutting.sections.section import CutModel, Section
from morph.data.lengths import Size
from morph.jobs.job import Precision
from morph.runtime.step.section_run import (
    GradientSink,
    SectionRun,
    borders_may_lack_gradients,
    run_section,
    section_backward,
)

LoadBatch = Callable[[int, Sequence[str]], Mapping[str, Tensor]]


class StageTasks(Protocol):
    """The executor's interface of a stage: see ``Stage``."""

    @property
    def num_stored(self) -> int:
        """Micro-batches for which only the stage's input is kept."""

    @property
    def num_live(self) -> int:
        """Micro-batches whose graphs are kept for the backward."""

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the forward of one micro-batch; returns the stage's outputs, detached."""

    def recompute(self, micro_batch: int) -> None:
        """Run the forward again from the stored input, keeping the graphs for the backward."""

    def backward(
        self, micro_batch: int, output_gradients: Sequence[Tensor | None], sink: GradientSink
    ) -> tuple[Tensor | None, ...]:
        """Run the backward of one micro-batch; returns the gradients of the stage's inputs."""


class Stage:
    """Runs tasks of one stage in one step.

    With ``recompute``, only the stage's input is kept between forward and backward. ``live_sections`` is then the
    number of sections whose graphs are held at once (None: all): the inputs of each group of this many sections,
    counted from the end, are kept, and a group is recomputed before its backward. ``parameters`` are read at every run.
    ``load_batch`` returns the batch entries of a micro-batch, by global number and keys.
    """

    def __init__(
        self,
        model: CutModel,
        sections: range,
        *,
        recompute: bool,
        parameters: Mapping[str, Tensor],
        load_batch: LoadBatch,
        seed: int,
        step: int,
        precision: Precision = "fp32",
        live_sections: int | None = None,
    ) -> None:
        self._model = model
        self.size_of: Callable[[int], Size] = lambda _: (None, model.micro_batch_size)
        """Length and number of samples of each micro-batch, by number, if they vary."""
        self._sections = sections
        self._groups = _groups(sections, live_sections if recompute and live_sections else len(sections))
        self._recompute = recompute
        self._parameters = parameters
        self._load_batch = load_batch
        self._seed = seed
        self._step = step
        self._precision = precision
        self._may_lack = borders_may_lack_gradients(model)
        self._stored: dict[int, list[tuple[Tensor, ...]]] = {}
        self._behind: dict[int, list[tuple[Tensor, ...]]] = {}
        """Inputs of the earlier groups, for micro-batches whose last group was recomputed."""
        self._runs: dict[int, list[SectionRun]] = {}

    @property
    def num_stored(self) -> int:
        """Micro-batches for which only the stage's input is kept."""
        return len(self._stored)

    @property
    def num_live(self) -> int:
        """Micro-batches whose graphs are kept for the backward."""
        return len(self._runs)

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the forward of one micro-batch; returns the stage's outputs, detached."""
        if not self._recompute:
            runs = self._runs[micro_batch] = self._run(self._sections, micro_batch, inputs)
            return _detached(runs[-1])
        values, stored = tuple(inputs), []
        for group in self._groups:
            stored.append(values)
            for section in self._of(group, micro_batch):
                values = _detached(self._run_one(section, micro_batch, values))  # the section's graph is dropped here
        self._stored[micro_batch] = stored
        return values

    def recompute(self, micro_batch: int) -> None:
        """Run the forward again from the stored input, keeping the graphs of the last group for the backward."""
        stored = self._stored.pop(micro_batch)
        self._runs[micro_batch] = self._run(self._groups[-1], micro_batch, stored.pop())
        self._behind[micro_batch] = stored

    def backward(
        self, micro_batch: int, output_gradients: Sequence[Tensor | None], sink: GradientSink
    ) -> tuple[Tensor | None, ...]:
        """Run the backward of one micro-batch; returns the gradients of the stage's inputs."""
        gradients = tuple(output_gradients)
        runs, behind = self._runs.pop(micro_batch), self._behind.pop(micro_batch, [])
        for group in reversed(self._groups):
            runs = runs or self._run(group, micro_batch, behind.pop())
            for section in reversed(self._of(group, micro_batch)):
                run, add_here = runs.pop(), partial(sink.add, section.index)
                gradients = section_backward(section, run, gradients, self._parameters, add_here)
                if not self._may_lack:
                    gradients = _filled(gradients, run.inputs)
                sink.done(section.index)
                del run  # drop its graph before another group's is made
        return gradients

    def _of(self, group: range, micro_batch: int) -> tuple[Section, ...]:
        sections = self._model.at(*self.size_of(micro_batch)).sections
        return tuple(sections[index] for index in group)

    def _run(self, group: range, micro_batch: int, inputs: Sequence[Tensor]) -> list[SectionRun]:
        runs: list[SectionRun] = []
        values = tuple(inputs)
        for section in self._of(group, micro_batch):
            runs.append(self._run_one(section, micro_batch, values))
            values = runs[-1].outputs
        return runs

    def _run_one(self, section: Section, micro_batch: int, values: Sequence[Tensor]) -> SectionRun:
        batch = self._load_batch(micro_batch, section.batch_keys) if section.batch_keys else {}
        seed_section(self._seed, self._step, micro_batch, section.index)
        return run_section(section, values, batch, self._parameters, self._precision)


def _filled(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return zeros for absent gradients, as in messages between stages if no gradient may be absent."""
    return tuple(
        torch.zeros_like(tensor) if gradient is None and tensor.requires_grad else gradient
        for gradient, tensor in zip(gradients, inputs, strict=True)
    )


def _detached(run: SectionRun) -> tuple[Tensor, ...]:
    return tuple(output.detach() for output in run.outputs)


def _groups(sections: range, size: int) -> list[range]:
    """Split sections into groups of ``size``; the first may be smaller."""
    first = len(sections) % size or size
    return [sections[:first], *(sections[start : start + size] for start in range(first, len(sections), size))]


def stream_seed(seed: int, step: int, micro_batch: int, section: int) -> int:
    """Return a 63-bit seed for one section's run on one micro-batch."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}/{section}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_section(seed: int, step: int, micro_batch: int, section: int) -> None:
    """Set torch's generators before a section runs, in the forward pass and in the recompute alike.

    ``torch.manual_seed`` is not used: for each unused kind of device it stores the call, with its stack, until that
    device is used. This takes longer than many sections' kernels, and is never freed without such a device.
    """
    found = stream_seed(seed, step, micro_batch, section)
    torch.default_generator.manual_seed(found)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch ships no types for it
        torch.cuda.manual_seed_all(found)

"""Measures kinds of sections, one after the other in this process, or (Varuna 4.3) side by side on several GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from calibrate.computing.sections import SectionMeasurement, measure_benches
from calibrate.computing.subject import Subject
from calibrate.helpers.crew import Crew
from calibrate.timing.bench import one_of_each
from calibrate.timing.clocks import clock_of, give_back_memory
from calibrate.timing.samples import Sampling
from morph.cutting import CutModel, Section

Measured = dict[str, SectionMeasurement]
"""Measurements by the signature of the kind."""

_START_TIMEOUT_S = 600.0
_MEASURE_TIMEOUT_S = 600.0


class Meter(Protocol):
    """Measures one section of each kind."""

    def measure(self, model: CutModel, sampling: Sampling) -> Measured:
        """Measure the kinds of a model cut for one m, and for one length."""


@contextmanager
def meter_of(subject: Subject, devices: Sequence[torch.device]) -> Iterator[Meter]:
    """Yield a meter for these devices; with several, each has a helper. Raises ClusterError or WaitTimeout."""
    if len(devices) < 2:
        yield InThisProcess(subject)
        return
    with Crew("calibrate.computing.helper", len(devices), "measuring sections") as crew:
        for number, device in enumerate(devices):
            crew.send(
                number,
                {"job_path": subject.job_path, "num_sections": subject.num_sections, "device": str(device)},
            )
        crew.gather(range(crew.size), "the processes that measure sections", _START_TIMEOUT_S)
        yield SideBySide(crew)


class InThisProcess:
    """Measures all kinds in turns, on the subject's device."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def measure(self, model: CutModel, sampling: Sampling) -> Measured:
        device = self._subject.device
        try:
            return measure_benches(self._subject.benches(model), model.micro_batch_size, clock_of(device), sampling)
        finally:
            give_back_memory(device)


class SideBySide:
    """Deals kinds to helpers, each of which has a device of its own."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def measure(self, model: CutModel, sampling: Sampling) -> Measured:
        dealt = deal(one_of_each(model), self._crew.size)
        for number, kinds in enumerate(dealt):
            self._crew.send(
                number,
                {
                    "do": "measure",
                    "micro_batch_size": model.micro_batch_size,
                    "length": model.length,
                    "signatures": kinds,
                    "budget_s": sampling.budget_s,
                    "most": sampling.most,
                },
            )
        answers = self._crew.gather(range(len(dealt)), "sections to be measured", _MEASURE_TIMEOUT_S)
        return {
            signature: SectionMeasurement.model_validate(measured)
            for answer in answers.values()
            for signature, measured in answer.items()
        }


def deal(kinds: Sequence[Section], num_hands: int) -> list[list[str]]:
    """Deal kinds, by signature, about equally: the most expensive first, to the emptiest hand; none stays empty."""
    hands: list[list[str]] = [[] for _ in range(min(num_hands, len(kinds)))]
    costs = [0.0] * len(hands)
    for section in sorted(kinds, key=lambda section: section.cost, reverse=True):
        emptiest = costs.index(min(costs))
        hands[emptiest].append(section.signature)
        costs[emptiest] += section.cost
    return [hand for hand in hands if hand]

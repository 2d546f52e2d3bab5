"""Measures kinds of sections, one after the other in this process, or (Varuna 4.3) side by side on several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

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
Meter = Callable[[CutModel, Sampling], Measured]
"""Measures one section of each kind of a model that is cut for one m, and for one length."""

_START_TIMEOUT_S = 600.0
_MEASURE_TIMEOUT_S = 600.0


@contextmanager
def meter_of(subject: Subject, devices: Sequence[torch.device]) -> Iterator[Meter]:
    """Yield a meter for these devices; with several, each has a helper. Raises ClusterError or WaitTimeout."""
    if len(devices) < 2:
        yield partial(measure_here, subject)
        return
    with Crew("calibrate.computing.helper", len(devices), "measuring sections") as crew:
        for number, device in enumerate(devices):
            crew.send(
                number,
                {"job_path": subject.job_path, "num_sections": subject.num_sections, "device": str(device)},
            )
        crew.gather(range(crew.size), "the processes that measure sections", _START_TIMEOUT_S)
        yield partial(measure_side_by_side, crew)


def measure_here(
    subject: Subject, model: CutModel, sampling: Sampling, signatures: Container[str] | None = None
) -> Measured:
    """Measure all kinds, or those of the given signatures, in turns on the subject's device."""
    m, clock = model.micro_batch_size, clock_of(subject.device)
    try:
        return measure_benches(subject.benches(model, signatures), m, clock, sampling)
    finally:
        give_back_memory(subject.device)


def measure_side_by_side(crew: Crew, model: CutModel, sampling: Sampling) -> Measured:
    """Deal kinds to helpers, each of which has a device of its own."""
    dealt = deal(one_of_each(model), crew.size)
    for number, kinds in enumerate(dealt):
        crew.send(
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
    answers = crew.gather(range(len(dealt)), "sections to be measured", _MEASURE_TIMEOUT_S)
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

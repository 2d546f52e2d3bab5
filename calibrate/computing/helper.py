"""A helper that runs sections of the job, or sends messages: ``python -m calibrate.computing.helper``.

It first gets the job, unless it is only for messages, and then its orders:

- ``measure``: times and sizes of some kinds of sections at one m, on a device that no other helper measures on;
- ``busy``: run a kind of section over and over until the next message, so that others can measure the effect;
- ``rest``: report that nothing is under way;
- any other order is for ``calibrate.links.peer``, and is the last one.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while importing: the imported objects stay, and scanning them repeatedly takes a sixth of the time

import time
from typing import Any

import torch

from calibrate.computing.meter import measure_here
from calibrate.computing.subject import Subject, load_subject
from calibrate.helpers.helper_end import HelperPipe, serve
from calibrate.links.peer import measure
from calibrate.timing.bench import Bench
from calibrate.timing.samples import Sampling
from morph.jobs.files import imported_once
from morph.runtime.state.fixed_point import prepare

BUSY_AT_MOST_S = 120.0


def _work(line: HelperPipe) -> None:
    torch.set_num_threads(1)
    spec = line.next()
    if "job_path" not in spec:
        line.answer(measure(spec))
        return
    with imported_once(spec["job_path"]):  # so that the cut made by the parent process is read
        _serve(load_subject(spec["job_path"], torch.device(spec["device"]), spec["num_sections"]), line)


def _serve(subject: Subject, line: HelperPipe) -> None:
    benches: dict[tuple[str, int], Bench] = {}
    line.answer({"ready": True})
    while True:
        message = line.next()
        if "do" not in message:
            line.answer(measure(message))
            return
        if message["do"] == "measure":
            line.answer(_measure(subject, message))
        elif message["do"] == "busy":
            key = (message["signature"], message["micro_batch_size"])
            if key not in benches:
                (benches[key],) = subject.benches(subject.cut(key[1]), [key[0]])
            _keep_busy(benches[key], line)
        else:
            line.answer({"resting": True})


def _measure(subject: Subject, message: dict[str, Any]) -> dict[str, Any]:
    model = subject.cut(message["micro_batch_size"]).at(message["length"])
    sampling = Sampling(budget_s=message["budget_s"], most=message["most"])
    measurements = measure_here(subject, model, sampling, message["signatures"])
    return {signature: measured.model_dump(mode="json") for signature, measured in measurements.items()}


def _keep_busy(bench: Bench, line: HelperPipe) -> None:
    bench.both()
    line.answer({"busy": True})
    end_s = time.monotonic() + BUSY_AT_MOST_S
    while not line.waiting and time.monotonic() < end_s:
        bench.both()


if __name__ == "__main__":
    prepare()  # for all forked processes
    serve(_work)

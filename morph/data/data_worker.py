"""A data worker: a process that reads samples for the worker that started it, and ends with that worker.

``python -m morph.data.data_worker LINE MEMORY``: LINE and MEMORY are file descriptors: the connection to the worker and
the shared memory; standard input holds the setup. All messages are JSON, because nothing that is read is unpickled.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # during imports, whose objects all stay: collections take a sixth of the time

import json
import mmap
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from morph.contract.job_facts import JobFacts
from morph.data.evaluation import EPOCH
from morph.data.loader import data_facts, data_of, recipe_of
from morph.data.slots import Slots
from morph.jobs.changes import require_same
from morph.jobs.files import JobFiles
from morph.jobs.job import Job, load_job

Message = dict[str, Any]


def main() -> int:
    """Read requested micro-batches until the worker is gone; return the exit code."""
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker handles Ctrl-C, and ends this process
    line, memory_fd = Connection(int(sys.argv[1])), int(sys.argv[2])
    setup = json.load(sys.stdin.buffer)
    heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_hear, args=(line, heard), daemon=True).start()
    try:
        job = _load(setup)
        begin = heard.get()
        # torch.use_deterministic_algorithms loads torch's compiler, which takes a second
        torch.set_deterministic_debug_mode(begin["determinism"])
        slots = Slots(begin["micro_batch_size"], begin["entries"])
        memory = torch.frombuffer(mmap.mmap(memory_fd, slots.num_bytes), dtype=torch.uint8)
    except BaseException as error:  # the job's file may raise anything, even SystemExit
        _tell(line, {"failed": _shown(error)})
        return 1
    _tell(line, {"ready": True})
    while True:
        _tell(line, _answer(job, slots, memory, heard.get()))


def _hear(line: Connection, heard: queue.SimpleQueue[Message]) -> None:
    """Receive the worker's messages, also while a sample is read. End this process when the connection closes."""
    try:
        with suppress(EOFError, OSError):
            while True:
                heard.put(json.loads(line.recv_bytes()))
    finally:  # also after a message that was not JSON
        os._exit(0)


def _tell(line: Connection, message: Message) -> None:
    with suppress(OSError):  # the worker is gone: the other thread ends this process
        line.send_bytes(json.dumps(message).encode())


def _load(setup: Message) -> Job:
    """Load the job as the worker did, and build its data sets."""
    sys.path[:] = setup["path"]
    torch.set_num_threads(setup["num_threads"])
    if setup["folder"] is not None:
        files = {name: content.encode("latin-1") for name, content in setup["files"].items()}
        JobFiles(Path(setup["folder"]), files, growing=setup["growing"]).install()
    job = load_job(setup["job_path"])
    data_of(job)
    known = JobFacts.model_validate(setup["known"])
    if known.data:
        require_same(JobFacts(data=data_facts(job)), known, setup["job_path"])
    return job


def _answer(job: Job, slots: Slots, memory: torch.Tensor, request: Mapping[str, Any]) -> Message:
    """Read one micro-batch into a slot. After an error, the worker reads the samples itself, and raises it there."""
    slot = request["slot"]
    try:
        samples, count, recipe = [], slots.num_read(memory), recipe_of(job)
        places = [(epoch, index) for epoch, index in slots.samples(memory, slot, request["count"]).tolist()]
        for epoch, index in places:
            samples += recipe.read(data_of(job, "eval_data" if epoch == EPOCH else "dataset"), [(epoch, index)])
            count += 1  # in shared memory, where the worker reads it
        made = recipe.alike(
            samples, places, slots.like, "dataset()", "as in item 0", request["keys"], request["length"]
        )
        laid_out = {key: slots.put(memory, slot, key, made[key]) for key in request["keys"]}
    except Exception as error:
        return {"slot": slot, "error": _shown(error)}
    return {"slot": slot, "laid_out": laid_out}


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    raise SystemExit(main())

"""Micro-batches that data workers read before the training thread asks for them.

The training thread itself reads every micro-batch that is not ready in time, for whatever reason: data workers do not
change samples, and an error in a sample occurs again where the user sees it. Only the training thread uses this module.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from morph.contract.job_facts import DataFacts, JobFacts
from morph.contract.waits import Backoff
from morph.data.lengths import MicroBatch
from morph.data.slots import NUM_SLOTS, Slots
from morph.jobs.files import held, split_job
from morph.words import counted

log = logging.getLogger(__name__)

Batch = tuple[int, int, tuple[str, ...]]
"""Step, micro-batch, and the names of the requested entries."""
SamplesOf = Callable[[int, int], MicroBatch]
"""Returns the samples of a micro-batch, by step and number."""
PATIENCE_S = 30.0
"""Seconds without a sample after which an awaited data worker counts as hanging; less than any bound on a step."""
MOST_FAILURES = 8
"""The number of failures of data workers after which the worker does without them for a while."""
NUM_RESTORING = 32
"""The number of micro-batches read in a row after which earlier failures no longer count."""
WITHOUT = Backoff(first_s=60.0, most_s=3600.0)
"""How long a worker does without data workers that have failed too often."""
_LOOK_S = 0.05
_END_S = 2.0


class DataWorkers:
    """The data workers of one worker; they start at once, and read as soon as ``begin`` has given the form of samples.

    ``known``: the facts that their data sets must match, by the job's fields. ``clock`` returns monotonic seconds.
    ``notes``: sentences for the user, until they are fetched.
    """

    def __init__(
        self,
        count: int,
        job_path: str,
        *,
        known: Mapping[str, DataFacts] | None = None,
        pinned: bool = False,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notes: deque[str] = deque(maxlen=MOST_FAILURES)
        self._count, self._clock = count, clock
        self._setup = _setup_message(job_path, known or {})
        self._pinned, self._patience_s = pinned, patience_s
        self._readers: list[_Reader] = []
        self._slots: Slots | None = None
        self._wanted: dict[Batch, SamplesOf] = {}
        self._unrequested: deque[Batch] = deque()
        self._over: Callable[[], bool] = bool
        self._failures_left = MOST_FAILURES
        self._num_read = self._num_times_without = 0
        self._again_s: float | None = None
        self.close = weakref.finalize(self, _end_all, self._readers, os.getpid())
        self._start_all()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the data workers that are alive."""
        return tuple(reader.process.pid for reader in self._readers)

    def begin(self, sample: Mapping[str, Tensor], micro_batch_size: int) -> None:
        """Set the form of samples. Data workers adopt torch's setting of deterministic kernels."""
        entries = {key: (str(value.dtype).removeprefix("torch."), tuple(value.shape)) for key, value in sample.items()}
        self._slots = Slots(micro_batch_size, entries)
        for reader in tuple(self._readers):
            self._begin(reader, self._slots)

    def expect(self, batches: Iterable[Batch], samples_of: SamplesOf, over: Callable[[], bool]) -> None:
        """Read these micro-batches, in this order, and drop earlier expectations.

        ``over``: returns whether the micro-batches are no longer needed.
        """
        self._wanted = dict.fromkeys(batches, samples_of)
        self._over = over
        if self._again_s is not None and self._clock() >= self._again_s:
            self._again_s = None
            self._failures_left, self._num_read = MOST_FAILURES, 0
            self._note(f"{counted(self._count, 'data worker is', 'data workers are')} started again")
            self._start_all()
        for reader in self._readers:
            reader.forget_but(self._wanted)
        self._look_through()
        self._hear(0.0)
        self._ask()

    def take(self, batch: Batch) -> dict[str, Tensor]:
        """Return the entries of an expected micro-batch, each [m, ...]; waits for one that is being read.

        Empty if the micro-batch was not read, and will not be. A wait ends when the data worker ends, when it has read
        no sample for ``patience_s``, or when ``over`` returns true.
        """
        if batch not in self._wanted:
            return {}
        self._hear(0.0)
        reader = next((reader for reader in self._readers if batch in reader.requested), None)
        if reader is not None:
            self._await(reader, batch)
        self._wanted.pop(batch, None)
        reader = next((reader for reader in self._readers if batch in reader.read), None)
        tensors = reader.take(batch, pinned=self._pinned) if reader is not None else {}
        self._ask()
        return tensors

    def _start_all(self) -> None:
        for _ in range(self._count):
            self._start()

    def _note(self, sentence: str) -> None:
        log.warning("%s", sentence)
        self.notes.append(sentence)

    def _start(self) -> None:
        try:
            reader = _Reader(self._setup)
        except OSError as error:
            self._note(f"cannot start a data worker: {error}")
            return
        self._readers.append(reader)
        if self._slots is not None:
            self._begin(reader, self._slots)

    def _begin(self, reader: _Reader, slots: Slots) -> None:
        try:
            reader.begin(slots)
        except OSError as error:
            self._note(f"no memory for a data worker: {error}")
            self._end(reader)

    def _look_through(self) -> None:
        """Assign wanted micro-batches that no data worker has been asked for, and detect data workers that hang."""
        self._unrequested = deque(
            batch for batch in self._wanted if not any(reader.has(batch) for reader in self._readers)
        )

    def _ask(self) -> None:
        while self._unrequested and (free := [reader for reader in self._readers if reader.ready and reader.free]):
            batch = self._unrequested.popleft()
            if batch in self._wanted:
                step, micro_batch, _ = batch
                max(free, key=lambda reader: len(reader.free)).ask(batch, self._wanted[batch](step, micro_batch))

    def _await(self, reader: _Reader, batch: Batch) -> None:
        seen, since_s = -1, time.monotonic()
        while batch in reader.requested and reader in self._readers and not self._over():
            num_read = reader.num_read
            if num_read != seen:
                seen, since_s = num_read, time.monotonic()
            elif time.monotonic() - since_s > self._patience_s:
                self._failed(f"read no sample within {self._patience_s:g} s", reader)
                return
            self._hear(_LOOK_S)

    def _hear(self, wait_s: float) -> None:
        """Process messages of data workers; if there are none, wait for one for at most ``wait_s``."""
        while ready := wait([reader.line for reader in self._readers], wait_s):
            for reader in [reader for reader in self._readers if reader.line in ready]:
                if reader not in self._readers:  # it ended because of another data worker's message
                    continue
                try:
                    self._take_in(reader, json.loads(reader.line.recv_bytes()))
                except (EOFError, OSError):
                    self._failed("has ended", reader)
            wait_s = 0.0

    def _take_in(self, reader: _Reader, said: Mapping[str, Any]) -> None:
        if "failed" in said:  # another one would fail too
            self._note(f"cannot use a data worker: {said['failed']}")
            self._end(reader)
        elif "ready" in said:
            reader.ready = True
        else:
            batch = reader.answered(said, self._wanted)
            if "error" in said:
                self._wanted.pop(batch, None)
                self._failed(f"could not read micro-batch {batch[1]} of step {batch[0]}: {said['error']}", None)
            else:
                self._num_read += 1
                if self._num_read >= NUM_RESTORING:
                    self._failures_left, self._num_times_without = MOST_FAILURES, 0
        self._ask()

    def _failed(self, what: str, reader: _Reader | None) -> None:
        """Start another data worker in place of ``reader``, unless data workers have failed too often."""
        self._failures_left -= 1
        self._num_read = 0
        log.warning("a data worker %s; the worker reads the samples itself", what)
        if reader is not None:
            self._end(reader)
            if self._failures_left > 0:
                self._start()
        if self._failures_left == 0:
            pause_s = WITHOUT.pause_s(self._num_times_without)
            self._num_times_without += 1
            self._again_s = self._clock() + pause_s
            self._note(
                f"data workers failed {MOST_FAILURES} times (the last one {what}): "
                f"the worker reads everything itself for {pause_s:g} s"
            )
            for other in tuple(self._readers):
                self._end(other)
        self._look_through()

    def _end(self, reader: _Reader) -> None:
        self._readers.remove(reader)
        reader.end()


class _Reader:
    """One data worker's process, on the side of the worker that started it.

    Raises OSError if a process or a descriptor is not available.
    """

    def __init__(self, setup: bytes) -> None:
        self.ready = False
        self.free = list(range(NUM_SLOTS))
        self.requested: dict[Batch, int] = {}
        self.read: dict[Batch, tuple[int, Mapping[str, tuple[Sequence[int], Sequence[int]]]]] = {}
        self._slots: Slots | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        # memory without a name or file system leaves nothing behind, and is not limited by the size of /dev/shm
        self._memory_fd = os.memfd_create("morph-data-worker")
        self.line, theirs = Pipe()
        command = [sys.executable, "-m", "morph.data.data_worker", str(theirs.fileno()), str(self._memory_fd)]
        try:
            with theirs, os.fdopen(os.memfd_create("morph-job"), "w+b") as given:
                given.write(setup)
                given.seek(0)
                self.process = subprocess.Popen(command, stdin=given, pass_fds=(theirs.fileno(), self._memory_fd))
        except OSError:
            self.line.close()
            os.close(self._memory_fd)
            raise

    @property
    def num_read(self) -> int:
        return 0 if self._slots is None else int(self._slots.num_read(self._memory))

    def begin(self, slots: Slots) -> None:
        """Send the layout of the samples to read. Raises OSError if there is not enough memory."""
        os.ftruncate(self._memory_fd, slots.num_bytes)
        shared = mmap.mmap(self._memory_fd, slots.num_bytes)
        self._slots, self._memory = slots, torch.frombuffer(shared, dtype=torch.uint8)
        self._say(
            {
                "micro_batch_size": slots.micro_batch_size,
                "entries": slots.entries,
                "determinism": torch.get_deterministic_debug_mode(),
            }
        )

    def has(self, batch: Batch) -> bool:
        return batch in self.requested or batch in self.read

    def ask(self, batch: Batch, wanted: MicroBatch) -> None:
        assert self._slots is not None
        slot = self.requested[batch] = self.free.pop()
        self._slots.samples(self._memory, slot, len(wanted.places)).copy_(torch.tensor(wanted.places))
        self._say({"slot": slot, "keys": batch[2], "length": wanted.length, "count": len(wanted.places)})

    def answered(self, said: Mapping[str, Any], wanted: Mapping[Batch, object]) -> Batch:
        """Record the answer about a slot; return its micro-batch."""
        slot = said["slot"]
        batch = next(batch for batch, its_slot in self.requested.items() if its_slot == slot)
        del self.requested[batch]
        if "error" in said or batch not in wanted:
            self.free.append(slot)
        else:
            self.read[batch] = slot, said["laid_out"]
        return batch

    def take(self, batch: Batch, *, pinned: bool) -> dict[str, Tensor]:
        """Return a copy of a micro-batch that was read, and free its slot."""
        assert self._slots is not None
        slot, laid_out = self.read.pop(batch)
        tensors = {key: self._slots.get(self._memory, slot, key, *laid_out[key], pinned=pinned) for key in laid_out}
        self.free.append(slot)
        return tensors

    def forget_but(self, wanted: Mapping[Batch, object]) -> None:
        for batch in self.read.keys() - wanted.keys():
            self.free.append(self.read.pop(batch)[0])

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self.line.close()
        os.close(self._memory_fd)
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
            self.process.wait(_END_S)

    def _say(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the process has ended, as its connection will show
            self.line.send_bytes(json.dumps(message).encode())


def _end_all(readers: list[_Reader], pid: int) -> None:
    """End the processes if this is the process that started them, and not a fork of it."""
    while readers and os.getpid() == pid:
        readers.pop().end()


def _setup_message(job_path: str, known: Mapping[str, DataFacts]) -> bytes:
    """Return the message from which a data worker loads the job as this process did."""
    files = held(Path(split_job(job_path)[0]))
    return json.dumps({
        "job_path": job_path,
        "folder": None if files is None else str(files.folder),
        "files": {} if files is None else {name: content.decode("latin-1") for name, content in files.files.items()},
        "growing": files is not None and files.growing,
        "path": sys.path,
        "num_threads": torch.get_num_threads(),
        "known": JobFacts(data=dict(known)).model_dump(mode="json"),
    }).encode()  # fmt: skip

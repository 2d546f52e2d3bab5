"""Sends events to TensorBoard, Weights & Biases, MLflow or a callback, each with its library in its own process."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from morph.contract.base import Value
from morph.contract.errors import ConfigError
from morph.contract.files import PRIVATE, write_whole
from morph.contract.happenings import (
    CheckpointDone,
    EvaluationDone,
    Happening,
    RunEnded,
    ShapeChanged,
    StepDone,
    Trouble,
)
from morph.contract.plan import kinds_in

LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
METHODS: Mapping[type[Value], str] = {
    StepDone: "on_step",
    EvaluationDone: "on_evaluation",
    CheckpointDone: "on_checkpoint",
    ShapeChanged: "on_change",
    Trouble: "on_trouble",
    RunEnded: "on_end",
}


class Told(NamedTuple):
    """The last step and the last evaluation that a sink has received; 0: none."""

    step: int = 0
    evaluated: int = 0

    def has(self, happening: Happening) -> bool:
        """Return whether the sink has received this."""
        if isinstance(happening, EvaluationDone):
            return happening.step <= self.evaluated
        return happening.step <= self.step - (not isinstance(happening, StepDone))


class Sink(ABC):
    """A receiver of events, in their order. Each call has a limit, after which another process continues after it."""

    def open(self) -> Told:
        """Get ready; return what an earlier process has received."""
        return Told()

    def begin(self, sequence: int) -> bool:  # noqa: ARG002
        """Return whether the events of this line of the journal are still to be received."""
        return True

    @abstractmethod
    def tell(self, happening: Happening) -> None:
        """Receive one event; CallbackFailed reports an error after which the next event is received."""

    def flush(self) -> None:  # noqa: B027
        """Handle that no more events come for now; errors as of ``tell``."""

    def manager_gone(self) -> None:  # noqa: B027
        """Handle that the manager vanished without an end."""

    def close(self) -> None:  # noqa: B027
        """Handle that the session is over, after the last ``flush``; errors as of ``tell``."""


def numbers_of(happening: Happening) -> dict[str, float]:
    """Return the numbers that a tracker plots, by name; only finite ones."""
    numbers: dict[str, float | None] = {}
    match happening:
        case StepDone():
            numbers = {"train/loss": happening.loss, "train/gradient_norm": happening.gradient_norm}
            if happening.learning_rates is not None:
                low, numbers["train/learning_rate"] = happening.learning_rates
                if low != numbers["train/learning_rate"]:
                    numbers["train/learning_rate_lowest"] = low
            kinds = kinds_in(happening.shape)
            numbers |= {f"train/{name}": value for name, value in happening.metrics.items()}
            numbers |= {
                "speed/examples_per_s": happening.examples_per_s,
                "speed/tokens_per_s": happening.tokens_per_s,
                "run/skipped": float(happening.skipped),
                "run/pause_s": happening.pause_s,
                "run/stages": float(max(stages for stages, _ in kinds)),
                "run/replicas": float(sum(replicas for _, replicas in kinds)),
                "run/dollars": happening.dollars,
            }
        case EvaluationDone():
            numbers = {"eval/loss": happening.loss} | {f"eval/{name}": v for name, v in happening.metrics.items()}
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


class TensorBoard(Sink):
    """Event files in ``RUN_DIR/tensorboard``; each process adds one, and continues after their content.

    ``folder``: instead of that.
    """

    def __init__(self, run_dir: Path, job: str, folder: Path | None = None) -> None:  # noqa: ARG002 (as every tracker)
        self._folder = folder or run_dir / "tensorboard"

    def open(self) -> Told:
        """See ``Sink.open``: this reads its own files."""
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        last = Told()
        for path in sorted(self._folder.glob("events.out.tfevents.*")):
            for record in RawEventFileLoader(str(path)).Load():
                event = event_pb2.Event.FromString(record)
                tags = {value.tag for value in event.summary.value}
                if "run/stages" in tags:
                    last = last._replace(step=max(last.step, event.step))
                elif any(tag.startswith("eval/") for tag in tags):
                    last = last._replace(evaluated=max(last.evaluated, event.step))
        self._writer = EventFileWriter(str(self._folder))
        return last

    def tell(self, happening: Happening) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        numbers = numbers_of(happening)
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        if isinstance(happening, ShapeChanged):
            text = TensorProto(dtype=DT_STRING, string_val=[happening.sentence.encode()])
            metadata = create_summary_metadata(display_name="shape", description="")
            values.append(Summary.Value(tag="run/shape/text_summary", metadata=metadata, tensor=text))
        if values:
            summary = Summary(value=values)
            self._writer.add_event(Event(wall_time=happening.time_s, step=happening.step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Noted:
    """A file with the id under which a run is tracked, and the last tracked step."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._path = run_dir / "trackers" / f"{name}.json"
        self.known: dict[str, Any] = {}
        if self._path.is_file():
            self.known = json.loads(self._path.read_text(encoding="utf-8"))

    def note(self, **known: object) -> None:
        """Write the file atomically."""
        self.known |= known
        write_whole(self._path, json.dumps(self.known), PRIVATE)


class WeightsAndBiases(Sink):
    """A run of W&B, the same one after a resume; ``WANDB_*`` in the environment set its place and name."""

    def __init__(self, run_dir: Path, job: str) -> None:
        self._run_dir, self._job, self._noted = run_dir, job, Noted(run_dir, "wandb")
        self._told = Told()

    def open(self) -> Told:
        """See ``Sink.open``: this asks W&B or, offline, reads its own file."""
        import wandb

        run_id = self._noted.known.get("id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self._run = wandb.init(
            id=run_id,
            resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",
            project=os.environ.get("WANDB_PROJECT") or self._job,
            name=os.environ.get("WANDB_NAME") or self._run_dir.name,
            dir=os.environ.get("WANDB_DIR") or str(self._run_dir),
            settings=wandb.Settings(console="off", silent=True, x_disable_meta=False),
        )
        self._noted.note(id=run_id)
        for name in ("step", "step_done", "evaluated"):
            self._run.define_metric(name, hidden=True)
        self._run.define_metric("*", step_metric="step")
        known = self._run.summary if self._run.resumed else self._noted.known
        self._told = Told(int(known.get("step_done") or 0), int(known.get("evaluated") or 0))
        return self._told

    def tell(self, happening: Happening) -> None:
        numbers = numbers_of(happening)
        if isinstance(happening, StepDone):
            self._told = self._told._replace(step=happening.step)
        elif isinstance(happening, EvaluationDone):
            self._told = self._told._replace(evaluated=happening.step)
        if numbers:
            progress = {"step_done": self._told.step, "evaluated": self._told.evaluated}
            self._run.log({"step": happening.step, **numbers, **progress})

    def flush(self) -> None:
        if (self._told.step, self._told.evaluated) != tuple(map(self._noted.known.get, ("step_done", "evaluated"))):
            self._noted.note(step_done=self._told.step, evaluated=self._told.evaluated)

    def close(self) -> None:
        self._run.finish()


class MlFlow(Sink):
    """A run of MLflow, the same one after a resume, at the place set by ``MLFLOW_*``, or else in the run directory."""

    def __init__(self, run_dir: Path, job: str) -> None:
        self._run_dir, self._job, self._noted = run_dir, job, Noted(run_dir, "mlflow")
        self._waiting: list[Any] = []

    def open(self) -> Told:
        """See ``Sink.open``: this asks MLflow."""
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ["MLFLOW_TRACKING_URI"] = (self._run_dir / "mlflow").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient()
        run_id = self._noted.known.get("id") or os.environ.get("MLFLOW_RUN_ID")
        if run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._job
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            run_id = self._client.create_run(experiment_id, run_name=self._run_dir.name).info.run_id
            self._noted.note(id=run_id)
        self._id: str = run_id
        known = self._client.get_run(run_id).data.metrics
        return Told(int(known.get("run/step", 0)), int(known.get("run/evaluated", 0)))

    def tell(self, happening: Happening) -> None:
        from mlflow.entities import Metric

        numbers = {re.sub(r"[^\w\-. :/]", "_", name): number for name, number in numbers_of(happening).items()}
        if isinstance(happening, StepDone):
            numbers["run/step"] = float(happening.step)  # written last: a later process continues after it
        elif isinstance(happening, EvaluationDone):
            numbers["run/evaluated"] = float(happening.step)
        at_ms, step = round(happening.time_s * 1000), happening.step
        self._waiting += [Metric(name, number, at_ms, step) for name, number in numbers.items()]
        if isinstance(happening, ShapeChanged):
            self._client.set_tag(self._id, "shape", happening.shape)
        if isinstance(happening, RunEnded):
            self.flush()
            status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[happening.outcome]
            self._client.set_terminated(self._id, status)
        if len(self._waiting) > 500:
            self.flush()

    def flush(self) -> None:
        for first in range(0, len(self._waiting), 1000):
            self._client.log_batch(self._id, metrics=self._waiting[first : first + 1000])
        self._waiting.clear()


class Callback(Sink):
    """A user's object whose methods are called. A method that fails is reported once, and the next one is called.

    A record that is written before each call prevents the same call in a later process.
    """

    def __init__(self, run_dir: Path, target: str, number: int) -> None:
        self._target, self._noted = target, Noted(run_dir, f"callback-{number}")
        self._failed: set[str] = set()

    def open(self) -> Told:
        path, _, name = self._target.rpartition(":")
        sys.path.append(str(Path(path).parent))
        spec = importlib.util.spec_from_file_location(f"morph_callback_{Path(path).stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        handler = getattr(module, name)
        self._object = handler() if isinstance(handler, type) else handler
        if not any(hasattr(self._object, method) for method in METHODS.values()):
            raise TypeError(f"{name} has none of the methods {', '.join(METHODS.values())}")
        return Told()

    def begin(self, sequence: int) -> bool:
        """Return whether the calls for a line of the journal were not begun before, and record them as begun."""
        if sequence <= int(self._noted.known.get("sequence", 0)):
            return False
        self._noted.note(sequence=sequence)
        return True

    def tell(self, happening: Happening) -> None:
        """See ``Sink.tell``; CallbackFailed if a method failed for the first time."""
        method = METHODS[type(happening)]
        call = getattr(self._object, method, None)
        if call is None:
            return
        try:
            call(happening)
        except Exception as error:
            if method not in self._failed:
                self._failed.add(method)
                raise CallbackFailed(f"{method} failed at step {happening.step}: {_text(error)}") from error


class CallbackFailed(Exception):
    """A method of a callback failed; later methods are still called."""


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def check_trackers(trackers: tuple[str, ...], callbacks: tuple[str, ...], source: str, folder: Path) -> None:
    """Check that a tracker or callback can be used.

    ConfigError: a library is not installed, or a callback does not name a file.
    """
    for name in trackers:
        if importlib.util.find_spec(LIBRARIES[name]) is None:
            raise ConfigError(
                f"needs more packages: pip install -e '.[{name}]' in the clone of Morph",
                source=source,
                field="trackers",
                value=name,
            )
    for target in callbacks:
        path, _, attribute = target.rpartition(":")
        if not path or not attribute.isidentifier() or not (folder / path).is_file():
            allowed = f"file.py:name, of a file below {folder}"
            raise ConfigError("names no callback", source=source, field="callbacks", value=target, allowed=allowed)

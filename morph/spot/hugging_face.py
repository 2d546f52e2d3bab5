"""``morph.spot`` for the Trainer of transformers: three lines of a script.

::

    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[morph.spot.hugging_face.Spot()])
    trainer.train(resume_from_checkpoint=morph.spot.restore())

The Trainer's checkpoints hold all that it needs to go on: model, optimizer, scheduler, generators, place in the data.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import morph.spot


class Spot(TrainerCallback):  # type: ignore[misc] # not followed by mypy, see pyproject.toml
    """Has the Trainer save when ``morph spot-run`` says so, and backs up whatever checkpoint it writes."""

    def __init__(self) -> None:
        self._step = ExitStack()

    def on_step_begin(self, *_: object, **__: object) -> None:
        """See ``TrainerCallback``."""
        self._step.enter_context(morph.spot.step())

    def on_step_end(
        self, args: TrainingArguments, _state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        """See ``TrainerCallback``."""
        self._step.close()
        told = [control.should_save or morph.spot.should_save()]
        if args.world_size > 1:
            broadcast_object_list(told)  # all ranks save, and the first one is told
        control.should_save = told[0]
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: object) -> None:
        """See ``TrainerCallback``."""
        if state.is_world_process_zero:
            morph.spot.backup(Path(args.output_dir) / f"checkpoint-{state.global_step}")

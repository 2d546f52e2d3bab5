"""``morph.spot`` for the Trainer of transformers: three lines of a script.

::

    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[morph.spot.hugging_face.Spot()])
    trainer.train(resume_from_checkpoint=morph.spot.restore())

The Trainer's checkpoints hold everything with which it continues: model, optimizer, scheduler, generators, data
position.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import morph.spot
from morph.contract.errors import InputError
from morph.spot.script import ranks_here


class Spot(TrainerCallback):  # type: ignore[misc] # not followed by mypy, see pyproject.toml
    """Makes the Trainer save when ``morph spot-run`` says so, and backs up every checkpoint that it writes.

    With several ranks all save; the first rank's folder is backed up, with the generators of the other ranks. No VM has
    a whole checkpoint of a model that is sharded over several VMs: then an InputError is raised when training begins.
    """

    def __init__(self) -> None:
        self._step = ExitStack()

    def on_train_begin(self, args: TrainingArguments, *_: object, **__: object) -> None:
        """See ``TrainerCallback``."""
        is_sharded = bool(args.fsdp or args.deepspeed) or "true" in (
            os.environ.get("ACCELERATE_USE_FSDP"),
            os.environ.get("ACCELERATE_USE_DEEPSPEED"),
        )
        if is_sharded and args.world_size > ranks_here():
            raise InputError(
                "is used with a model that is sharded over several VMs, none of which has a whole checkpoint",
                field="morph.spot.hugging_face.Spot",
                allowed="plain data parallelism (DDP), or one VM",
            )

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
            broadcast_object_list(told)  # all ranks save when the first one must
        control.should_save = told[0]
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: object) -> None:
        """See ``TrainerCallback``."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.world_size > 1:  # the other ranks' generators may be on other VMs' disks; all ranks have saved by now
            mine = folder / f"rng_state_{args.process_index}.pth"
            for name, data in gather_object([(mine.name, mine.read_bytes())]):
                if state.is_world_process_zero and not (folder / name).exists():
                    (folder / name).write_bytes(data)
        if state.is_world_process_zero:
            morph.spot.backup(folder)

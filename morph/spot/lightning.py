"""``morph.spot`` for the Trainer of Lightning (``lightning`` or ``pytorch_lightning``): three lines of a script.

::

    trainer = Trainer(max_epochs=3, callbacks=[morph.spot.lightning.Spot()])
    trainer.fit(model, loader, ckpt_path=morph.spot.restore())

Lightning's checkpoints hold model, optimizer, scheduler and counters, and this callback adds the random generators.
They hold the place in the data only if the loader has ``state_dict`` and ``load_state_dict``, like torchdata's
``StatefulDataLoader``.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer

import morph.spot
from morph.contract.errors import InputError
from morph.spot.script import ranks_here

SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


class Spot(Callback):  # type: ignore[misc] # not followed by mypy, see pyproject.toml
    """Saves when ``morph spot-run`` says so, or every ``every`` batches (0: only then), and restores the random
    generators.

    ``path``: on this VM's disk, where a checkpoint is written before it is backed up.
    """

    def __init__(self, every: int = 0, path: str | Path = "morph-spot.ckpt") -> None:
        self._every, self._path = every, Path(path)
        self._step = ExitStack()
        self._saved: dict[str, Any] = {}

    def setup(self, trainer: Trainer, *_: object, **__: object) -> None:
        """See ``Callback``. Raises InputError if the model is sharded over several VMs. See ``Callback``. Raises
        InputError if the model is sharded over several VMs.
        """
        if type(trainer.strategy).__name__ in SHARDED and trainer.world_size > ranks_here():
            raise InputError(
                "is used with a model that is sharded over several VMs, none of which has a whole checkpoint",
                field="morph.spot.lightning.Spot",
                allowed="plain data parallelism (DDP), or one VM",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators of all ranks: all ranks call this when one saves."""
        ranks: list[Any] = [self._generators()]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks *= torch.distributed.get_world_size()
            torch.distributed.all_gather_object(ranks, ranks[0])
        return {"ranks": ranks}

    def _generators(self) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state(legacy=True)
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "python": random.getstate(),
            "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until the first batch, because the code before it draws random numbers too."""
        self._saved = state_dict

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        """See ``Callback``."""
        if self._saved:
            saved, self._saved = self._saved["ranks"][trainer.global_rank], {}
            kind, keys, *rest = saved["numpy"]
            torch.set_rng_state(saved["torch"])
            torch.cuda.set_rng_state_all(saved["cuda"])
            random.setstate(saved["python"])
            np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        self._step.enter_context(morph.spot.step())

    def on_train_batch_end(
        self, trainer: Trainer, _module: LightningModule, _outputs: object, _batch: object, batch_idx: int
    ) -> None:
        """See ``Callback``."""
        self._step.close()
        is_due = self._every > 0 and (batch_idx + 1) % self._every == 0
        if trainer.strategy.broadcast(morph.spot.should_save() or is_due):  # all ranks save when the first must
            trainer.save_checkpoint(self._path, weights_only=False)
            if trainer.is_global_zero:
                morph.spot.backup(self._path)

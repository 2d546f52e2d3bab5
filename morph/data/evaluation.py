"""The evaluation data: the first samples of a data set of its own, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from morph.contract.errors import JobError
from morph.data.loader import check_map_style, read_samples, require_alike, stack_entry
from morph.job import MapDataset

_EPOCH = -1
"""Not one of training's; every evaluation draws alike, so that they can be compared."""


class EvaluationLoader:
    """Loads micro-batch ``j``: samples ``j*m .. (j+1)*m - 1``; samples that fill no micro-batch are left out.

    Args:
        dataset: The evaluation data.
        seed: The job's.
        training_sample: What samples must look like, for sections were made for that.
        micro_batch_size: m.
        num_samples: How many samples to take at most; None: all.

    Raises:
        JobError: too few samples, or a first sample that differs from those of training.
    """

    def __init__(
        self,
        dataset: MapDataset,
        seed: int,
        training_sample: Mapping[str, Tensor],
        micro_batch_size: int,
        num_samples: int | None,
    ) -> None:
        available = check_map_style(dataset, "eval_data")
        self.num_micro_batches = min(available, num_samples or available) // micro_batch_size
        if num_samples is not None and num_samples > available:
            raise JobError(
                "are more than there are", source="Job", field="eval_samples", value=num_samples, allowed=f"{available}"
            )
        if self.num_micro_batches == 0:
            allowed = f"at least one micro-batch of {micro_batch_size} samples"
            raise JobError("is too small", source="Job", field="eval_data", value=available, allowed=allowed)
        self._dataset = dataset
        self._seed = seed
        self._micro_batch_size = micro_batch_size
        self._training_sample = training_sample
        self._read(range(1))

    def load(self, micro_batch: int, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return the wanted entries, each [micro_batch_size, ...].

        Raises:
            JobError: a sample lacks an entry, or differs from those of training in shape or type.
        """
        if not keys:
            return {}
        first = micro_batch * self._micro_batch_size
        samples = self._read(range(first, first + self._micro_batch_size))
        return {key: stack_entry(samples, key) for key in keys}

    def _read(self, indices: range) -> list[dict[str, Tensor]]:
        samples = read_samples(self._dataset, self._seed, [(_EPOCH, index) for index in indices])
        for index, sample in zip(indices, samples, strict=True):
            require_alike(sample, self._training_sample, f"eval_data()[{index}]", "as in training")
        return samples

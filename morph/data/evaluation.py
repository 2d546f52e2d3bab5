"""The evaluation data: the first samples of a data set of its own, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from morph.contract.errors import JobError
from morph.data.loader import check_sample, stack_entry
from morph.job import MapDataset


class EvaluationLoader:
    """Loads micro-batch ``j``: samples ``j*m .. (j+1)*m - 1``; samples that fill no micro-batch are left out.

    Args:
        dataset: The evaluation data.
        training_sample: What samples must look like, for sections were made for that.
        micro_batch_size: m.
        num_samples: How many samples to take at most; None: all.

    Raises:
        JobError: too few samples, or a first sample that differs from those of training.
    """

    def __init__(
        self,
        dataset: MapDataset,
        training_sample: Mapping[str, Tensor],
        micro_batch_size: int,
        num_samples: int | None,
    ) -> None:
        available = len(dataset)
        self.num_micro_batches = min(available, num_samples or available) // micro_batch_size
        if num_samples is not None and num_samples > available:
            raise JobError(
                "are more than there are", source="Job", field="eval_samples", value=num_samples, allowed=f"{available}"
            )
        if self.num_micro_batches == 0:
            allowed = f"at least one micro-batch of {micro_batch_size} samples"
            raise JobError("is too small", source="Job", field="eval_data", value=available, allowed=allowed)
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        _check_alike(check_sample(dataset[0], 0), training_sample)

    def load(self, micro_batch: int, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return the wanted entries, each [micro_batch_size, ...].

        Raises:
            JobError: a sample lacks an entry, or differs from its neighbours in shape or type.
        """
        if not keys:
            return {}
        first = micro_batch * self._micro_batch_size
        samples = [check_sample(self._dataset[i], i) for i in range(first, first + self._micro_batch_size)]
        return {key: stack_entry(samples, key) for key in keys}


def _check_alike(sample: Mapping[str, Tensor], training_sample: Mapping[str, Tensor]) -> None:
    for key, wanted in training_sample.items():
        found = sample.get(key)
        if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
            shown = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
            allowed = f"{tuple(wanted.shape)} {wanted.dtype}, as in training"
            raise JobError(
                "is not like a training sample",
                source="Job",
                field=f"eval_data item {key!r}",
                value=shown,
                allowed=allowed,
            )

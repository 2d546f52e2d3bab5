"""What a data set must be: one with a length and numbered items."""

from __future__ import annotations

from torch.utils.data import DataLoader, IterableDataset

from morph.contract.errors import JobError

_ALLOWED = "a map-style data set: len(dataset), and dataset[i] -> a dict from names to tensors"


def check_map_style(dataset: object, field: str) -> int:
    """Return the number of samples.

    Args:
        dataset: What the job's function returned.
        field: That function's name in the job.

    Raises:
        JobError: it is something else, or is empty.
    """
    problem = None
    if isinstance(dataset, DataLoader):
        problem = "returns a DataLoader; Morph forms the batches itself, so return the data set that it loads"
    elif isinstance(dataset, IterableDataset):
        problem = "returns an IterableDataset; every worker needs to read any sample by its number"
    elif not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        problem = "does not return a data set"
    if problem is not None:
        raise JobError(problem, source="Job", field=field, value=type(dataset).__name__, allowed=_ALLOWED)
    size = len(dataset)  # type: ignore[arg-type]  # it has a length
    if size == 0:
        raise JobError("is empty", source="Job", field=field, allowed="at least one sample")
    return size

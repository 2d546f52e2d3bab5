from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.training.shapes import ShapesCrew


@pytest.fixture(scope="session")
def crew() -> Iterator[ShapesCrew]:
    torch.set_num_threads(1)
    processes = ShapesCrew()
    try:
        yield processes
    finally:
        processes.close()

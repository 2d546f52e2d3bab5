from __future__ import annotations

import pytest
import torch

from tests.device.link_contract import pair, store

__all__ = ["pair", "store"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in this folder, and skip them without a CUDA device."""
    skipped = pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} finds none")
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skipped)

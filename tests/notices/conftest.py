from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notices.metadata_server import MetadataServer, served


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    with served() as server:
        yield server

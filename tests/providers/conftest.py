from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.providers.fake_arm import FakeArm, served


@pytest.fixture
def arm() -> Iterator[FakeArm]:
    with served() as fake:
        yield fake
        assert fake.wrong == []

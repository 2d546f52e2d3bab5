from __future__ import annotations

from collections.abc import Iterator

import pytest

from manager.providers.interface import cloud
from tests.providers.fake_arm import FakeArm, served
from tests.providers.fake_ec2 import FakeEc2, ec2_region


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeArm]:
    """Its clock is this one unless a test says otherwise, also where an answer is long under way on a busy machine."""
    monkeypatch.setattr(cloud, "AGREE_S", 100.0)
    with served() as fake:
        yield fake
        assert fake.wrong == []


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEc2]:
    """Its clock is the test's, as for ``arm``."""
    monkeypatch.setattr(cloud, "AGREE_S", 100.0)
    with ec2_region() as fake:
        yield fake

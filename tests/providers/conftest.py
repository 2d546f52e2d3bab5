from __future__ import annotations

from collections.abc import Iterator

import pytest

from manager.providers.interface import cloud
from tests.providers.fake_arm import FakeArm, served
from tests.providers.fake_ec2 import FakeEc2, ec2_region


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeArm]:
    """Return the fake ARM; its clock is this machine's unless a test sets another, even if an answer takes long."""
    monkeypatch.setattr(cloud, "AGREE_S", 100.0)
    with served() as fake:
        yield fake
        assert fake.wrong == []


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEc2]:
    """Return the fake EC2; the test sets its clock, as for ``arm``."""
    monkeypatch.setattr(cloud, "AGREE_S", 100.0)
    with ec2_region() as fake:
        yield fake

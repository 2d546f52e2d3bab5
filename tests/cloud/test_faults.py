"""Faults of a provider and of its notices; the cases themselves contain the checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cloud import aws_faults, ending_faults, notice_faults, provider_faults
from tests.providers.fake_arm import served
from tests.providers.fake_ec2 import ec2_region

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", provider_faults.CASES)
def test_a_fault_of_the_provider_is_survived_and_leaves_nothing(fault: str, tmp_path: Path) -> None:
    with served() as arm:
        assert provider_faults.CASES[fault](arm, tmp_path)
        assert arm.wrong == []


@pytest.mark.parametrize("fault", ending_faults.CASES)
def test_only_resources_of_the_run_are_ended(fault: str, tmp_path: Path) -> None:
    with served() as arm:
        assert ending_faults.CASES[fault](arm, tmp_path)
        assert arm.wrong == []


@pytest.mark.parametrize("fault", notice_faults.CASES)
def test_a_fault_of_notices_is_survived_and_leaves_nothing(fault: str, tmp_path: Path) -> None:
    with served() as arm:
        assert notice_faults.CASES[fault](arm, tmp_path)
        assert arm.wrong == []


OF_AWS = aws_faults.CASES | aws_faults.ENDING_CASES | aws_faults.NOTICE_CASES


@pytest.mark.parametrize("fault", OF_AWS)
def test_a_fault_of_aws_is_survived_and_leaves_nothing(fault: str, tmp_path: Path) -> None:
    with ec2_region() as ec2:
        assert OF_AWS[fault](ec2, tmp_path)

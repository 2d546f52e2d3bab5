"""The pages on faults and safety name existing tests; that on faults has every fault injected from outside."""

from __future__ import annotations

import re

import pytest

from tests.chaos.faults import FAULTS
from tests.system.commands import ROOT

PAGE = (ROOT / "docs/how-it-works/faults.md").read_text(encoding="utf-8")
NAMED = re.findall(
    r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE + (ROOT / "docs/how-it-works/safety.md").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_each_test_that_the_pages_name_is_there(file: str, name: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert f"def {name}(" in text if name else "def test_" in text


def test_every_row_names_a_test_or_a_page() -> None:
    rows = [
        line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| fault |", "| helper |"))
    ]
    assert len(rows) > len(FAULTS)
    assert [row for row in rows if "tests/" not in row and "](" not in row] == []

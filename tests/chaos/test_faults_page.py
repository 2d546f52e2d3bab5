"""The pages on faults and safety name existing tests; that on faults has every fault injected from outside."""

from __future__ import annotations

import re

import pytest

from morph.link.listener import HELLO_TIMEOUT_S, MOST_OF_SOURCE, MOST_PENDING
from tests.chaos.faults import FAULTS
from tests.system.commands import ROOT

SAFETY = (ROOT / "docs/how-it-works/safety.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/how-it-works/faults.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE + SAFETY)


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


def test_every_attacker_and_every_socket_of_the_safety_page_has_a_test() -> None:
    for title in ("## Threat model", "## Who can connect"):
        head, _, *rows = re.findall(r"^\|.*$", SAFETY.partition(title)[2].partition("\n## ")[0], re.MULTILINE)
        assert head.endswith(" test |")
        assert len(rows) > 7
        assert [row for row in rows if "`tests/" not in row.rstrip("| ").rpartition(" | ")[2]] == []


def test_the_limits_on_strangers_are_those_that_the_safety_page_states() -> None:
    said = f"after {HELLO_TIMEOUT_S:g} s, and the oldest one when there are more than {MOST_OF_SOURCE} from"
    assert said in SAFETY
    assert f"one address or {MOST_PENDING} in all" in SAFETY

"""Models as people write them: each equals the plain one, or is refused (docs/reference/tested-models.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.case import Case, check, parameters
from tests.models.rows import BACKWARDS, GRADIENTS, GROUPS, LANGUAGE, LOSSES, SHAPES, STATE, VISION, rendered

PAGE = Path(__file__).parents[2] / "docs/reference/tested-models.md"


@pytest.mark.slow
@parameters((*LANGUAGE, *VISION, *BACKWARDS, *STATE, *GRADIENTS, *SHAPES, *LOSSES))
def test_a_model_equals_the_plain_one_or_is_refused_in_one_sentence(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("group", GROUPS)
def test_the_docs_show_each_group_as_it_is_tested(group: str) -> None:
    assert rendered(group) in PAGE.read_text(), f"docs/reference/tested-models.md should have:\n\n{rendered(group)}"


def test_there_are_sixty_cases_of_different_names() -> None:
    names = [case.name for cases in GROUPS.values() for case in cases]
    assert len(set(names)) == len(names) >= 60

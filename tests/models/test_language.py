from __future__ import annotations

import pytest

from tests.models.case import Case, check, parameters
from tests.models.rows import LANGUAGE

pytestmark = pytest.mark.slow


@parameters(LANGUAGE)
def test_a_model_equals_the_plain_one_or_is_refused_in_one_sentence(case: Case) -> None:
    check(case)

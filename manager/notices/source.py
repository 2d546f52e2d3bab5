"""What a cloud's metadata service says of this VM: the seam that every source of notices fits."""

from __future__ import annotations

import json
import time
from typing import Any, Protocol

from pydantic import Field

from manager.host.plain_http import HttpAnswer
from morph.contract.base import Value
from morph.contract.errors import MorphError


class NoticeUnavailable(MorphError):
    """A metadata service gave no usable answer; what was known before still holds. Ask again later.

    Args:
        sentence: What it did instead.
        retry_after_s: How long it asks to wait.
    """

    def __init__(self, sentence: str, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(sentence)


class Standing(Value):
    """A notice that stands now. ``lead_s`` counts from the answer that brought it."""

    notice: str = Field(min_length=1, description="the provider's name for it")
    lead_s: float | None = Field(ge=0, description="until the VM is taken; None: not known")
    certain: bool = Field(default=True, description="False: a recommendation, long before or without a revocation")


class NoticeSource(Protocol):
    """Asks one metadata service. Every implementation passes ``tests/notices/test_contract.py``."""

    @property
    def name(self) -> str:
        """Of the source, for reports."""

    def standing(self) -> tuple[Standing, ...]:
        """Return every notice of this VM that stands now; blocks for a bounded time.

        Raises:
            NoticeUnavailable: no usable answer.
        """

    def acknowledge(self, notice: str) -> None:
        """Let the revocation begin early: nothing of value is left here. Nothing where the cloud knows no such thing.

        Raises:
            NoticeUnavailable: it was not taken.
        """


def checked(answer: HttpAnswer, what: str) -> HttpAnswer:
    """Return an answer with status 200.

    Raises:
        NoticeUnavailable: any other status.
    """
    if answer.status != 200:
        raise NoticeUnavailable(f"{what}: status {answer.status}", answer.retry_after_s)
    return answer


def json_of(answer: HttpAnswer, what: str) -> dict[str, Any]:
    """Read an object of JSON.

    Raises:
        NoticeUnavailable: it is none.
    """
    try:
        found = json.loads(answer.body)
    except ValueError as error:
        raise NoticeUnavailable(f"{what}: the answer is not JSON") from error
    if not isinstance(found, dict):
        raise NoticeUnavailable(f"{what}: the answer is no JSON object")
    return found


def lead_s(until_s: float, answer: HttpAnswer) -> float:
    """Seconds from an answer to a moment that it names.

    Both are read from the service's clock if the answer says when it was given, else from this VM's; the manager's
    clock is never asked.
    """
    now_s = answer.date_s
    return max(0.0, until_s - (time.time() if now_s is None else now_s))

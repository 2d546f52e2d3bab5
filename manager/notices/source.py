"""The interface of all sources of notices. A source reads a cloud's metadata service about this VM."""

from __future__ import annotations

import json
import time
from typing import Any, Protocol

from pydantic import Field

from manager.host.plain_http import HttpAnswer
from morph.contract.base import Value
from morph.contract.errors import MorphError


class NoticeUnavailable(MorphError):
    """A metadata service gave no usable answer; earlier notices still hold. Ask again after ``retry_after_s``."""

    def __init__(self, sentence: str, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(sentence)


class Standing(Value):
    """A valid notice. ``lead_s`` counts from the answer that brought it."""

    notice: str = Field(min_length=1, description="the provider's name for the notice")
    lead_s: float | None = Field(ge=0, description="seconds until the VM is taken; None: not known")
    certain: bool = Field(default=True, description="False: a recommendation, long before or without a revocation")


class NoticeSource(Protocol):
    """Asks one metadata service. Every implementation passes ``tests/notices/test_contract.py``."""

    @property
    def name(self) -> str:
        """The name of the source, for reports."""

    def standing(self) -> tuple[Standing, ...]:
        """Return every valid notice of this VM; blocks for a bounded time. NoticeUnavailable: no usable answer."""

    def acknowledge(self, notice: str) -> None:
        """Let the revocation begin early, as nothing of value is left here; nothing happens if the cloud cannot.

        NoticeUnavailable if the service did not accept it.
        """


def checked(answer: HttpAnswer, what: str) -> HttpAnswer:
    """Return an answer with status 200; NoticeUnavailable for any other status."""
    if answer.status != 200:
        raise NoticeUnavailable(f"{what}: status {answer.status}", answer.retry_after_s)
    return answer


def json_of(answer: HttpAnswer, what: str) -> dict[str, Any]:
    """Read a JSON object; NoticeUnavailable if the answer is none."""
    try:
        content = json.loads(answer.body)
    except ValueError as error:
        raise NoticeUnavailable(f"{what}: the answer is not JSON") from error
    if not isinstance(content, dict):
        raise NoticeUnavailable(f"{what}: the answer is not a JSON object")
    return content


def lead_s(until_s: float, answer: HttpAnswer) -> float:
    """Return the seconds from an answer to a moment that it names.

    Both are on the service's clock if the answer has its own time, else on this VM's; the manager's clock is never
    used.
    """
    now_s = answer.date_s
    return max(0.0, until_s - (time.time() if now_s is None else now_s))

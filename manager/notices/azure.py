"""Azure Scheduled Events: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events."""

from __future__ import annotations

import json
from typing import Any

from manager.host.plain_http import HttpAnswer, HttpFailed, fetch, http_date_s
from manager.notices.end import METADATA_URL
from manager.notices.source import NoticeUnavailable, Standing, checked, json_of, lead_s

EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
FIRST_TIMEOUT_S = 150.0
"""Seconds. The first call switches the service on for this VM, which takes up to two minutes."""
TIMEOUT_S = 10.0


class AzureNotices:
    """The Preempt events of this VM; events of other VMs of the same scale set are ignored.

    ``first_timeout_s``: the bound of a call until the first answer; ``timeout_s``: that of every other call.
    """

    name = "azure"

    def __init__(
        self, metadata_url: str = METADATA_URL, first_timeout_s: float = FIRST_TIMEOUT_S, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._url = metadata_url
        self._first_timeout_s = first_timeout_s
        self._timeout_s = timeout_s
        self._answered = False
        self._vm: str | None = None
        self._incarnation: object = None
        self._events: tuple[dict[str, Any], ...] = ()

    def standing(self) -> tuple[Standing, ...]:
        if self._vm is None:
            self._vm = checked(self._call(NAME_PATH), "the VM's name").text.strip() or None
            if self._vm is None:
                raise NoticeUnavailable("the VM's name: the answer is empty")
        timeout_s = self._timeout_s if self._answered else self._first_timeout_s
        answer = checked(self._call(EVENTS_PATH, timeout_s=timeout_s), "scheduled events")
        document = json_of(answer, "scheduled events")
        self._answered = True
        if document.get("DocumentIncarnation") != self._incarnation or self._incarnation is None:
            events = document.get("Events")
            if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
                raise NoticeUnavailable("scheduled events: Events is not a list of objects")
            self._events = tuple(event for event in events if self._is_ours(event))
            self._incarnation = document.get("DocumentIncarnation")
        return tuple(_standing(event, answer) for event in self._events)

    def acknowledge(self, notice: str) -> None:
        """See ``NoticeSource``: this posts StartRequests."""
        body = json.dumps({"StartRequests": [{"EventId": notice}]}).encode()
        checked(self._call(EVENTS_PATH, body=body), "StartRequests")

    def _is_ours(self, event: dict[str, Any]) -> bool:
        resources = event.get("Resources")
        return event.get("EventType") == "Preempt" and isinstance(resources, list) and self._vm in resources

    def _call(self, path: str, *, body: bytes | None = None, timeout_s: float | None = None) -> HttpAnswer:
        headers = {"Metadata": "true"} | ({"Content-Type": "application/json"} if body is not None else {})
        try:
            return fetch(
                self._url + path,
                timeout_s=timeout_s or self._timeout_s,
                method="GET" if body is None else "POST",
                headers=headers,
                body=body,
            )
        except HttpFailed as error:
            raise NoticeUnavailable(str(error)) from error


def _standing(event: dict[str, Any], answer: HttpAnswer) -> Standing:
    name = event.get("EventId")
    if not isinstance(name, str) or not name:
        raise NoticeUnavailable("scheduled events: a Preempt event has no EventId")
    not_before = event.get("NotBefore")  # empty once the event has started
    at_s = http_date_s(not_before) if isinstance(not_before, str) else None
    return Standing(notice=name, lead_s=0.0 if at_s is None else lead_s(at_s, answer))

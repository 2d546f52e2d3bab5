"""Where VMs get their certificates: the manager's end of ``manager.enrolment.exchange``."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from manager.engine.loop.event_queue import EventQueue
from manager.enrolment.authority import Authority, RequestRefused, now, requested_key
from manager.enrolment.exchange import Asked, Exchange
from manager.journal.records import Fact
from manager.notices.line import Lines

LIFE = datetime.timedelta(days=30)
"""A VM gets another one each time its node starts."""


class EnrolmentDesk:
    """Signs for whoever proves the nodes' secret, for the address from which he comes and no other.

    Args:
        event_queue: Where the facts ``node_enrolled`` and ``enrolment_refused`` go.
        secret: Shared with the nodes.
        authority: Of the run.
        moment: The time.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        secret: str,
        authority: Authority,
        moment: Callable[[], datetime.datetime] = now,
    ) -> None:
        self._event_queue, self._secret, self._authority, self._moment = event_queue, secret, authority, moment

    def serve(self, lines: Lines, nonce: str, hello: dict[str, Any], address: str) -> None:
        """Answer one node's line. Of a stranger's nothing is read but what the proof covers, before it is checked.

        Args:
            lines: The connection.
            nonce: What it was greeted with.
            hello: What it sent.
            address: From which it comes.

        Raises:
            ValidationError: the line is none.
            ConnectionError: it is a stranger's.
        """
        asked = Asked.model_validate(hello)
        exchange = Exchange(self._secret, nonce, asked.fresh, asked.node, asked.request)
        if not exchange.is_asked(asked):
            raise ConnectionError("not one of ours")
        try:
            certificate = self._certificate(asked, address)
        except RequestRefused as refusal:
            answer, fact = (
                exchange.refuse(str(refusal)),
                Fact(name="enrolment_refused", detail=f"{asked.node}: {refusal}"),
            )
        else:
            answer, fact = (
                exchange.certify(certificate),
                Fact(name="node_enrolled", detail=f"{asked.node} at {address}"),
            )
        self._event_queue.put(fact)
        lines.write(**answer.model_dump())

    def _certificate(self, asked: Asked, address: str) -> str:
        if not asked.request:
            raise RequestRefused(
                "the VM's Python has not what certificates are made with: add cryptography to vms.environment.packages"
            )
        key = requested_key(asked.request, asked.node, address)
        return self._authority.certify(key, asked.node, address, LIFE, self._moment()).decode()

"""Where VMs get their certificates: the answer to a ``certificate`` message (``manager.notices.call``)."""

from __future__ import annotations

import datetime
from collections.abc import Callable

from pydantic import Field

from manager.engine.loop.event_queue import EventQueue
from manager.enrolment.authority import RequestRefused, now, requested_key
from manager.journal.records import Fact
from morph.contract.base import Value
from morph.link.authority import Authority

LIFE = datetime.timedelta(days=30)
"""A VM gets another one each time its node starts."""


class CertificateRequest(Value):
    """What a node wants to be signed."""

    node: str = Field(pattern=r"^[a-z0-9-]{1,64}$")
    request: str = Field(max_length=4096, description="for a key of P-256 some 600 characters")


class EnrolmentDesk:
    """Signs for a node that has proven the nodes' secret, for the address from which it comes and no other.

    Args:
        event_queue: Where the facts ``node_enrolled`` and ``enrolment_refused`` go.
        authority: Of the run.
        moment: The time.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        authority: Authority,
        moment: Callable[[], datetime.datetime] = now,
    ) -> None:
        self._event_queue, self._authority, self._moment = event_queue, authority, moment

    def answer(self, node: str, request: object, address: str) -> dict[str, str]:
        """Return what a node is told: a certificate, or why there is none.

        Args:
            node: Its name, which it has proven.
            request: What it sent.
            address: From which it comes.

        Raises:
            ValidationError: it asks in another form.
        """
        requested = CertificateRequest.model_validate({"node": node, "request": request})
        try:
            certificate = self._certificate(requested, address)
        except RequestRefused as refusal:
            self._event_queue.put(Fact(name="enrolment_refused", detail=f"{node}: {refusal}"))
            return {"refused": str(refusal)}
        self._event_queue.put(Fact(name="node_enrolled", detail=f"{node} at {address}"))
        return {"certificate": certificate}

    def _certificate(self, requested: CertificateRequest, address: str) -> str:
        key = requested_key(requested.request, requested.node, address)
        return self._authority.certify(key, requested.node, address, LIFE, self._moment()).decode()

"""Issues certificates to VMs, in answer to a ``certificate`` message (``manager.notices.call``)."""

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
"""The validity of a certificate: a VM gets a new one each time its node starts."""


class CertificateRequest(Value):
    """A node's request for a certificate."""

    node: str = Field(pattern=r"^[a-z0-9-]{1,64}$")
    request: str = Field(max_length=4096, description="about 600 characters for a key of P-256")


class EnrolmentDesk:
    """Signs certificates for nodes that have proven the nodes' secret, each valid only for the address of the call.

    ``event_queue`` receives the facts ``node_enrolled`` and ``enrolment_refused``.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        authority: Authority,
        moment: Callable[[], datetime.datetime] = now,
    ) -> None:
        self._event_queue, self._authority, self._moment = event_queue, authority, moment

    def answer(self, node: str, request: object, address: str) -> dict[str, str]:
        """Return a certificate for a node that has proven its name, or the reason for a refusal.

        ``address``: that from which it calls. ValidationError if the request is malformed.
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

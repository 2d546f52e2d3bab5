"""What a VM that wants a certificate and its manager say to one another: three lines of ``manager.notices.line``.

::

    manager   {"nonce": N}
    node      {"node": NODE, "fresh": F, "request": CSR, "proof": P("request", N, F, NODE, CSR)}
    manager   {"certificate": PEM, "proof": P("certificate", N, F, NODE, CSR, PEM)}
          or  {"refused": SENTENCE, "proof": P("refused", N, F, NODE, CSR, SENTENCE)}

N and F are 256 random bits each, the manager's and the node's, for one connection. CSR is the node's signing request in
PEM, empty where the node has nothing to make one with. P is the HMAC-SHA256 under the nodes' secret of the JSON list
of ``LABEL`` and what is named, in which no part can be taken for the end of another.

What follows: whoever has not the secret can make neither line, nor change a sign of one: name, request, certificate and
refusal are all covered. A line that was overheard is worth nothing on another connection, for one of its numbers is
chosen anew by the side that checks it. The answer is bound to this request, so it cannot belong to another key or node.
The kind keeps one line from standing for another, and the list an agent's proof, which begins with a word, from either.
The request proves by its own signature that the node has the key. Nothing that is sent is secret.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from morph.contract.base import Value
from morph.contract.proof import is_proven, proof

LABEL = "morph-enrolment"
MAX_REQUEST_CHARACTERS = 4096
"""One for a P-256 key has some 600."""
MAX_ANSWER_CHARACTERS = 16384
HEX_256 = r"^[0-9a-f]{64}$"


class Asked(Value):
    """The node's line."""

    node: str = Field(pattern=r"^[a-z0-9-]{1,64}$")
    fresh: str = Field(pattern=HEX_256)
    request: str = Field(max_length=MAX_REQUEST_CHARACTERS)
    proof: str = Field(pattern=HEX_256)


class Answered(Value):
    """The manager's line: a certificate, or why there is none."""

    certificate: str = Field(default="", max_length=MAX_ANSWER_CHARACTERS)
    refused: str = Field(default="", max_length=MAX_ANSWER_CHARACTERS)
    proof: str = Field(pattern=HEX_256)


@dataclass(frozen=True)
class Exchange:
    """One connection, with what both sides know of it once the node has asked."""

    secret: str
    nonce: str
    fresh: str
    node: str
    request: str

    def ask(self) -> Asked:
        """Return the node's line."""
        return Asked(node=self.node, fresh=self.fresh, request=self.request, proof=self._proof("request"))

    def is_asked(self, asked: Asked) -> bool:
        """Whether the node's line was made with the secret, for this connection."""
        return is_proven(asked.proof, self.secret, *self._parts("request"))

    def certify(self, certificate: str) -> Answered:
        """Return the manager's line with a certificate."""
        return Answered(certificate=certificate, proof=self._proof("certificate", certificate))

    def refuse(self, sentence: str) -> Answered:
        """Return the manager's line with what is wrong."""
        return Answered(refused=sentence, proof=self._proof("refused", sentence))

    def is_answered(self, answered: Answered) -> bool:
        """Whether the manager's line was made with the secret, for this request on this connection."""
        if bool(answered.certificate) == bool(answered.refused):
            return False
        kind, content = ("certificate", answered.certificate) if answered.certificate else ("refused", answered.refused)
        return is_proven(answered.proof, self.secret, *self._parts(kind, content))

    def _proof(self, kind: str, *content: str) -> str:
        return proof(self.secret, *self._parts(kind, *content))

    def _parts(self, kind: str, *content: str) -> tuple[str, ...]:
        return (LABEL, kind, self.nonce, self.fresh, self.node, self.request, *content)

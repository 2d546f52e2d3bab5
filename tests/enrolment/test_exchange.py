"""What a proof covers: every sign of either line, and the connection it is sent on."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from manager.enrolment.exchange import MAX_REQUEST_CHARACTERS, Answered, Asked, Exchange
from manager.notices.line import Handshake
from morph.contract.proof import new_secret

SECRET, NONCE, FRESH = "s3cret-of-this-run", "ab" * 32, "cd" * 32


def exchange(**changes: str) -> Exchange:
    return Exchange(**{"secret": SECRET, "nonce": NONCE, "fresh": FRESH, "node": "n1", "request": "CSR"} | changes)


OTHERS = [{"secret": "wrong"}, {"nonce": "ef" * 32}, {"fresh": "ef" * 32}, {"node": "n2"}, {"request": "CSR2"}]


def test_both_lines_are_believed_on_their_own_connection() -> None:
    assert exchange().is_asked(exchange().ask())
    assert exchange().is_answered(exchange().certify("PEM"))
    assert exchange().is_answered(exchange().refuse("no"))


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_neither_line_is_believed_with_anything_else(other: dict[str, str]) -> None:
    assert not exchange().is_asked(exchange(**other).ask())
    assert not exchange().is_answered(exchange(**other).certify("PEM"))
    assert not exchange().is_answered(exchange(**other).refuse("no"))


def test_a_proof_stands_for_its_own_kind_alone() -> None:
    asked, granted, refused = exchange().ask(), exchange().certify("same"), exchange().refuse("same")
    assert len({asked.proof, granted.proof, refused.proof}) == 3
    assert not exchange().is_answered(Answered(refused="same", proof=granted.proof))
    assert not exchange().is_answered(Answered(certificate="same", proof=refused.proof))
    assert not exchange().is_answered(Answered(certificate="other", proof=granted.proof))
    for nothing in (Answered(proof=asked.proof), Answered(certificate="a", refused="a", proof=granted.proof)):
        assert not exchange().is_answered(nothing)


def test_no_part_can_be_taken_for_the_end_of_another() -> None:
    assert exchange(node="n1", request="2CSR").ask().proof != exchange(node="n12", request="CSR").ask().proof
    assert exchange(request="CSRP").certify("EM").proof != exchange(request="CSR").certify("PEM").proof


def test_an_agents_proof_is_none_here_whatever_it_was_made_to_sign() -> None:
    asked = exchange().ask()
    for nonce in (NONCE, '["morph-enrolment", "request"', f"{NONCE} {FRESH}"):
        given = Handshake(SECRET, nonce, FRESH, "n1", 1).hello()["proof"]
        assert not exchange().is_asked(asked.model_copy(update={"proof": given}))


@pytest.mark.parametrize(
    "change",
    [
        {"node": "n1.n2"},
        {"node": ""},
        {"node": "n" * 65},
        {"node": "N1\n"},
        {"fresh": "short"},
        {"proof": "x" * 64},
        {"request": "x" * (MAX_REQUEST_CHARACTERS + 1)},
        {"more": "1"},
    ],
    ids=str,
)
def test_a_line_of_another_form_is_none(change: dict[str, str]) -> None:
    line = Asked(node="n1", fresh=FRESH, request="CSR", proof=new_secret()).model_dump()
    with pytest.raises(ValidationError):
        Asked.model_validate(line | change)

"""A worker's last order and answer: a repeated order is not carried out twice.

A manager that takes over repeats every order whose answer its predecessor did not record. Orders come one at a time,
so a repeated order waits until the first is done, and finds its answer here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from morph.contract.messages import CommitOrder, ReshapeOrder, StepOrder

AnswerT = TypeVar("AnswerT")


class OrderKey(NamedTuple):
    """The identity of an order, which a repeated order shares; it grows from one order of a worker to the next."""

    generation: int
    version: int
    rank: int
    attempt: int


def order_key(order: ReshapeOrder | StepOrder | CommitOrder) -> OrderKey:
    """Return the identity of an order. A generation is formed at a version, which may be committed before the step from
    it.
    """
    match order:
        case ReshapeOrder():
            return OrderKey(order.generation, order.version, 0, 0)
        case CommitOrder():
            return OrderKey(order.generation, order.version, 1, order.evaluated.version if order.evaluated else 0)
        case StepOrder():
            return OrderKey(order.generation, order.step, 2, order.attempt)


class OrderMemory:
    """Remembers one order, because answers to older ones are never requested."""

    def __init__(self) -> None:
        self._newest: OrderKey | None = None
        self._answer: object = None

    def is_late(self, key: OrderKey) -> bool:
        """Return whether a later order came earlier; if so, nothing waits for the answer to this one."""
        return self._newest is not None and key < self._newest

    def is_known(self, key: OrderKey) -> bool:
        """Return whether exactly this order was carried out."""
        return key == self._newest

    def carried_out(self, key: OrderKey, work: Callable[[], AnswerT]) -> AnswerT:
        """Return the answer to an order: the remembered one, or the result of carrying it out now."""
        if key != self._newest:
            self._answer, self._newest = work(), key
        return self._answer  # type: ignore[return-value]  # of the same kind of order

"""Several optimizers as one: ``morph.Optimizers``, which ``Job.optimizer`` may return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch.nn import Parameter
from torch.optim import Optimizer


class Optimizers(Optimizer):
    """Several optimizers as one, each for some of the parameters: for example Muon for matrices, AdamW for the rest.

    All of them minimise the same loss. The sum of the losses of two players (GAN) would train each player on the
    other's loss too, which no check can see: such loops need ``morph.elastic``.

    Args:
        parts: Pairs of parameters and a function that builds their optimizer; a part without parameters is left out.

    Attributes:
        parts: The optimizers. Their groups and state are also those of the whole.
    """

    def __init__(self, *parts: tuple[Iterable[Parameter], Callable[[list[Parameter]], Optimizer]]) -> None:
        self.parts = [make(found) for given, make in parts if (found := list(given))]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override] # two overloads
        """Let each part make its step."""
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss


def parts_of(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers that step: this one, or its parts."""
    if isinstance(optimizer, Optimizers):
        for part in optimizer.parts:
            yield from parts_of(part)
    else:
        yield optimizer


def kind_of(optimizer: Optimizer) -> str:
    """Return the classes of the optimizers that step."""
    return ", ".join(type(part).__name__ for part in parts_of(optimizer))

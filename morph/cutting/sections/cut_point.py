"""The mark that a user puts into a forward to say where the model may be cut."""

from __future__ import annotations

from torch import Tensor, nn


class CutPoint(nn.Module):
    """A place where the model is cut: returns the tensor that it is given.

    Make one in the constructor and call it in ``forward``, where only this tensor is needed from before::

        self.cut = morph.CutPoint()
        ...
        hidden = self.cut(hidden)

    A model with marks is cut there and nowhere else. The same one may be called several times, in a loop.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` of any shape, as it is."""
        return hidden.view_as(hidden)

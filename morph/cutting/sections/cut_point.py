"""The mark that a user puts into a forward where the model may be cut."""

from __future__ import annotations

from torch import Tensor, nn


class CutPoint(nn.Module):
    """A place where the model is cut; returns its argument.

    Make one in the constructor, and call it in ``forward`` at a place where later code needs only this tensor::

        self.cut = morph.CutPoint()
        ...
        hidden = self.cut(hidden)

    A model with marks is cut only there. One ``CutPoint`` may be called several times, for example in a loop.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden``, a tensor of any shape, unchanged."""
        return hidden.view_as(hidden)

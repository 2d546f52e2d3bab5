"""Memory of an emulated device, counted and not taken."""

from __future__ import annotations

import torch


class DeviceMemory:
    """What one stage holds, against the device's memory.

    Args:
        limit_bytes: The device's memory; None: no limit.
        held_bytes: Parameters, optimizer state and gradients.
        input_bytes: Each micro-batch of which only the stage's input is stored.
        activation_bytes: Each micro-batch whose activations are kept.
        extra_bytes: Taken beyond all of that while a task runs.
    """

    def __init__(
        self, limit_bytes: int | None, held_bytes: int, input_bytes: int, activation_bytes: int, extra_bytes: int
    ) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = held_bytes
        self._input_bytes = input_bytes
        self._activation_bytes = activation_bytes
        self._extra_bytes = extra_bytes
        self.peak_bytes = 0
        self.use(0, 0)

    def use(self, num_inputs: int, num_activations: int) -> None:
        """Count a task that runs while so many inputs are stored and so many micro-batches' activations kept.

        Raises:
            torch.OutOfMemoryError: that is more than there is, as a real device's allocator says it.
        """
        kept_bytes = num_inputs * self._input_bytes + num_activations * self._activation_bytes
        needed_bytes = self._held_bytes + kept_bytes + self._extra_bytes
        self.peak_bytes = max(self.peak_bytes, needed_bytes)
        if self._limit_bytes is not None and needed_bytes > self._limit_bytes:
            raise torch.OutOfMemoryError(
                f"the emulated device is out of memory: {needed_bytes} bytes are needed ({self._held_bytes} of state, "
                f"{num_inputs} stored inputs, {num_activations} micro-batches' activations), {self._limit_bytes} there"
            )

"""What a worker's device is to whatever carries its tensors: streams, events, pinned memory; and links over it."""

"""Where to cut: costs, repeated blocks, and the resulting sections."""

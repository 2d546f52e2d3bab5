"""Where to cut: costs, repeated blocks, and the sections that come of it."""

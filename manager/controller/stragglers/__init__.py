"""Workers that are alive but slow (fail-stutter)."""

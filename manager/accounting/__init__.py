"""The uses of a run's node-seconds and money."""

"""The uses of a run's worker-seconds and money."""

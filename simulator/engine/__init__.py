"""Mini-batches played to the nanosecond: the compiled loops and their schedules."""

"""Which shape is best: partitions, windows, sweeps, objectives."""

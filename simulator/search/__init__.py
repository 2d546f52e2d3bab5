"""The search for the best shape: partitions, windows, sweeps, objectives."""

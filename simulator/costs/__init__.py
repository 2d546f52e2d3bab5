"""Costs of stages in time and memory, lower bounds on mini-batches, and the resulting answers."""

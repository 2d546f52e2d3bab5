"""Preemptions on purpose: who is taken when, and asking the manager of a living run for it."""

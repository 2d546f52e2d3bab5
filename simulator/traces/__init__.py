"""Spot traces: what they say in figures, models fitted to them, traces drawn from a model, formats of others."""

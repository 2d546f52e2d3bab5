"""Spot traces: statistics, fitted models, traces drawn from models, and formats of other projects."""

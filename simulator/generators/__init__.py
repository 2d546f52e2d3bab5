"""Profiles and traces drawn from a seed."""

"""Trying a job on its first samples before it is cut."""

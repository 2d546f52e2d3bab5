"""Schedules on slow and jittery links."""

"""Clocks, and what repeated measurements say."""

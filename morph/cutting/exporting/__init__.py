"""Exports the user's model as a graph of known operations."""

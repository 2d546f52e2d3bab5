"""Ordinary steps, rests between them, and checkpoints."""

"""Reads a run back from its journal: shapes, morphs, losses, times."""

"""Conditions of a plan: nodes, links, jitter, slow workers and shared cores."""

"""Machines that a user lists by hand, reached by ssh."""

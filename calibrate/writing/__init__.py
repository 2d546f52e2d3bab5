"""From measurements to a written profile."""

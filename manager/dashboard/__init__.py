"""The page of a run, served on loopback by its manager."""

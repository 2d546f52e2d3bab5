"""A managed run from nothing to nothing."""

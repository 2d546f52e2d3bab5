"""A run from what is requested to its end: read, checked, run or taken over."""

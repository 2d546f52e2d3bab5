"""A run from what is asked for to its end: read, checked, run or taken over."""

"""A run from its request to its end: read, checked, and run or taken over."""

"""A second holder on another VM: units kept in step there, and copies of partial sums (decision 0019)."""

"""What one shape costs and why: expectation, lower bound, time breakdown, timeline."""

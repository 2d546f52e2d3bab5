"""The spot-cluster simulator: the cost and end of a job on spot VMs, under different policies."""

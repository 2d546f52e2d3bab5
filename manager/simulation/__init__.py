"""The spot-cluster simulator: what a job on spot VMs will cost and when it ends, under which policy."""

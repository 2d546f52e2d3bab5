"""Where VMs and workers come in: certificates, notices, liveness."""

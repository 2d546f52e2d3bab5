"""How VMs and workers join a run: certificates, notices, liveness."""

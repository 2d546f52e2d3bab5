"""VMs of a provider: requested, paid for, ended."""

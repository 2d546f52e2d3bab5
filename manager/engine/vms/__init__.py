"""VMs of a provider: asked for, paid for, ended."""

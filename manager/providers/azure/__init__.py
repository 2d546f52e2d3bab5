"""Azure: VMs of scale sets."""

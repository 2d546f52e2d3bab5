"""Asking for VMs, and notices that some will be taken."""

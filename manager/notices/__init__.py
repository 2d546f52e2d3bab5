"""Warnings of a cloud that a VM will be taken: polled on the VM itself, and passed on to the manager."""

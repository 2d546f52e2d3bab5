"""Warnings of a cloud that a VM will be taken: requested on the VM itself, told to the manager."""

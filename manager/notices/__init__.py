"""Warnings of a cloud that a VM will be taken: asked for on the VM itself, told to the manager."""

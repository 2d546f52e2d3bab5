"""Names that the manager and the process with the local Ray nodes share."""

VM_RESOURCE = "morph_vm_"
HEAD_RESOURCE = "morph_head"
LOOPBACK = "127.0.0.2"
"""Of the loopback network, but not 127.0.0.1: Ray replaces that by the address of a real interface."""

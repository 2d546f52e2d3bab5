"""A cloud's notices that a VM will be taken: polled on the VM, and passed on to the manager."""

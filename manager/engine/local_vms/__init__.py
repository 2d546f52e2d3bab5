"""VMs of this machine: who owns their processes, and how they come and go."""

"""VMs on this machine: the owner of their processes, and how they come and go."""
